"""Pools: create, open, and what one does."""
