"""Checkpoints: staged in one copy, written erasure-coded in the background, committed at once."""

if not __name__.startswith("hpstore."):
    raise ImportError(f"import hpstore.checkpoint, not {__name__}: see CONTRIBUTING.md")

from hpstore.checkpoint.catalog.hidden_steps import Rollback
from hpstore.checkpoint.catalog.retention import Best, RetentionRule, StepDecision
from hpstore.checkpoint.checkpointer import Checkpointer
from hpstore.checkpoint.convert.export import ExportReport, export_checkpoint
from hpstore.checkpoint.convert.format_utils import dcp_to_torch_save, torch_save_to_dcp
from hpstore.checkpoint.convert.import_files import ImportReport, import_checkpoint
from hpstore.checkpoint.convert.torch_objects import torch_load, torch_save
from hpstore.checkpoint.dcp.dcp_stager import Stager
from hpstore.checkpoint.dcp.storage_reader import SafeLoadPlanner, StorageReader
from hpstore.checkpoint.dcp.storage_writer import StorageWriter
from hpstore.checkpoint.diff.step_diff import StepDiff
from hpstore.checkpoint.format.checkpoint_manifest import Manifest
from hpstore.checkpoint.inference import load_model
from hpstore.checkpoint.ranks.stop_step import Preempted
from hpstore.checkpoint.restore.fill_state import RestoreReport
from hpstore.checkpoint.restore.load_options import LoadOptions
from hpstore.checkpoint.restore.saved_step import SavedStep, SavedTensor
from hpstore.checkpoint.restore.verify_step import VerifyReport
from hpstore.checkpoint.save.save_handle import SaveHandle, SaveReport
from hpstore.checkpoint.save.save_options import SaveOptions
from hpstore.checkpoint.save.save_policies import (
    AnyOf,
    AtTimes,
    EveryInterval,
    EverySteps,
    OnPredicate,
    SavePolicy,
)
from hpstore.checkpoint.steps import Steps
from hpstore.checkpoint.terminal_bar import TerminalBar
from hpstore.checkpoint.tiers.copy_step import CopyReport
from hpstore.checkpoint.tiers.tier import Tier
from hpstore.checkpoint.tiers.tier_copies import Tiers

__all__ = [
    "AnyOf",
    "AtTimes",
    "Best",
    "Checkpointer",
    "CopyReport",
    "EveryInterval",
    "EverySteps",
    "ExportReport",
    "ImportReport",
    "LoadOptions",
    "Manifest",
    "OnPredicate",
    "Preempted",
    "RestoreReport",
    "RetentionRule",
    "Rollback",
    "SafeLoadPlanner",
    "SaveHandle",
    "SaveOptions",
    "SavePolicy",
    "SaveReport",
    "SavedStep",
    "SavedTensor",
    "Stager",
    "StepDecision",
    "StepDiff",
    "Steps",
    "StorageReader",
    "StorageWriter",
    "TerminalBar",
    "Tier",
    "Tiers",
    "VerifyReport",
    "dcp_to_torch_save",
    "export_checkpoint",
    "import_checkpoint",
    "load_model",
    "torch_load",
    "torch_save",
    "torch_save_to_dcp",
]
