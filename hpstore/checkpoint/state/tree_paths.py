"""What a checkpoint's tree holds, by path: leaves, parts that keys choose, plain values. Pure."""

from __future__ import annotations

import enum
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hpstore.checkpoint.state.plain_values import JSON_TYPES, holds_leaves, is_plain
from hpstore.checkpoint.state.random_state import SOURCES
from hpstore.checkpoint.state.scalars import TAG, Classes
from hpstore.checkpoint.state.state_tree import Decoding, decode_tree, join
from hpstore.errors import CheckpointError
from hpstore.format.untrusted_bytes import parsing

_NUMBERS_AND_TEXT = (bool, int, float, complex, str, bytes)
_EXPORTED = frozenset({*_NUMBERS_AND_TEXT, bytearray, torch.Size, torch.dtype, torch.device})
Json = Any  # Any: the tree of a manifest, decoded JSON
_MISSING = object()
_SHOWN = Decoding(tensor=lambda name: torch.empty(0), classes=Classes(strict=False))


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One entry of a tree. `item`: the tensor's name, "" for a value; `node`: its JSON."""

    path: str
    item: str
    node: Json

    def shown(self) -> str:
        """A value in a few words, as Python writes it."""
        if isinstance(self.node, dict) and self.node.get(TAG) == "pickle":
            return "<pickled object>"
        value = decode_tree(self.node, _SHOWN)
        text = repr(value)
        return text if len(text) <= 80 else f"{text[:77]}..."


def leaves(node: Json, path: str = "") -> Iterator[Leaf]:
    """Tensors and values of a tree in order; a list or tuple without tensors is one value."""
    for where, found in _leaf_nodes(node, path):
        named = isinstance(found, dict) and found.get(TAG) in ("tensor", "ndarray")
        yield Leaf(path=where, item=found["item"] if named else "", node=found)


def leaf_paths(node: Json) -> Iterator[str]:
    """The paths of all leaves()."""
    for path, _ in _leaf_nodes(node, ""):
        yield path


def _leaf_nodes(node: Json, path: str) -> Iterator[tuple[str, Json]]:
    kind = node.get(TAG) if isinstance(node, dict) else None
    if isinstance(node, dict) and kind in (None, "dict", "ranks"):
        for where, child in _children_below(node, path):
            if type(child) in JSON_TYPES:  # of which there may be very many
                yield where, child
            else:
                yield from _leaf_nodes(child, where)
    elif (isinstance(node, list) or kind == "tuple") and _has_names(_parts(node)):
        for index, part in enumerate(_parts(node)):
            yield from _leaf_nodes(part, join(path, index))
    else:
        yield path, node


def _parts(node: Json) -> Json:
    """What a list or a tuple holds."""
    return node if isinstance(node, list) else node["v"]


def _has_names(node: Json) -> bool:
    """Whether a node is or holds a tensor or a dict."""
    if isinstance(node, list):
        return not is_plain(node) and any(map(_has_names, node))
    if not isinstance(node, dict):
        return False
    kind = node.get(TAG)
    return (
        _has_names(node["v"])
        if kind == "tuple"
        else kind in (None, "dict", "ranks", "tensor", "ndarray")
    )


def _below(path: str, name: object, kind: str | None) -> str:
    return f"{path}@{name}" if kind == "ranks" else join(path, name)


def _children_below(node: Mapping[str, Any], path: str) -> Iterator[tuple[str, Json]]:
    """Paths and nodes inside a dict of any kind."""
    if TAG not in node:
        start = f"{path}/" if path else ""  # the common case, without a call for each
        return ((start + name, child) for name, child in node.items())
    kind = node[TAG]
    return ((_below(path, name, kind), child) for name, child in children(node))


def children(node: Mapping[str, Any]) -> Iterator[tuple[object, Json]]:
    """Names and nodes inside a dict of any kind."""
    if TAG not in node:
        yield from node.items()
    elif node[TAG] == "ranks":
        yield from node["v"].items()
    else:
        for key, child in node["v"]:
            yield decode_tree(key, _SHOWN), child


def of_rank(node: Json, rank: int) -> Json:
    """The tree as one rank sees it: of what ranks keep for themselves, only its own."""
    if isinstance(node, list):
        return node if is_plain(node) else [of_rank(child, rank) for child in node]
    if not isinstance(node, dict):
        return node
    kind = node.get(TAG)
    if kind == "ranks":
        mine = {name: child for name, child in node["v"].items() if name == str(rank)}
        return {TAG: kind, "v": mine}
    if kind is None:
        if holds_leaves(node):
            return node
        return {name: of_rank(child, rank) for name, child in node.items()}
    if kind == "dict":
        return {**node, "v": [[key, of_rank(child, rank)] for key, child in node["v"]]}
    if kind == "tuple":
        return {**node, "v": of_rank(node["v"], rank)}
    return node


def paths(node: Json, path: str = "") -> Iterator[str]:
    """Paths of a node and of all below it, containers too; that of the tree itself is ""."""
    yield path
    kind = node.get(TAG) if isinstance(node, dict) else None
    if isinstance(node, dict) and kind in (None, "dict", "ranks"):
        for where, child in _children_below(node, path):
            if type(child) in JSON_TYPES:
                yield where
            else:
                yield from paths(child, where)
    elif (isinstance(node, list) or kind == "tuple") and not is_plain(_parts(node)):
        for index, child in enumerate(_parts(node)):
            yield from paths(child, join(path, index))


