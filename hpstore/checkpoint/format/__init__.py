"""What a checkpoint is on a pool: manifest, items, segments."""
