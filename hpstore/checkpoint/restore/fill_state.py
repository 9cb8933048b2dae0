"""From a committed step back to values: into a training state, or by name without a model."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from hpstore.checkpoint.format.backed_bytes import Backed
from hpstore.checkpoint.format.items import Item, by_name
from hpstore.checkpoint.format.segment_plan import Chunk, chunks_of
from hpstore.checkpoint.restore.fit_state import recorded_parameters
from hpstore.checkpoint.restore.read_items import fill_chunks
from hpstore.checkpoint.restore.restore_plan import RestoreOptions, RestorePlan
from hpstore.checkpoint.state.fill_objects import require_shape
from hpstore.checkpoint.state.scalars import Classes, dtype_name, dtype_named
from hpstore.checkpoint.state.state_tree import Decoding, decode_tree, join
from hpstore.checkpoint.state.targets import State
from hpstore.checkpoint.state.training_state import apply, check
from hpstore.checkpoint.state.tree_paths import leaf_paths, of_rank
from hpstore.checkpoint.state.typed_objects import classes_in
from hpstore.errors import CheckpointMismatch, IntegrityError
from hpstore.pool.pool import Pool
from hpstore.runtime.buffers import HUGE_BYTES, aligned_array

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreReport:
    """What a restore did. Names are those of the state, "model/weight" or "optimizer/state/weight".

    A tensor is in `loaded`, or it is in one of the others.
    """

    step: int
    tensors: int
    read_bytes: int  # asked of the pool; less than the state when it was still in memory
    seconds: float
    missing: tuple[str, ...]  # tensors and values wanted, not recorded (strict=False)
    unexpected: tuple[str, ...]  # recorded, not taken (strict=False)
    half_written: tuple[str, ...] = ()  # missing, and holding parts of a damaged later step
    loaded: tuple[str, ...] = ()  # tensors
    skipped: Mapping[str, str] = field(default_factory=dict)  # not loaded, and why
    left_out: tuple[str, ...] = ()  # by LoadOptions

    def log(self) -> None:
        """One line about what was not loaded, if there is any: a warning."""
        parts = {
            "skipped": [f"{name} ({why})" for name, why in self.skipped.items()],
            "wanted but not recorded": self.missing,
            "recorded but not taken": self.unexpected,
        }
        said = [
            f"{len(names)} {word}, such as {names[0]}" for word, names in parts.items() if names
        ]
        if said:
            _log.warning(
                "step %d: %d tensors loaded; %s. last_restore has all names.",
                self.step,
                len(self.loaded),
                "; ".join(said),
            )

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


def fresh(shape: Sequence[int], dtype: torch.dtype, device: torch.device | None) -> torch.Tensor:
    """Memory for a tensor. On the host large ones get huge pages, touched at once: faults of
    4 KiB pages would cost more than the read."""
    count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if (device is not None and device.type != "cpu") or count < HUGE_BYTES:
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    return torch.from_numpy(aligned_array(count, populate=True)).view(dtype).view(tuple(shape))


class _Filling:
    """Hands out a tensor for each item that a tree names, and remembers what to read into it."""

    def __init__(self, pool: Pool, plan: RestorePlan) -> None:
        self._backed = Backed(pool, plan.manifest.segments)
        self._items = by_name(plan.manifest.items)
        self.filled, self._kept = plan.filled, plan.kept
        self.wanted: dict[str, list[Chunk]] = {}
        self._given: dict[str, torch.Tensor] = {}

    def tensor(self, name: str) -> torch.Tensor:
        """The place to fill: the state's own tensor when there is one."""
        if name in self._kept:
            return self.filled.stays(name)
        if name not in self._given:
            if name not in self._items:
                raise IntegrityError(f"the manifest refers to {name!r} but holds no such item")
            self._given[name] = self._make(name, self._items[name])
            self.wanted[name] = chunks_of(name, self._given[name])
        return self._given[name]

    def require_own_memory(self) -> None:
        """Raise CheckpointMismatch when names of other values are one memory: which of them it
        would hold in the end, or that it holds parts of both, would be chance."""
        first: dict[tuple[Any, ...], str] = {}
        for name, chunks in self.wanted.items():
            for chunk in chunks:
                at = chunk.tensor
                if not at.numel():
                    continue
                other = first.setdefault((at.device, at.data_ptr(), at.shape, at.stride()), name)
                if other != name and self._content(other) != self._content(name):
                    raise CheckpointMismatch(
                        f"{other!r} and {name!r} are one tensor in the state, but two with other "
                        "values were saved. Nothing was changed."
                    )

    def _content(self, name: str) -> set[tuple[object, ...]]:
        return {(item.box, item.digest) for item in self._items[name]}

    def _make(self, name: str, items: Sequence[Item]) -> torch.Tensor:
        item = items[0]
        dtype = dtype_named(item.dtype)
        there = self.filled.places.get(name)
        if there is not None:
            require_shape(name, there)
        if there is not None and there.device.type != "meta":
            differs = there.dtype != dtype or tuple(there.shape) != item.shape
            if differs and name in self.filled.free:
                self._backed.require(name, items)
                return fresh(item.shape, dtype, None)
            if differs:
                raise CheckpointMismatch(
                    f"{name!r}: {item.dtype} {item.shape} was saved, {dtype_name(there.dtype)} "
                    f"{tuple(there.shape)} is wanted. Nothing was changed."
                )
            return there
        like = self.filled.like(name)
        if like is not None and tuple(like.shape) == item.shape and hasattr(like, "to_local"):
            return torch.empty_like(like, dtype=dtype)  # a moment is sharded as its parameter
        device = like.device if like is not None and item.shape else None
        self._backed.require(name, items)
        return fresh(item.shape, dtype, device)


