"""Recorded requests of other people's caches: readers, comparisons of policies."""
