"""Writes reports: tables, figures and HTML pages."""
