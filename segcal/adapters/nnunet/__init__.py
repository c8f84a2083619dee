"""nnU-Net v2: trainers, the ways nnU-Net finds them, training and prediction."""
