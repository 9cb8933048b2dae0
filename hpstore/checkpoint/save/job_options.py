"""What a save is made of and by: the same for all its slices and attempts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from hpstore.checkpoint.format.pack import Key, Known


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """What a save is told, the same for all slices."""

    step: int
    tree: Any  # Any: JSON made by hpstore/checkpoint/state/state_tree.py
    names: Collection[str]  # of the tensors in it
    session: str
    overwrite: bool
    extra: Mapping[str, Any]
    codec: str
    rate_bytes_per_second: float | None
    began: float
    progress: Callable[[int], None] | None = None  # told the bytes that are about to be written
    slices: int = 1  # that are staged one after the other into the same memory
    within: bool = False  # the manifest holds the bytes of all ranks' tensors: one put is the save
    min_losses_tolerated: int | None = None  # of all that is put; the pool's settings unless given


@dataclass(frozen=True, slots=True, kw_only=True)
class Earlier:
    """What a save may refer to: items, and the step whose manifest names their segments."""

    step: int = 0
    known: Mapping[Key, Known] = field(default_factory=dict)
