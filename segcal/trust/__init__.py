"""Predictions without references: which case to check, how large a structure is, how sure."""
