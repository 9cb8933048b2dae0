"""Benchmarks of pipeline-parallel training with and without saves."""
