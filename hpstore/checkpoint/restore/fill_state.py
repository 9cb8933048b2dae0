"""From a committed step back to values: into a training state, or by name without a model."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from hpstore.checkpoint.restore.filler import Filler
from hpstore.checkpoint.restore.fit_state import recorded_parameters
from hpstore.checkpoint.restore.read_items import fill_chunks
from hpstore.checkpoint.restore.restore_plan import RestoreOptions, RestorePlan
from hpstore.checkpoint.state.scalars import Classes
from hpstore.checkpoint.state.state_tree import Decoding, decode_tree, join
from hpstore.checkpoint.state.targets import State
from hpstore.checkpoint.state.training_state import apply, check
from hpstore.checkpoint.state.tree_paths import leaf_paths, of_rank
from hpstore.checkpoint.state.typed_objects import classes_in
from hpstore.checkpoint.state.unmatched_parts import unmatched
from hpstore.errors import CheckpointMismatch, IntegrityError
from hpstore.pool.pool import Pool

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
    cast: tuple[str, ...] = ()  # of loaded, those whose dtype was another
    tier: str = ""  # the pool that it came from, where that is not the first one

    def log(self) -> None:
        """One line about what was not loaded as it is: a warning, unless it was asked for."""
        parts = {
            "skipped": [f"{name} ({why})" for name, why in self.skipped.items()],
            "wanted but not recorded": self.missing,
            "recorded but not taken": self.unexpected,
        }
        said = [
            f"{len(names)} {word}, such as {names[0]}" for word, names in parts.items() if names
        ]
        if said or self.cast or self.left_out:
            _log.log(
                logging.WARNING if said else logging.INFO,
                "step %d: %s. last_restore has all names.",
                self.step,
                "; ".join(
                    [
                        f"{len(self.loaded)} tensors loaded, {len(self.cast)} of them cast",
                        *said,
                        f"{len(self.left_out)} names left out as asked",
                    ]
                ),
            )

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


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
    filling = Filler(pool, plan, cast=bool(how.load.cast))
    decoding = Decoding(
        tensor=filling.tensor,
        array=filling.array,
        rank=how.rank,
        allow_pickle=how.allow_pickle,
        classes=Classes(lambda: classes_in(state), strict=how.strict),
    )
    loaded: dict[str, Any] = decode_tree(tree, decoding)
    if not isinstance(loaded, dict):
        raise IntegrityError(f"what step {manifest.step} recorded is no state")
    strict = how.strict and not how.load.narrows  # names of a part are compared below
    check(state, loaded, strict=strict)
    mine = of_rank(tree, how.rank)
    alone = [] if strict else list(unmatched(state, loaded, how.rank))
    lost = _leaves_at(mine, {each.path for each in alone if each.recorded})
    wanted = {each.path for each in alone if not each.recorded and plan.wants(each.path)}
    missing = sorted(wanted.union(plan.lacking(mine)))
    if how.strict and how.load.narrows:
        _require_chosen(filling, plan, mine, missing, lost)
    filling.require_own_memory()
    count = _fill(pool, plan, filling, how, touched)
    apply(state, loaded, filled=filling.filled, strict=strict, rng=how.rng)
    filling.filled.take_loaded()
    unexpected = tuple(sorted({*_untaken(filling, mine), *lost}))
    gone = set(lost)
    loaded_names = [n for n in filling.loaded if n not in gone and filling.filled.takes(n)]
    return RestoreReport(
        step=manifest.step,
        tensors=len(loaded_names),
        read_bytes=count,
        seconds=time.perf_counter() - began,
        missing=tuple(missing),
        unexpected=unexpected,
        half_written=tuple(sorted(touched.difference(loaded_names))),
        loaded=tuple(loaded_names),
        cast=tuple(sorted(filling.cast)),
        skipped=plan.skipped,
        left_out=plan.left_out,
    )


def _fill(
    pool: Pool, plan: RestorePlan, filling: Filler, how: RestoreOptions, touched: set[str]
) -> int:
    """Read tensors into their places; how many bytes were read."""
    wanted = [chunk for chunks in filling.wanted.values() for chunk in chunks]

    def filling_begins() -> None:
        touched.update(filling.filled.places.keys() & set(filling.loaded))

    try:
        count = fill_chunks(
            pool,
            plan.manifest.segments,
            plan.manifest.items,
            wanted,
            how.warm,
            begins=filling_begins,
            progress=how.progress,
        )
        filling.put_transformed()
    except RuntimeError as error:
        raise CheckpointMismatch(f"a tensor cannot be filled in place: {error}") from error
    for chunk in wanted:
        if not chunk.tensor.is_inference():
            torch.autograd.graph.increment_version(chunk.tensor)
    return count


def _leaves_at(tree: Any, paths: set[str]) -> list[str]:
    """Tensors and values at or under paths."""
    if not paths:
        return []
    under = tuple(f"{path}/" for path in paths)
    above = {path[:at] for path in paths for at, letter in enumerate(path) if letter == "/"}
    wanted = paths | above  # a list of plain values is one leaf
    return [leaf for leaf in leaf_paths(tree) if leaf in wanted or leaf.startswith(under)]


def _require_chosen(
    filling: Filler, plan: RestorePlan, tree: Any, missing: list[str], lost: list[str]
) -> None:
    """Raise CheckpointMismatch when chosen names of state and checkpoint differ. `lost`: in lists,
    which are taken."""
    filled = filling.filled
    recorded, wanted = recorded_parameters(tree, filled), filled.updated()
    untaken = [
        name
        for name in _untaken(filling, tree)
        if not any(name.startswith(f"{o}/") for o in recorded)
    ]
    untaken += lost
    untaken += [
        join(path, f"state/{name}")
        for path, names in recorded.items()
        for name in names
        if name not in wanted[path]
    ]
    absent = [
        join(path, f"state/{name}")
        for path, names in wanted.items()
        for name in names
        if name not in recorded.get(path, ())
    ]
    missing = missing + [name for name in absent if plan.wants(name)]
    if untaken or missing:
        raise CheckpointMismatch(
            f"state and step {plan.manifest.step} differ in what was chosen: recorded but not "
            f"taken {sorted(untaken)[:8]}, wanted but not recorded {sorted(missing)[:8]}. Nothing "
            "was changed. Pass strict=False to load what fits."
        )


def _untaken(filling: Filler, tree: Any) -> tuple[str, ...]:
    """Names of tensors and values that only the checkpoint has."""
    left = set(leaf_paths(tree)) - filling.filled.taken  # at once: there may be very many
    return tuple(sorted(path for path in left if not filling.filled.takes(path)))
