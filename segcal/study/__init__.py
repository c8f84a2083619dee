"""Studies of segmentation: recipes x networks x data sets x seeds, trained and compared."""
