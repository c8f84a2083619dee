"""Studies of segmentation: recipes x networks x data sets x seeds, and what they are worth."""
