"""Adapters that keep the checkpoints of other trainers in a pool (docs/trainers.md), and hooks for
pipeline-parallel ones (docs/pipeline.md).

Each adapter's package is imported when its name is first used, so that no trainer is needed for
another: `pip install hpstore[lightning]`, `[huggingface]`, `[torch-checkpointing]`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpstore.trainers.huggingface import HPAccelerate, HPLoader, HPTrainerCallback
    from hpstore.trainers.lightning import HPCheckpointIO, RequireUsedIO
    from hpstore.trainers.pipelining.hooks import PipelineHooks
    from hpstore.trainers.pipelining.idle_time import BubbleReport
    from hpstore.trainers.pipelining.step_record import StepRecord
    from hpstore.trainers.torch_checkpointing import HPStorage, HPStorageConfig

_HOMES = {
    "BubbleReport": "hpstore.trainers.pipelining.idle_time",
    "HPAccelerate": "hpstore.trainers.huggingface",
    "HPCheckpointIO": "hpstore.trainers.lightning",
    "HPLoader": "hpstore.trainers.huggingface",
    "HPStorage": "hpstore.trainers.torch_checkpointing",
    "HPStorageConfig": "hpstore.trainers.torch_checkpointing",
    "HPTrainerCallback": "hpstore.trainers.huggingface",
    "PipelineHooks": "hpstore.trainers.pipelining.hooks",
    "RequireUsedIO": "hpstore.trainers.lightning",
    "StepRecord": "hpstore.trainers.pipelining.step_record",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


__all__ = ["BubbleReport", "HPAccelerate", "HPCheckpointIO", "HPLoader", "HPStorage",
           "HPStorageConfig", "HPTrainerCallback", "PipelineHooks", "RequireUsedIO",
           "StepRecord"]  # fmt: skip
