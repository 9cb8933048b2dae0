"""Benchmarks of checkpoints: stall, time until durable, load, beside other savers."""
