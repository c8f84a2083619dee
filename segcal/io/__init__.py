"""Reads files into arrays, and writes arrays to files."""
