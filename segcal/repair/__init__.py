"""Repairs finished predictions: fits post-hoc calibrators to files, applies and compares them."""
