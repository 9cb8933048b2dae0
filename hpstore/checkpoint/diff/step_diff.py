"""What two committed steps differ in: by their hashes where these suffice, else by their bytes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from hpstore.checkpoint.catalog.removed_steps import reading_step
from hpstore.checkpoint.catalog.step_catalog import StepCatalog
from hpstore.checkpoint.diff.difference_norms import DifferenceNorms, PairReader, TensorPair
from hpstore.checkpoint.format.checkpoint_manifest import Manifest
from hpstore.checkpoint.format.items import Item, by_name
from hpstore.checkpoint.restore.saved_step import SavedStep
from hpstore.checkpoint.restore.tensor_stream import ByteProgress, counting, tensor_bytes
from hpstore.checkpoint.state.tree_paths import Leaf, leaves
from hpstore.errors import CheckpointError


class Change(StrEnum):
    """What became of a tensor or a value."""

    ADDED = "added"
    REMOVED = "removed"
    RESHAPED = "reshaped"  # another shape; the dtype may differ, too
    RETYPED = "retyped"  # another dtype
    CHANGED = "changed"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorForm:
    """What a step records of a tensor besides its bytes."""

    dtype: str
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorChange:
    """A tensor that differs. `norms`: asked for, and both steps have one shape of it."""

    name: str
    change: Change
    before: TensorForm | None
    after: TensorForm | None
    norms: DifferenceNorms | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueChange:
    """A value that is no tensor, or a name that is a tensor in one of the steps only, as text."""

    name: str
    change: Change
    before: str
    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDiff:
    """What two steps differ in, sorted by name."""

    before: int
    after: int
    tensors: tuple[TensorChange, ...]
    values: tuple[ValueChange, ...]
    equal_tensors: int
    equal_values: int
    read_bytes: int  # of tensors, in both steps; 0 where hashes were enough

    @property
    def same(self) -> bool:
        """No tensor and no value differs."""
        return not self.tensors and not self.values

    def count(self, change: Change) -> int:
        """Count the tensors that differ in one way.

        Parameters
        ----------
        change
            What became of them.
        """
        return sum(found.change is change for found in self.tensors)

    @property
    def summary(self) -> str:
        """One line."""
        counts = ", ".join(f"{self.count(change)} {change.value}" for change in Change)
        return (
            f"step {self.before} to {self.after}: tensors: {counts}, {self.equal_tensors} equal; "
            f"values: {len(self.values)} differ, {self.equal_values} equal"
        )

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {"summary": self.summary, "same": self.same, **asdict(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Side:
    """One of the steps: its leaves by path, and the items of its tensors."""

    leaves: Mapping[str, Leaf]
    items: Mapping[str, Sequence[Item]]

    @classmethod
    def of(cls, manifest: Manifest, keys: Collection[str] | None) -> _Side:
        found = {leaf.path: leaf for leaf in leaves(manifest.tree)}
        if keys is not None:
            wanted = [key.strip("/") for key in keys]
            found = {
                path: leaf
                for path, leaf in found.items()
                if any(path == key or path.startswith((f"{key}/", f"{key}@")) for key in wanted)
            }
        return cls(leaves=found, items=by_name(manifest.items))

    def form(self, path: str) -> TensorForm | None:
        leaf = self.leaves.get(path)
        if leaf is None or not leaf.item:
            return None
        first = self.boxes(leaf)[0]
        return TensorForm(dtype=first.dtype, shape=first.shape, bytes=tensor_bytes(first))

    def boxes(self, leaf: Leaf) -> Sequence[Item]:
        """Raises CheckpointError for a name without an item."""
        if leaf.item not in self.items:
            raise CheckpointError(f"the manifest refers to {leaf.item!r} but holds no such item")
        return self.items[leaf.item]

    def kind(self, leaf: Leaf) -> Any:  # Any: JSON
        """What the tree says of a tensor besides its name, such as that it was a numpy array."""
        return {name: value for name, value in leaf.node.items() if name != "item"}

    def text(self, path: str) -> str:
        leaf = self.leaves.get(path)
        if leaf is None:
            return ""
        form = self.form(path)
        return leaf.shown() if form is None else f"tensor {form.dtype} {list(form.shape)}"


def same_by_hash(before: Sequence[Item], after: Sequence[Item]) -> bool | None:
    """Whether two tensors of one dtype and shape hold the same bytes, as far as hashes show it.
    None where they were cut into other boxes, or a hash is missing. Pure."""
    first, second = ({item.box: item.digest for item in items} for items in (before, after))
    if first.keys() != second.keys() or not all((*first.values(), *second.values())):
        return None
    return first == second


def diff_steps(
    catalog: StepCatalog,
    before: Manifest,
    after: Manifest,
    *,
    keys: Collection[str] | None = None,
    norms: bool = False,
    progress: ByteProgress | None = None,
) -> StepDiff:
    """Compare two steps, or their parts at `keys`. At most some 250 MiB are in memory.

    Bytes are read where hashes do not suffice, and with `norms` of all tensors that differ. Raises
    CheckpointError for keys that neither has and for a step that is removed meanwhile, and what
    reading raises.
    """
    old, new = _Side.of(before, keys), _Side.of(after, keys)
    if keys is not None and not old.leaves and not new.leaves:
        raise CheckpointError(
            f"neither step {before.step} nor step {after.step} holds anything at {list(keys)}"
        )
    found, unclear, equal = _by_manifests(old, new)
    values, equal_values = _values(old, new)
    pairs = [
        TensorPair(path=path, before=old.leaves[path].item, after=new.leaves[path].item)
        for path in sorted(
            {*unclear, *(path for path, change in found.items() if norms and _comparable(change))}
        )
    ]
    total = sum(_form_bytes(side, pair.path) for pair in pairs for side in (old, new))
    moved = counting(progress, total) if progress is not None else None
    read = 0

    def seen(count: int) -> None:
        nonlocal read
        read += count
        if moved is not None:
            moved(count)

    steps = SavedStep(catalog, before), SavedStep(catalog, after)
    with reading_step(catalog, before), reading_step(catalog, after):
        for pair, distance in PairReader(catalog.pool, *steps, seen).compare(pairs, norms=norms):
            change = found.get(pair.path) or _change(old, new, pair.path, Change.CHANGED)
            found[pair.path] = replace(change, norms=distance)
    return StepDiff(
        before=before.step,
        after=after.step,
        tensors=tuple(found[path] for path in sorted(found)),
        values=values,
        equal_tensors=equal + sum(path not in found for path in unclear),
        equal_values=equal_values,
        read_bytes=read,
    )


def _comparable(change: TensorChange) -> bool:
    return change.change in (Change.CHANGED, Change.RETYPED)


def _form_bytes(side: _Side, path: str) -> int:
    form = side.form(path)
    return 0 if form is None else form.bytes


def _change(old: _Side, new: _Side, path: str, change: Change) -> TensorChange:
    return TensorChange(name=path, change=change, before=old.form(path), after=new.form(path))


def _by_manifests(old: _Side, new: _Side) -> tuple[dict[str, TensorChange], list[str], int]:
    """Tensors that differ, those of which only their bytes show it, and how many are equal."""
    found: dict[str, TensorChange] = {}
    unclear: list[str] = []
    equal = 0
    for path in old.leaves.keys() | new.leaves.keys():
        before, after = old.form(path), new.form(path)
        if before is None or after is None:
            if before is not after and not (path in old.leaves and path in new.leaves):
                change = Change.ADDED if before is None else Change.REMOVED
                found[path] = _change(old, new, path, change)
            continue
        first, second = old.leaves[path], new.leaves[path]
        if before.shape != after.shape:
            found[path] = _change(old, new, path, Change.RESHAPED)
        elif before.dtype != after.dtype or old.kind(first) != new.kind(second):
            found[path] = _change(old, new, path, Change.RETYPED)
        else:
            same = same_by_hash(old.boxes(first), new.boxes(second))
            if same is None:
                unclear.append(path)
            elif same:
                equal += 1
            else:
                found[path] = _change(old, new, path, Change.CHANGED)
    return found, unclear, equal


def _values(old: _Side, new: _Side) -> tuple[tuple[ValueChange, ...], int]:
    """Values that differ, by name, and how many are equal."""
    found: list[ValueChange] = []
    equal = 0
    for path in sorted(old.leaves.keys() | new.leaves.keys()):
        before, after = old.leaves.get(path), new.leaves.get(path)
        there = [leaf for leaf in (before, after) if leaf is not None]
        if all(leaf.item for leaf in there):
            continue
        if before is not None and after is not None and before.node == after.node:
            equal += 1
            continue
        change = Change.CHANGED
        if before is None or after is None:
            change = Change.ADDED if before is None else Change.REMOVED
        found.append(
            ValueChange(name=path, change=change, before=old.text(path), after=new.text(path))
        )
    return tuple(found), equal
