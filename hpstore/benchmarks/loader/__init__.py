"""Benchmarks of the DataLoader beside other loaders."""
