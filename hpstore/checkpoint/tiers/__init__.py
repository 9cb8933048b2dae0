"""Further pools behind the one that a run saves into: copies of its steps, and restores."""
