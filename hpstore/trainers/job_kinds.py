"""How accelerate trains in this job, and which jobs can be saved as a whole."""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from hpstore.errors import CheckpointError
from hpstore.trainers.optional_import import missing

try:
    from accelerate.state import AcceleratorState
except ModuleNotFoundError as error:
    raise missing("accelerate", "huggingface", error) from error

# Any: accelerate's plugins and states have no common type

_SAVED = "Nothing is trained or saved. Saved are one process, DDP and FSDP2"
_INSTEAD = {
    "DEEPSPEED": (
        "leave out deepspeed= (Accelerate: deepspeed_plugin=), and give TrainingArguments "
        'fsdp=True, fsdp_config={"version": 2}, which shards optimizer, gradients and weights as '
        "ZeRO does"
    ),
    "MEGATRON_LM": "save from the modules and optimizers themselves, by a Checkpointer",
}


class Parallelism(Enum):
    """What holds the weights: each rank all of them, or its shards."""

    REPLICATED = "one process or DDP"
    SHARDED = "FSDP2"


def job_kind(distributed_type: object, fsdp_plugin: Any) -> Parallelism:
    """The kind that accelerate's words mean. Raises CheckpointError with the line to change."""
    name = str(getattr(distributed_type, "value", distributed_type))
    if name == "FSDP":
        if getattr(fsdp_plugin, "fsdp_version", 1) == 2:
            return Parallelism.SHARDED
        raise CheckpointError(
            f"this job trains with FSDP1, whose shards are not saved. {_SAVED}: write "
            'fsdp_config={"version": 2} (TrainingArguments), fsdp_version=2 '
            "(FullyShardedDataParallelPlugin) or fsdp_version: 2 (accelerate config)"
        )
    if name == "NO" or name.startswith("MULTI_"):
        return Parallelism.REPLICATED
    instead = _INSTEAD.get(name, "save from the modules themselves, by a Checkpointer")
    raise CheckpointError(f"this job trains with {name}. {_SAVED}: {instead}")


def kind_of_this_job() -> Parallelism | None:
    """Of the Accelerator of this process; None while it is not made. Raises as job_kind()."""
    known = AcceleratorState._shared_state
    kind = known.get("distributed_type")
    return None if kind is None else job_kind(kind, known.get("fsdp_plugin"))


def require_kind(model: torch.nn.Module, kind: Parallelism) -> None:
    """Raise CheckpointError where a model is sharded by others than accelerate: its Trainer would
    put whole weights into shards at a resume."""
    if kind is Parallelism.SHARDED:
        return
    name = next((n for n, p in model.named_parameters() if isinstance(p, DTensor)), None)
    if name is not None:
        raise CheckpointError(
            f"parameter {name!r} is sharded (a DTensor), but not by accelerate's FSDP2. {_SAVED}: "
            "leave out tp_plan= and distributed_config= of from_pretrained(), and give "
            'TrainingArguments fsdp=True, fsdp_config={"version": 2}'
        )
