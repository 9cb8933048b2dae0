"""A training state as a tree of values and tensors, and back."""
