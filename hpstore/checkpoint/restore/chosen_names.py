"""The part of a step that LoadOptions choose, under the names of the state. Pure.

It goes by the manifest alone, so all ranks that are given the same options choose alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hpstore.checkpoint.format.checkpoint_manifest import Manifest
from hpstore.checkpoint.format.items import by_name
from hpstore.checkpoint.restore.chosen_moments import Recorded, is_optimizer, rename_optimizer
from hpstore.checkpoint.restore.load_options import LoadOptions, NameFilter
from hpstore.checkpoint.restore.name_patterns import Renames
from hpstore.checkpoint.restore.tree_branches import (
    Branch,
    closed,
    entries,
    listed,
    lists,
    moved,
    moved_whole,
    opened,
    put,
)
from hpstore.checkpoint.state.state_tree import MAX_DEPTH
from hpstore.checkpoint.state.targets import RNG_KEY
from hpstore.checkpoint.state.tree_paths import leaves
from hpstore.errors import (
    CheckpointError,
    CheckpointMismatch,
    ConfigError,
    HpstoreError,
    IntegrityError,
)
from hpstore.format.untrusted_bytes import MALFORMED, brief

Json = Any  # Any: JSON made by hpstore/checkpoint/state/state_tree.py


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A step as if it had been saved under these names. `left_out`: what the options left out.
    `shapes`: of all recorded tensors, also of those."""

    manifest: Manifest
    left_out: tuple[str, ...] = ()
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def choose(manifest: Manifest, load: LoadOptions) -> Choice:
    """Raises CheckpointMismatch for names that collide and patterns that mean nothing, ConfigError
    for what cannot be chosen in parts, IntegrityError for what no save has recorded."""
    renames = Renames(load.rename)
    try:
        return _chosen(manifest, load, renames)
    except HpstoreError:
        raise
    except MALFORMED as error:
        if error is renames.raised:  # by the caller's own function
            raise
        raise IntegrityError(
            f"the state that step {manifest.step} recorded is malformed: {brief(error)}"
        ) from error


def _chosen(manifest: Manifest, load: LoadOptions, renames: Renames) -> Choice:
    stored = by_name(manifest.items)
    shapes = {name: items[0].shape for name, items in stored.items()}
    if not load.chooses:
        return Choice(manifest=manifest, shapes=shapes)
    chooser = _Chooser(manifest, load, shapes, renames)
    tree = chooser.tree()
    items = tuple(
        replace(item, name=new) if new != item.name else item
        for item in manifest.items
        for new in chooser.items.get(item.name, ())
    )
    return Choice(
        manifest=replace(manifest, tree=tree, items=items),
        left_out=tuple(sorted(chooser.left_out)),
        shapes=chooser.shapes,
    )