def subtree(tree: Json, keys: Sequence[str] | None) -> Json:
    """The part of a tree at and under `keys`; all of it for None. Raises CheckpointError."""
    if keys is None:
        return tree
    absent = [key for key in keys if _pruned(tree, "", [key.strip("/")]) is _MISSING]
    if absent or not keys:
        raise CheckpointError(
            f"the checkpoint holds nothing at {absent}; its parts are "
            f"{[str(name) for name, _ in children(tree)][:8]}"
        )
    return _pruned(tree, "", [key.strip("/") for key in keys])


def _pruned(node: Json, path: str, keys: Sequence[str]) -> Json:
    if path and any(path == key or path.startswith(f"{key}/") for key in keys):
        return node
    inside = [key for key in keys if not path or key.startswith(f"{path}/")]
    if not inside or not isinstance(node, dict) or node.get(TAG) not in (None, "dict"):
        return _MISSING
    if TAG not in node:
        kept = {n: _pruned(child, join(path, n), inside) for n, child in node.items()}
        found = {name: child for name, child in kept.items() if child is not _MISSING}
        return found or _MISSING
    pairs = zip(node["v"], children(node), strict=True)
    rows = [[row[0], _pruned(child, join(path, name), inside)] for row, (name, child) in pairs]
    left = [row for row in rows if row[1] is not _MISSING]
    return {**node, "v": left} if left else _MISSING


def stripped(tree: Json, prefix: str) -> Json:
    """What is under `prefix`, which all of the tree must be. Raises CheckpointError."""
    prefix = prefix.strip("/")
    outside = [leaf.path for leaf in leaves(tree) if not leaf.path.startswith(f"{prefix}/")]
    if outside:
        raise CheckpointError(
            f"{prefix!r} cannot be stripped: {outside[:4]} are not under it; choose with keys"
        )
    node, path = tree, ""
    while path != prefix:
        inside = list(children(node))
        if len(inside) != 1:
            raise CheckpointError(f"{prefix!r} cannot be stripped: it names no part of the tree")
        ((name, node),) = inside
        path = join(path, name)
        if not isinstance(node, dict) or node.get(TAG) not in (None, "dict"):
            raise CheckpointError(f"{prefix!r} cannot be stripped: {path!r} holds no names")
    return node


def only_branch(tree: Json) -> str:
    """The one top name under which all tensors are; "" when there are several."""
    tops = [
        (str(name), child)
        for name, child in children(tree)
        if any(leaf.item for leaf in leaves(child))
    ]
    if len(tops) != 1 or not isinstance(tops[0][1], dict):
        return ""
    return tops[0][0] if tops[0][1].get(TAG) in (None, "dict") else ""


def plain(node: Json, tensor: Callable[[str], torch.Tensor], path: str = "") -> Any:
    """Values that torch.load(weights_only=True) takes, keys too: numpy arrays as tensors, numpy
    numbers as Python's, sets as tuples, objects as dicts, paths, times, enums and the like as text,
    those that are numbers or text by their values; of what ranks keep for themselves the first
    that is there (see of_rank), or None.

    Raises CheckpointError for pickled objects, IntegrityError for what no save has recorded.
    """
    with parsing("the recorded state"):
        return _plain(node, tensor, path)


def _plain(node: Json, tensor: Callable[[str], torch.Tensor], path: str) -> Any:
    if isinstance(node, list):
        return [_plain(child, tensor, join(path, n)) for n, child in enumerate(node)]
    if not isinstance(node, dict):
        return node
    kind = node.get(TAG)
    if kind in ("tensor", "ndarray"):
        return tensor(node["item"])
    if kind is None:
        return {name: _plain(child, tensor, join(path, name)) for name, child in node.items()}
    if kind == "dict":
        return _plain_rows(node, tensor, path)
    if kind == "tuple":
        return tuple(_plain(child, tensor, join(path, n)) for n, child in enumerate(node["v"]))
    if kind == "ranks":
        return next((_plain(child, tensor, path) for child in node["v"].values()), None)
    if kind == "pickle":
        raise CheckpointError(
            f"{path!r} is a pickled object, which an export does not hold; "
            "choose other parts with keys"
        )
    if kind in SOURCES:
        return node["v"]
    return _plain_value(decode_tree(node, _SHOWN))


def _plain_rows(node: Json, tensor: Callable[[str], torch.Tensor], path: str) -> dict[Any, Any]:
    """A dict whose keys are plain, too. Raises CheckpointError where two become one."""

    def no_tensor(name: str) -> torch.Tensor:
        raise CheckpointError(f"{path!r} has the tensor {name!r} for a key: no export holds that")

    made: dict[Any, Any] = {}
    for (key_node, child), (name, _) in zip(node["v"], children(node), strict=True):
        key = _plain(key_node, no_tensor, f"{path} (key)")
        try:
            hash(key)
        except TypeError:  # of an object, which is a dict
            key = str(name)
        if key in made:
            raise CheckpointError(
                f"{path!r} has two keys that are {key!r} in an export; choose other parts with keys"
            )
        made[key] = _plain(child, tensor, join(path, name))
    return made


def _plain_value(value: Any) -> Any:
    """A single value as one that torch.load(weights_only=True) takes."""
    if isinstance(value, enum.Enum) and isinstance(value, _NUMBERS_AND_TEXT):
        value = value.value
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, io.BytesIO):
        value = value.getvalue()
    return value if type(value) in _EXPORTED else str(value)
