"""Readers of data sets for classification."""
