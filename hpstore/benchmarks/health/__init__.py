"""Benchmarks of device health: detector, forecast, degraded reads, rebuild."""
