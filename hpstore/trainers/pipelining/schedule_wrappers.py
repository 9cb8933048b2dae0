"""Schedules of torch that do not train what they should with stages in DDP or FSDP.

Found with torch alone, without hpstore in the step, against one process with the same samples; the
table is kept true by tests/contract/test_torch_pipelining.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from hpstore.errors import ConfigError

DDP, FSDP_NESTED = "DistributedDataParallel", "fully_shard of layers within the stage"
GOOD_IN_DDP = ("Schedule1F1B",)  # others: an assertion of torch's reducer ends the first step
WRONG_NESTED = (
    "ScheduleInterleavedZeroBubble",
    "ScheduleZBVZeroBubble",
    "ScheduleDualPipeV",
)
"""Their backward for the weights alone comes after the layer's shards were let go: gradients, and
so losses from the second step on, are others than those of one process."""


def wrappers_of(module: torch.nn.Module) -> set[str]:
    """What a stage is wrapped in, of what matters here."""
    inner: Any = getattr(module, "_orig_mod", module)
    found = set()
    if any(isinstance(part, DistributedDataParallel) for part in inner.modules()):
        found.add(DDP)
    sharded = [part for part in inner.modules() if isinstance(part, FSDPModule)]
    if sharded and sharded != [inner]:
        found.add(FSDP_NESTED)
    return found


def fault_of(kinds: Iterable[str], wrappers: Iterable[str]) -> str:
    """What is wrong with a schedule, by the names of its classes, and stages in these; "" for
    nothing that is known. Pure."""
    names = set(kinds)
    if DDP in wrappers and names.isdisjoint(GOOD_IN_DDP):
        return (
            "ends in an assertion of torch's reducer with stages in DistributedDataParallel. Use "
            "Schedule1F1B, fully_shard the stage, or average the gradients in before_optimizer"
        )
    if FSDP_NESTED in wrappers and not names.isdisjoint(WRONG_NESTED):
        return (
            "has wrong gradients where layers within a stage are sharded by fully_shard. Call "
            "fully_shard on the stage alone, or use Schedule1F1B or ScheduleInterleaved1F1B"
        )
    return ""


# Any below: torch's schedules have no common public type
def require_trainable(schedule: Any, modules: Iterable[torch.nn.Module]) -> None:
    """Raise ConfigError for a schedule that torch does not train such stages with."""
    kinds = [kind.__name__ for kind in type(schedule).__mro__]
    wrapped = {name for module in modules for name in wrappers_of(module)}
    fault = fault_of(kinds, wrapped)
    if fault:
        raise ConfigError(
            f"{type(schedule).__name__} of torch {torch.__version__} {fault}. Nothing was trained."
        )
