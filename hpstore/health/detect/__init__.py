"""From timings and errors of reads to evidence about devices."""
