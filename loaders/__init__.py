"""Feeding training from a pool. Today: a corpus of byte tokens; data sets come next."""

if not __name__.startswith("hpstore."):
    raise ImportError(f"import hpstore.loaders, not {__name__}: see CONTRIBUTING.md")

from hpstore.loaders.tokens import TokenBatches, TokenCorpus, write_corpus

__all__ = ["TokenBatches", "TokenCorpus", "write_corpus"]
