"""The command line: one module per verb of `segcal`."""
