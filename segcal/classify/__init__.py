"""Classification: classes that exclude each other, or several labels; from reading to report."""
