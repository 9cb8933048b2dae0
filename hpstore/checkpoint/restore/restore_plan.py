"""What a restore will take of a step, decided before the first tensor is filled."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from hpstore.checkpoint.format.checkpoint_manifest import Manifest
from hpstore.checkpoint.format.items import by_name
from hpstore.checkpoint.restore.chosen_names import Choice, choose
from hpstore.checkpoint.restore.fit_state import Trim, misfits, unfollowed, untransformed
from hpstore.checkpoint.restore.load_options import LoadOptions, NameFilter
from hpstore.checkpoint.restore.rank_subset import pruned
from hpstore.checkpoint.restore.read_items import Warm
from hpstore.checkpoint.restore.transformed_tensors import transformed
from hpstore.checkpoint.state.state_tree import join, tensor_names
from hpstore.checkpoint.state.targets import Destinations, State, destinations
from hpstore.checkpoint.state.tree_paths import paths
from hpstore.format.checksum import digest128
from hpstore.pool.pool import Pool

Json = Any  # Any: JSON made by hpstore/checkpoint/state/state_tree.py


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreOptions:
    """How a restore is made."""

    strict: bool
    rng: bool
    rank: int = 0
    allow_pickle: bool = False
    warm: Warm | None = None
    progress: Callable[[int, int], None] | None = None
    load: LoadOptions = field(default_factory=LoadOptions)


@dataclass(slots=True, kw_only=True)
class RestorePlan:
    """A step as one rank will load it."""

    manifest: Manifest  # as if saved under the names of the state
    tree: Json
    filled: Destinations
    shapes: Mapping[str, tuple[int, ...]]  # of all recorded tensors, by the names of the state
    chosen: NameFilter
    left_out: tuple[str, ...] = ()  # by the options
    choice: str = ""  # a digest of what the options choose, "" for all
    untaken: list[str] = field(default_factory=list)  # names that this rank's objects lack
    skipped: dict[str, str] = field(default_factory=dict)  # with the reason
    kept: set[str] = field(default_factory=set)  # tensors in lists that stay as they are
    ready: dict[str, torch.Tensor] = field(default_factory=dict)  # transformed, on the host

    def wants(self, name: str) -> bool:
        """Whether a name of the state was chosen, and neither it nor the moments that it belongs to
        are skipped."""
        if name in self.skipped or name.rpartition("/")[0] in self.skipped:
            return False
        return self.chosen.lets(name)

    def lacking(self, tree: Json) -> list[str]:
        """What is wanted and not recorded in a tree."""
        return [name for name in self.filled.lacking(set(paths(tree))) if self.wants(name)]

    def transform(self, pool: Pool, how: RestoreOptions) -> None:
        """Read and change what the options transform, before the first tensor is filled."""
        if how.load.transform is None:
            return
        names = tensor_names(self.tree, rank=how.rank)
        everyones = by_name(self.manifest.items).keys()
        self.ready = transformed(
            pool, self.manifest, names, how.load.transform, how.warm, among=everyones
        )

    def find_misfits(self, how: RestoreOptions) -> None:
        """Which tensors do not fit: they are skipped, unless that is an error."""
        if not how.strict:
            names = tensor_names(self.tree, rank=how.rank)
            self.skipped = misfits(names, self.made_shapes(), self.filled)

    def made_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of what is loaded, by name."""
        return {**self.shapes, **self._ready_shapes()}

    def _ready_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.ready.items()}

    def skip(self, others: Mapping[str, str], how: RestoreOptions) -> None:
        """Leave out what does not fit here, or on another rank, and the moments that go with it."""
        if how.strict and not how.load.chooses and not self.ready:
            return
        self.skipped |= others
        names = tensor_names(self.tree, rank=how.rank)
        moments = unfollowed(names, self.skipped, self.made_shapes(), self.filled, self.tree)
        moments |= untransformed(names, self.shapes, self._ready_shapes(), self.filled)
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
    choice = choose(manifest, how.load)
    tree, untaken = pruned(choice.manifest.tree, state) if several else (choice.manifest.tree, [])
    items = by_name(choice.manifest.items)
    filled = destinations(state, how.rank, items.keys())
    return RestorePlan(
        manifest=choice.manifest,
        tree=tree,
        filled=filled,
        shapes=choice.shapes,
        chosen=NameFilter(how.load),
        left_out=choice.left_out,
        choice=_digest(choice) if how.load.chooses else "",
        untaken=untaken,
    )


def _digest(choice: Choice) -> str:
    """The same on ranks that choose the same names."""
    names = [choice.left_out, [(item.name, item.digest) for item in choice.manifest.items]]
    return digest128(json.dumps(names).encode()).hex()
