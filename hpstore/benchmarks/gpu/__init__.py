"""Benchmarks of reads into GPU memory, stage by stage."""
