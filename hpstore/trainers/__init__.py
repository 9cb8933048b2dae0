"""Adapters that keep the checkpoints of other trainers in a pool (docs/trainers.md), and hooks for
pipeline-parallel ones (docs/pipeline.md).

Each adapter's package is imported when its name is first used, so that no trainer is needed for
another: `pip install hpstore[lightning]`, `[huggingface]`, `[ignite]`,
`[torch-checkpointing]`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpstore.trainers.accelerate_states import PoolAccelerate, PoolLoader
    from hpstore.trainers.huggingface import PoolTrainerCallback
    from hpstore.trainers.ignite import PoolSaveHandler
    from hpstore.trainers.lightning import PoolCheckpointIO, RequireUsedIO
    from hpstore.trainers.pipelining.hooks import PipelineHooks
    from hpstore.trainers.pipelining.idle_time import BubbleReport
    from hpstore.trainers.pipelining.step_record import StepRecord
    from hpstore.trainers.pretrained import load_pretrained, save_pretrained
    from hpstore.trainers.save_tracker import SaveTracker
    from hpstore.trainers.torch_checkpointing import PoolStorage, PoolStorageConfig

_HOMES = {
    "BubbleReport": "hpstore.trainers.pipelining.idle_time",
    "PipelineHooks": "hpstore.trainers.pipelining.hooks",
    "PoolAccelerate": "hpstore.trainers.accelerate_states",
    "PoolCheckpointIO": "hpstore.trainers.lightning",
    "PoolLoader": "hpstore.trainers.accelerate_states",
    "PoolSaveHandler": "hpstore.trainers.ignite",
    "PoolStorage": "hpstore.trainers.torch_checkpointing",
    "PoolStorageConfig": "hpstore.trainers.torch_checkpointing",
    "PoolTrainerCallback": "hpstore.trainers.huggingface",
    "RequireUsedIO": "hpstore.trainers.lightning",
    "SaveTracker": "hpstore.trainers.save_tracker",
    "StepRecord": "hpstore.trainers.pipelining.step_record",
    "load_pretrained": "hpstore.trainers.pretrained",
    "save_pretrained": "hpstore.trainers.pretrained",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


__all__ = [
    "BubbleReport",
    "PipelineHooks",
    "PoolAccelerate",
    "PoolCheckpointIO",
    "PoolLoader",
    "PoolSaveHandler",
    "PoolStorage",
    "PoolStorageConfig",
    "PoolTrainerCallback",
    "RequireUsedIO",
    "SaveTracker",
    "StepRecord",
    "load_pretrained",
    "save_pretrained",
]
