"""Datasets as Zarr groups, and Zarr arrays as datasets."""
