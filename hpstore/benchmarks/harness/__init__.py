"""What all benchmarks share: sessions, measurements, raw rates, reports."""
