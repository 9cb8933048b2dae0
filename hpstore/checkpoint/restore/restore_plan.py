"""What a restore will take of a step, decided before the first tensor is filled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hpstore.checkpoint.format.checkpoint_manifest import Manifest
from hpstore.checkpoint.format.items import by_name
from hpstore.checkpoint.restore.fit_state import Trim, misfits, unfollowed
from hpstore.checkpoint.restore.rank_subset import pruned
from hpstore.checkpoint.restore.read_items import Warm
from hpstore.checkpoint.state.state_tree import join, tensor_names
from hpstore.checkpoint.state.targets import Destinations, State, destinations

Json = Any  # Any: JSON made by hpstore/checkpoint/state/state_tree.py


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreOptions:
    """How a restore is made."""

    strict: bool
    rng: bool
    rank: int = 0
    allow_pickle: bool = False
    warm: Warm | None = None


@dataclass(slots=True, kw_only=True)
class RestorePlan:
    """A step as one rank will load it."""

    manifest: Manifest
    tree: Json
    filled: Destinations
    shapes: Mapping[str, tuple[int, ...]]  # of all recorded tensors, by the names of the state
    untaken: list[str] = field(default_factory=list)  # names that this rank's objects lack
    skipped: dict[str, str] = field(default_factory=dict)  # with the reason
    kept: set[str] = field(default_factory=set)  # tensors in lists that stay as they are

    def skips(self, name: str) -> bool:
        """Whether a name, or the moments that it belongs to, is skipped."""
        return name in self.skipped or name.rpartition("/")[0] in self.skipped

    def skip(self, others: Mapping[str, str], how: RestoreOptions) -> None:
        """Leave out what does not fit here, or on another rank, and the moments that go with it."""
        if how.strict:
            return
        self.skipped |= others
        names = tensor_names(self.tree, rank=how.rank)
        moments = unfollowed(names, self.skipped, self.shapes, self.filled)
        trim = Trim(self.skipped, moments)
        self.tree = trim.tree(self.tree)
        self.kept = trim.kept
        gone = {join(path, f"state/{name}"): why for (path, name), why in moments.items()}
        there = self.kept.union(trim.left)
        self.skipped = {name: why for name, why in self.skipped.items() if name in there}
        self.skipped |= {name: why for name, why in gone.items() if name in there}


def plan_restore(
    manifest: Manifest, state: State, how: RestoreOptions, *, several: bool
) -> RestorePlan:
    """What fits `state`. Nothing is changed, no tensor is read. `several`: other ranks take what
    this one's objects lack."""
    tree, untaken = pruned(manifest.tree, state) if several else (manifest.tree, [])
    items = by_name(manifest.items)
    filled = destinations(state, how.rank, items.keys())
    plan = RestorePlan(
        manifest=manifest,
        tree=tree,
        filled=filled,
        shapes={name: stored[0].shape for name, stored in items.items()},
        untaken=untaken,
    )
    if not how.strict:
        plan.skipped = misfits(tensor_names(tree, rank=how.rank), items, filled)
    return plan
