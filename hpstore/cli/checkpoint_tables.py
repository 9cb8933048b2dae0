"""What `checkpoint ls` and `inspect` show: rows of steps, the tree of one."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.tree import Tree

from hpstore.checkpoint.format.checkpoint_manifest import Manifest
from hpstore.checkpoint.format.items import by_name
from hpstore.checkpoint.restore.tensor_stream import tensor_bytes
from hpstore.checkpoint.state.tree_paths import leaves, subtree
from hpstore.cli.output import StdoutConsole, plain, write_out
from hpstore.cli.size_tree import split_path
from hpstore.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One committed step. `own_bytes`: of segments that no other step names."""

    step: int
    bytes: int
    own_bytes: int
    shared_bytes: int
    items: int
    world: int
    created_ms: int
    protected: tuple[str, ...]
    metrics: Mapping[str, float]
    name: str | None = None  # of a trainer that knows its checkpoints by name; `step` is a number
    global_step: int | None = None  # then, as that trainer counts them

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)

    def cells(self) -> tuple[object, ...]:
        """For the table."""
        metrics = ", ".join(f"{name} {value:.6g}" for name, value in self.metrics.items())
        sizes = (self.bytes, self.own_bytes, self.shared_bytes)
        return (
            self.step,
            *map(format_bytes, sizes),
            self.items,
            self.world,
            _when(self.created_ms),
            ", ".join(self.protected),
            metrics,
        )


def _when(created_ms: int) -> str:
    return time.strftime("%F %T", time.localtime(created_ms / 1000))


def listed(manifests: Sequence[Manifest], protected: Mapping[str, int]) -> list[StepRow]:
    """Rows of steps. Pure."""
    named = Counter(segment.key for m in manifests for segment in m.objects)
    rows = []
    for m in manifests:
        own = m.within_bytes + sum(s.size for s in m.objects if named[s.key] == 1)
        rows.append(
            StepRow(
                step=m.step,
                bytes=m.total_bytes,
                own_bytes=own,
                shared_bytes=m.total_bytes - own,
                items=len(m.items),
                world=m.world,
                created_ms=m.created_ms,
                protected=tuple(sorted(n for n, step in protected.items() if step == m.step)),
                metrics=dict(m.metrics),
                **_as_named(m),
            )
        )
    return rows


def _as_named(manifest: Manifest) -> dict[str, Any]:  # Any: as the fields of StepRow
    """Name and global step of a checkpoint that a trainer saved by name
    (hpstore.trainers.named_checkpoints); nothing of another. The trainer's own, as Lightning and
    Hugging Face write them."""
    tree = manifest.tree
    if not isinstance(tree, dict) or set(tree) != {"name", "checkpoint"}:
        return {}
    found = {leaf.path: leaf.node for leaf in leaves(tree)}
    step = found.get("checkpoint/global_step", found.get("checkpoint/step"))
    name = found.get("name")
    return {
        "name": name if isinstance(name, str) else None,
        "global_step": step if type(step) is int else None,
    }


def table_of(rows: Sequence[StepRow]) -> tuple[tuple[str, ...], list[tuple[object, ...]]]:
    """Headings and cells. Checkpoints by name have the trainer's steps first."""
    headings = (
        "step",
        "size",
        "own",
        "shared",
        "items",
        "world",
        "saved",
        "protected as",
        "metrics",
    )
    cells = [row.cells() for row in rows]
    if not any(row.name for row in rows):
        return headings, cells
    named = [
        ("-" if row.global_step is None else row.global_step, row.name or "-", *rest)
        for row, rest in zip(rows, cells, strict=True)
    ]
    return ("step", "name", "save", *headings[1:]), named


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """What a step holds: tensors and values by path, and a summary of the whole."""

    tensors: Mapping[str, Mapping[str, Any]]  # Any: what JSON holds
    values: Mapping[str, str]
    summary: Mapping[str, Any]

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        tensors = [{"name": name, **facts} for name, facts in self.tensors.items()]
        return {**self.summary, "tensors": tensors, "values": dict(self.values)}


