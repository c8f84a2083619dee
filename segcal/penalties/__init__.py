"""Penalties: what a calibrated network's logits should look like."""
