"""Losses: how far probabilities are from the labels."""
