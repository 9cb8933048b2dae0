"""From a committed step into a training state."""