def described(
    manifest: Manifest,
    keys: Collection[str] | None,
    protected: Sequence[str],
    losses_tolerated: int | None,
) -> Description:
    """A step, or its parts at `keys`. Raises CheckpointError."""
    items = by_name(manifest.items)
    tensors: dict[str, Mapping[str, Any]] = {}
    values = {}
    for leaf in leaves(subtree(manifest.tree, list(keys) if keys else None)):
        if not leaf.item:
            values[leaf.path] = leaf.shown()
            continue
        boxes = items.get(leaf.item, [])
        if boxes:
            tensors[leaf.path] = {
                "dtype": boxes[0].dtype,
                "shape": boxes[0].shape,
                "bytes": tensor_bytes(boxes[0]),
                "stored_bytes": sum(i.length for i in boxes),
                "codec": boxes[0].codec,
                "boxes": [[i.box.offsets, i.box.sizes] for i in boxes] if len(boxes) > 1 else [],
            }
    raw = sum(facts["bytes"] for facts in tensors.values())
    stored = sum(facts["stored_bytes"] for facts in tensors.values())
    summary = {
        "step": manifest.step,
        "created_ms": manifest.created_ms,
        "world": manifest.world,
        "bytes": raw,
        "stored_bytes": stored,
        "compression_ratio": raw / stored if stored else 1.0,
        "segments": len(manifest.segments),
        "losses_tolerated": losses_tolerated,
        "session": manifest.session,
        "lineage": manifest.extra.get("lineage", {}),
        "metrics": dict(manifest.metrics),
        "protected": list(protected),
    }
    return Description(tensors=tensors, values=values, summary=summary)


def show_tree(found: Description) -> None:
    """The tree, then a line or two of the whole, on standard output."""
    root = Tree(f"step {found.summary['step']}")
    branches: dict[str, Tree] = {"": root}
    for path, facts in found.tensors.items():
        *above, name = split_path(path)
        _branch(branches, "/".join(above)).add(plain(f"{name}  {_tensor_line(facts)}"))
    for path, text in found.values.items():
        *above, name = split_path(path)
        _branch(branches, "/".join(above)).add(plain(f"{name} = {text}"))
    StdoutConsole(width=None if sys.stdout.isatty() else 160, highlight=False).print(root)
    write_out(_summary_text(found))


def _branch(branches: dict[str, Tree], path: str) -> Tree:
    if path not in branches:
        where, _, name = path.rpartition("/")
        branches[path] = _branch(branches, where).add(plain(name))
    return branches[path]


def _tensor_line(facts: Mapping[str, Any]) -> str:
    parts = [str(facts["dtype"]), str(list(facts["shape"])), format_bytes(facts["bytes"])]
    if facts["codec"]:
        parts.append(f"({facts['codec']}: {format_bytes(facts['stored_bytes'])})")
    if facts["boxes"]:
        shown = [f"{list(sizes)} at {list(offsets)}" for offsets, sizes in facts["boxes"][:4]]
        more = ", ..." if len(facts["boxes"]) > 4 else ""
        parts.append(f"in {len(facts['boxes'])} boxes: {', '.join(shown)}{more}")
    return "  ".join(parts)


def _summary_text(found: Description) -> str:
    said = found.summary
    text = (
        f"{len(found.tensors)} tensors, {format_bytes(said['bytes'])}, stored as "
        f"{format_bytes(said['stored_bytes'])} (ratio {said['compression_ratio']:.2f}); "
        f"{said['segments']} segments, {said['losses_tolerated']} losses tolerated; saved "
        f"{_when(said['created_ms'])} by {said['world']} ranks, session {said['session'] or '?'}\n"
    )
    for name in ("protected", "metrics", "lineage"):
        if said[name]:
            shown = (
                said[name]
                if isinstance(said[name], list)
                else [f"{key} {value}" for key, value in said[name].items()]
            )
            text += f"{name}: {', '.join(map(str, shown))}\n"
    return text
