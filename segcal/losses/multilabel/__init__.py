"""Losses of multi-label classification: a sample has any number of labels, some unknown."""
