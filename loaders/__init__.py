"""Feeding training from a pool: data sets and how to write them, a corpus of byte tokens."""

if not __name__.startswith("hpstore."):
    raise ImportError(f"import hpstore.loaders, not {__name__}: see CONTRIBUTING.md")

from hpstore.loaders.dataset import Dataset
from hpstore.loaders.fields import Field
from hpstore.loaders.publishing import (
    DatasetInfo,
    delete_dataset,
    list_datasets,
    publish_parts,
    remove_orphans,
    written_parts,
)
from hpstore.loaders.tokens import TokenBatches, TokenCorpus, write_corpus
from hpstore.loaders.verifying import DatasetReport, verify_dataset
from hpstore.loaders.writer import DatasetWriter

__all__ = ["Dataset", "DatasetInfo", "DatasetReport", "DatasetWriter", "Field", "TokenBatches",
           "TokenCorpus", "delete_dataset", "list_datasets", "publish_parts", "remove_orphans",
           "verify_dataset", "write_corpus", "written_parts"]  # fmt: skip
