"""Losses of multi-label classification: any number of labels per sample, some of them unknown."""
