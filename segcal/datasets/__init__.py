"""Data sets made or converted by segcal."""
