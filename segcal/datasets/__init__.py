"""Converts public data sets to nnU-Net's raw layout, and generates phantoms."""
