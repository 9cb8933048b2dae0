"""Turning what others wrote into data sets: sources of samples, and `ingest`."""

from hpstore.loaders.ingest.journal import unfinished_ingests
from hpstore.loaders.ingest.opening import open_source
from hpstore.loaders.ingest.report import IngestProgress, IngestReport
from hpstore.loaders.ingest.run import ingest

__all__ = ["IngestProgress", "IngestReport", "ingest", "open_source", "unfinished_ingests"]
