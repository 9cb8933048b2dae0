"""Turning what others wrote into data sets: sources of samples, and `ingest`."""

from hpstore.loaders.ingestion.journal import unfinished_ingests
from hpstore.loaders.ingestion.opening import open_source
from hpstore.loaders.ingestion.report import IngestProgress, IngestReport
from hpstore.loaders.ingestion.run import ingest

__all__ = ["IngestProgress", "IngestReport", "ingest", "open_source", "unfinished_ingests"]
