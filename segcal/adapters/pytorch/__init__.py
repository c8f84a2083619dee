"""Classification in plain PyTorch: networks, training, and studies of many trainings."""
