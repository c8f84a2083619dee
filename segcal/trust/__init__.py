"""Judges predictions without references: which case to check, and how large structures are."""
