"""Benchmarks of the block cache: hit rates on traces, cost, end to end."""
