"""A step as a tree with sizes, summed at each level."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from rich.tree import Tree

from hpstore.checkpoint.format.checkpoint_manifest import Manifest
from hpstore.checkpoint.format.items import by_name
from hpstore.checkpoint.restore.tensor_stream import tensor_bytes
from hpstore.checkpoint.state.tree_paths import leaves, subtree
from hpstore.cli.output import StdoutConsole, plain
from hpstore.units import format_bytes

_MOST_LEVELS = 24  # deeper ones are further right than a terminal is wide


@dataclass(slots=True, kw_only=True)
class SizeNode:
    """A level of the state, with the sums of what is below it."""

    name: str
    form: str = ""  # of a tensor: its dtype and shape
    tensors: int = 0
    values: int = 0  # that are no tensors
    bytes: int = 0  # of the tensors
    stored_bytes: int = 0  # what they take without parity, compressed if they are
    children: dict[str, SizeNode] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """One line."""
        size = format_bytes(self.bytes)
        if self.form:
            return f"{self.name}  {self.form}  {size}"
        values = f", {self.values} values" if self.values else ""
        return f"{self.name}  {size}  ({self.tensors} tensors{values})"

    def as_dict(self, depth: int | None) -> dict[str, object]:
        """For JSON; without what is more than `depth` levels below."""
        below = None if depth is None else depth - 1
        shown = self.children.values() if depth != 0 else ()
        return {
            "name": self.name,
            "form": self.form,
            "bytes": self.bytes,
            "stored_bytes": self.stored_bytes,
            "tensors": self.tensors,
            "values": self.values,
            "children": [child.as_dict(below) for child in shown],
        }


def split_path(path: str) -> list[str]:
    """The names on a path; what comes after very many slashes, as a name may hold, is one."""
    return path.split("/", _MOST_LEVELS)


def size_tree(manifest: Manifest, keys: Collection[str] | None) -> SizeNode:
    """The tree of a step, or of its parts at `keys`. Raises CheckpointError."""
    stored = by_name(manifest.items)
    root = SizeNode(name=f"step {manifest.step}")
    for leaf in leaves(subtree(manifest.tree, list(keys) if keys else None)):
        levels = list(_levels(root, leaf.path))
        items = stored.get(leaf.item, [])
        if not items:
            for level in levels:
                level.values += 1
            continue
        levels[-1].form = f"{items[0].dtype} {list(items[0].shape)}"
        for level in levels:
            level.tensors += 1
            level.bytes += tensor_bytes(items[0])
            level.stored_bytes += sum(item.length for item in items)
    return root


def _levels(root: SizeNode, path: str) -> Iterator[SizeNode]:
    """The nodes on a path, made where they are not there."""
    node = root
    yield node
    for part in split_path(path):
        node = node.children.setdefault(part, SizeNode(name=part))
        yield node


def show_sizes(root: SizeNode, depth: int | None) -> None:
    """The tree on standard output, down to `depth` levels below the step; single values are in
    the counts of their levels only."""
    shown = Tree(plain(root.text))
    pending = [(shown, root, depth)]
    while pending:
        branch, node, left = pending.pop()
        if left == 0:
            continue
        for child in node.children.values():
            if child.tensors:
                below = branch.add(plain(child.text))
                pending.append((below, child, None if left is None else left - 1))
    StdoutConsole(width=None if sys.stdout.isatty() else 160, highlight=False).print(shown)
