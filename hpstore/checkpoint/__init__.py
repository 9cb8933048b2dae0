"""Checkpoints: staged in one copy, written erasure-coded in the background, committed at once."""

if not __name__.startswith("hpstore."):
    raise ImportError(f"import hpstore.checkpoint, not {__name__}: see CONTRIBUTING.md")

from hpstore.checkpoint.checkpointer import Checkpointer, VerifyReport
from hpstore.checkpoint.dcp_reading import SafeLoadPlanner, StorageReader
from hpstore.checkpoint.dcp_stager import Stager
from hpstore.checkpoint.dcp_writing import StorageWriter
from hpstore.checkpoint.export import ExportReport, export_checkpoint
from hpstore.checkpoint.handles import SaveHandle, SaveReport
from hpstore.checkpoint.importing import ImportReport, import_checkpoint
from hpstore.checkpoint.manifest import Manifest
from hpstore.checkpoint.preemption import Preempted
from hpstore.checkpoint.restoring import RestoreReport, SavedStep, SavedTensor
from hpstore.checkpoint.retention import Best

__all__ = ["Best", "Checkpointer", "ExportReport", "ImportReport", "Manifest", "Preempted",
           "RestoreReport",
           "SafeLoadPlanner", "SaveHandle", "SaveReport", "SavedStep", "SavedTensor", "Stager",
           "StorageReader", "StorageWriter", "VerifyReport", "export_checkpoint",
           "import_checkpoint"]  # fmt: skip
