"""The steps of a run: which there are, which go, who may write."""
