"""Feeding training from a pool: datasets, how to write them, and the DataLoader."""

if not __name__.startswith("hpstore."):
    raise ImportError(f"import hpstore.loaders, not {__name__}: see CONTRIBUTING.md")

from typing import TYPE_CHECKING

from hpstore.loaders.batching.loader_options import GpuTransfer, LoaderMemory
from hpstore.loaders.batching.mixture import Mixture
from hpstore.loaders.batching.packing import Packing, cu_seqlens, document_mask
from hpstore.loaders.cache import Cache
from hpstore.loaders.dataset.batch_values import Ragged
from hpstore.loaders.dataset.dataset import Dataset
from hpstore.loaders.dataset.dataset_versions import DatasetVersion, delete_version, list_versions
from hpstore.loaders.dataset.fields import Field
from hpstore.loaders.dataset.image_decode import ImageDecode
from hpstore.loaders.dataset.publish_dataset import DatasetInfo, list_datasets, publish_parts
from hpstore.loaders.dataset.remove_dataset import delete_dataset, remove_orphans
from hpstore.loaders.dataset.row_filter import filtered_rows
from hpstore.loaders.dataset.stored_manifests import written_parts
from hpstore.loaders.dataset.verify_dataset import DatasetReport, verify_dataset
from hpstore.loaders.ingestion import (
    IngestProgress,
    IngestReport,
    PartsProgress,
    PartsReport,
    ingest,
    ingest_parts,
    ingest_splits,
    open_source,
    unfinished_ingests,
)
from hpstore.loaders.loader import DataLoader
from hpstore.loaders.sampling.order import Order
from hpstore.loaders.sampling.weighted import WeightedOrder
from hpstore.loaders.writer.dataset_changes import add_field, delete_rows
from hpstore.loaders.writer.dataset_writer import DatasetWriter

if TYPE_CHECKING:
    from hpstore.loaders.zarr_views.array_dataset import ZarrDataset
    from hpstore.loaders.zarr_views.dataset_store import DatasetStore

__all__ = [
    "Cache",
    "DataLoader",
    "Dataset",
    "DatasetInfo",
    "DatasetReport",
    "DatasetStore",
    "DatasetVersion",
    "DatasetWriter",
    "Field",
    "GpuTransfer",
    "ImageDecode",
    "IngestProgress",
    "IngestReport",
    "LoaderMemory",
    "Mixture",
    "Order",
    "Packing",
    "PartsProgress",
    "PartsReport",
    "Ragged",
    "WeightedOrder",
    "ZarrDataset",
    "add_field",
    "cu_seqlens",
    "delete_dataset",
    "delete_rows",
    "delete_version",
    "document_mask",
    "filtered_rows",
    "ingest",
    "ingest_parts",
    "ingest_splits",
    "list_datasets",
    "list_versions",
    "open_source",
    "publish_parts",
    "remove_orphans",
    "unfinished_ingests",
    "verify_dataset",
    "written_parts",
]


def __getattr__(name: str) -> object:
    """The two that need zarr, which is imported with the first of them."""
    if name == "DatasetStore":
        from hpstore.loaders.zarr_views.dataset_store import DatasetStore

        return DatasetStore
    if name == "ZarrDataset":
        from hpstore.loaders.zarr_views.array_dataset import ZarrDataset

        return ZarrDataset
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
