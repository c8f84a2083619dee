"""MONAI: metrics for its evaluators."""
