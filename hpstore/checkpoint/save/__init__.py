"""From a training state into a committed step."""
