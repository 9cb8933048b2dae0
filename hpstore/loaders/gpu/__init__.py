"""Batches in GPU memory."""
