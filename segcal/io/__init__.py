"""Files in, arrays out, and back."""
