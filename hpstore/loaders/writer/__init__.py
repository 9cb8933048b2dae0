"""Writing datasets."""
