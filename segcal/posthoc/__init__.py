"""Post-hoc calibration: a finished model's logits are repaired by what held-out cases show."""
