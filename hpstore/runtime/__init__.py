"""Threads, memory, clocks and counters of one process."""
