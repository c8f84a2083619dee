"""nnU-Net v2: segcal's trainers, how nnU-Net finds them, training and prediction."""
