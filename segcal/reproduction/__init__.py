"""Conventions and faults of published programs, kept to compare with their results."""
