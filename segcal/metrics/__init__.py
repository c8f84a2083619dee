"""Metrics of one case, computed from arrays."""