class _Chooser:
    """Moves the entries of a tree to their new names, and takes out those that are not chosen."""

    def __init__(
        self,
        manifest: Manifest,
        load: LoadOptions,
        shapes: Mapping[str, tuple[int, ...]],
        renames: Renames,
    ) -> None:
        self._step, self._tree, self._old_shapes = manifest.step, manifest.tree, shapes
        self._renames, self._filter = renames, NameFilter(load)
        self._takers: dict[str, str] = {}  # new name: old name
        self._moves: dict[str, str | None] = {}  # old name of a tensor or value: new name
        self.items: dict[str, list[str]] = {}  # old name of a tensor: new names
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.left_out: list[str] = []

    def tree(self) -> Json:
        """The tree under new names."""
        root = opened(self._tree, is_optimizer)
        if not isinstance(root, Branch):
            raise CheckpointError(f"step {self._step} holds no names that could be chosen")
        recorded = Recorded(root)
        placed: list[tuple[str, Json]] = []
        optimizers, known, moves = [], dict(lists(root)), dict[str, str]()
        for branch, key, path, node in list(entries(root)):
            if is_optimizer(node):
                optimizers.append((branch, key, path, node))
                continue
            new = self._entry(path, node)
            moves[path] = new or ""
            if new != path:
                branch.pop(key)
            if new is not None and new != path:
                placed.append((new, moved(node, path, new)))
        for branch, key, path, node in optimizers:
            found = rename_optimizer(
                path,
                node,
                recorded.model_of(path, node, self._moves),
                self._moves,
                self._renames,
                self._filter,
            )
            self.left_out += found.left_out
            for old, name in found.names.items():
                self._take(old, name)
            self._take_items(found.items.items())
            for old, name in found.items.items():
                self.shapes.setdefault(name, self._old_shapes.get(old, ()))
            moves[path] = found.path if found.node is not None else ""
            if found.node is not None and found.path == path:
                branch.fill(branch.rows[key][0], key, found.node)
                continue
            branch.pop(key)
            if found.node is not None:
                placed.append((found.path, found.node))
        for name, node in placed:
            put(root, name, node)
        self._require_used()
        like = moved_whole(known, moves)
        return closed(listed(root, like) if like else root)

    def _entry(self, path: str, node: Json) -> str | None:
        """The new path of an entry; None when it is not chosen."""
        found = list(leaves(node, path))
        names = [leaf.path for leaf in found] or [path]
        fixed = path == RNG_KEY
        new = [name if fixed else self._renames.of(name) for name in names]
        self._moves.update(zip(names, new, strict=True))
        if all(name is None for name in new):
            self.left_out += names
            return None
        base = _base(path, names, new)
        items = [(leaf.item, base + leaf.item[len(path) :]) for leaf in found if leaf.item]
        for old, name in items:
            self.shapes.setdefault(name, self._old_shapes.get(old, ()))
        if not self._lets(path, [str(name) for name in new]):
            return None
        for old, taken in zip(names, new, strict=True):
            self._take(old, str(taken))
        self._take_items(items)
        return base

    def _lets(self, path: str, names: list[str]) -> bool:
        """Whether the filter lets an entry through, which is chosen whole or not at all."""
        chosen = [self._filter.lets(name) for name in names]
        if any(chosen) and not all(chosen):
            raise ConfigError(
                f"{path!r} is a list, a tuple or an object, of which include= and exclude= choose "
                f"only a part: choose all or nothing of {names[:4]}. Nothing was changed."
            )
        if not any(chosen):
            self.left_out += names
        return any(chosen)

    def _take(self, old: str, new: str) -> None:
        other = self._takers.setdefault(new, old)
        if other != old:
            raise CheckpointMismatch(
                f"{other!r} and {old!r} would both be called {new!r}: rename them apart, or give "
                "one of them None. Nothing was changed."
            )
        if new.count("/") >= MAX_DEPTH:
            raise ConfigError(f"rename gave {new[:80]!r}..., deeper than {MAX_DEPTH}")

    def _take_items(self, names: Iterable[tuple[str, str]]) -> None:
        for old, new in names:
            self.items.setdefault(old, []).append(new)

    def _require_used(self) -> None:
        """Raise CheckpointMismatch for a pattern that means nothing: it is misspelt."""
        names = [*self._takers, *self.left_out]
        for word, unused in (
            ("rename", self._renames.unused()),
            ("include", self._filter.unused(names)),
        ):
            if unused:
                raise CheckpointMismatch(
                    f"{word}={unused[0]!r} matches no name of step {self._step}, which has "
                    f"{names[:4]}{' and others' if len(names) > 4 else ''}. Nothing was changed."
                )


def _base(path: str, names: list[str], new: list[str | None]) -> str:
    """Where an entry goes, all of whose names must go there alike. Raises ConfigError."""
    bases = set()
    for old, name in zip(names, new, strict=True):
        rest = old[len(path) :]
        bases.add(
            None if name is None or not name.endswith(rest) else name[: len(name) - len(rest)]
        )
    (first, *others) = bases
    if others or not first:
        raise ConfigError(
            f"{path!r} is a list, a tuple or an object, of which rename= moves only a part: give "
            f"all of {names[:4]} the same new beginning. Nothing was changed."
        )
    return first
