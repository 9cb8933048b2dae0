"""Feeding training from a pool: data sets and how to write them, a corpus of byte tokens."""

if not __name__.startswith("hpstore."):
    raise ImportError(f"import hpstore.loaders, not {__name__}: see CONTRIBUTING.md")

from hpstore.loaders.dataset import Dataset
from hpstore.loaders.fields import Field
from hpstore.loaders.tokens import TokenBatches, TokenCorpus, write_corpus
from hpstore.loaders.writer import DatasetWriter

__all__ = ["Dataset", "DatasetWriter", "Field", "TokenBatches", "TokenCorpus", "write_corpus"]
