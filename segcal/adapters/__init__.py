"""Thin shells around the maths, one per host."""
