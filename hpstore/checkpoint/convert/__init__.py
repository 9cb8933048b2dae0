"""Checkpoints of other formats: import and export."""
