"""Turning what others wrote into data sets: sources of samples, and `ingest`."""

from hpstore.loaders.ingest.report import IngestProgress, IngestReport
from hpstore.loaders.ingest.run import ingest

__all__ = ["IngestProgress", "IngestReport", "ingest"]
