"""Repair of finished predictions: calibrators fitted to files, applied to files and compared."""
