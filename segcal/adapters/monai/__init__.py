"""MONAI: losses and handlers for its trainers, metrics for its evaluators."""