def restore_state(
    pool: Pool, plan: RestorePlan, state: State, how: RestoreOptions, touched: set[str]
) -> RestoreReport:
    """Fill `state` from a step. Names, shapes and dtypes are compared before anything changes, and
    every segment is opened: one that is gone changes nothing.

    `touched`: tensors of the state that steps before this one were read into; its own are added
    before the first is filled.
    """
    began = time.perf_counter()
    manifest, tree = plan.manifest, plan.tree
    filling = _Filling(pool, plan)
    decoding = Decoding(
        tensor=filling.tensor,
        rank=how.rank,
        allow_pickle=how.allow_pickle,
        classes=Classes(lambda: classes_in(state), strict=how.strict),
    )
    loaded: dict[str, Any] = decode_tree(tree, decoding)
    if not isinstance(loaded, dict):
        raise IntegrityError(f"what step {manifest.step} recorded is no state")
    strict = how.strict and not how.load.chooses  # names of a part are compared below
    check(state, loaded, strict=strict)
    mine = of_rank(tree, how.rank)
    missing = plan.lacking(mine)
    if how.strict and how.load.chooses:
        _require_chosen(filling, plan, mine, missing)
    filling.require_own_memory()
    wanted = [chunk for chunks in filling.wanted.values() for chunk in chunks]

    def filling_begins() -> None:
        touched.update(filling.wanted.keys() & filling.filled.places.keys())

    try:
        count = fill_chunks(
            pool, manifest.segments, manifest.items, wanted, how.warm, begins=filling_begins
        )
    except RuntimeError as error:
        raise CheckpointMismatch(f"a tensor cannot be filled in place: {error}") from error
    for chunk in wanted:
        if not chunk.tensor.is_inference():
            torch.autograd.graph.increment_version(chunk.tensor)
    apply(state, loaded, filled=filling.filled, strict=strict, rng=how.rng)
    filling.filled.take_loaded()
    unexpected = _untaken(filling, mine)
    return RestoreReport(
        step=manifest.step,
        tensors=len(filling.wanted),
        read_bytes=count,
        seconds=time.perf_counter() - began,
        missing=tuple(missing),
        unexpected=unexpected,
        half_written=tuple(sorted(touched - filling.wanted.keys())),
        loaded=tuple(sorted(filling.wanted)),
        skipped=plan.skipped,
        left_out=plan.left_out,
    )


def _require_chosen(filling: _Filling, plan: RestorePlan, tree: Any, missing: list[str]) -> None:
    """Raise CheckpointMismatch when chosen names of state and checkpoint differ."""
    filled = filling.filled
    recorded = recorded_parameters(tree, filled)
    untaken = [
        name
        for name in _untaken(filling, tree)
        if not any(name.startswith(f"{o}/") for o in recorded)
    ]
    untaken += [
        join(path, f"state/{name}")
        for path, names in recorded.items()
        for name in names
        if (path, name) not in filled.parameters
    ]
    absent = [
        join(path, f"state/{name}")
        for path, name in filled.parameters
        if path in recorded and name not in recorded[path]
    ]
    missing = missing + [name for name in absent if plan.wants(name)]
    if untaken or missing:
        raise CheckpointMismatch(
            f"state and step {plan.manifest.step} differ in what was chosen: recorded but not "
            f"taken {sorted(untaken)[:8]}, wanted but not recorded {sorted(missing)[:8]}. Nothing "
            "was changed. Pass strict=False to load what fits."
        )


def _untaken(filling: _Filling, tree: Any) -> tuple[str, ...]:
    """Names of tensors and values that only the checkpoint has."""
    left = set(leaf_paths(tree)) - filling.filled.taken  # at once: there may be very many
    return tuple(sorted(path for path in left if not filling.filled.takes(path)))
