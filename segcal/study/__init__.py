"""Studies of segmentation: sets x networks x recipes x seeds, trained, repaired and measured."""
