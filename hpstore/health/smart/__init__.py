"""SMART counters of disks."""
