"""Turning what others wrote into datasets: sources of samples, and `ingest`."""

from hpstore.loaders.ingestion.ingest_journal import unfinished_ingests
from hpstore.loaders.ingestion.ingest_parts import PartsProgress, PartsReport, ingest_parts
from hpstore.loaders.ingestion.ingest_report import IngestProgress, IngestReport
from hpstore.loaders.ingestion.ingest_run import ingest
from hpstore.loaders.ingestion.ingest_splits import ingest_splits
from hpstore.loaders.ingestion.open_source import open_source

__all__ = [
    "IngestProgress",
    "IngestReport",
    "PartsProgress",
    "PartsReport",
    "ingest",
    "ingest_parts",
    "ingest_splits",
    "open_source",
    "unfinished_ingests",
]
