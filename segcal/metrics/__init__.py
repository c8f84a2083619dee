"""Metrics: numbers of one case, on arrays."""
