"""State as a typed JSON tree plus named tensors. No pickle, unless it is asked for.

Tensors and numpy arrays become items with a path ("optimizer/state/head.weight/exp_avg"); what is
left (numbers, strings, containers) is JSON with a tag `$` where JSON has no type of its own
(scalars.py, typed.py, random_sources.py). An object of any other type is refused with the path at
which it stands.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch

from hpstore.checkpoint.state import pickled
from hpstore.checkpoint.state.plain_tensors import (
    PLAIN_TYPES,
    TensorColumns,
    columns_of,
    has_chunks,
    require_savable,
)
from hpstore.checkpoint.state.plain_values import (
    JSON_TYPES,
    MOST_BITS,
    ROWS,
    all_json,
    holds_leaves,
    is_plain,
    is_unicode,
)
from hpstore.checkpoint.state.random_state import SOURCES, decode_source, encode_source, kind_of
from hpstore.checkpoint.state.scalars import (
    TAG,
    Classes,
    Unrestorable,
    decode_scalar,
    encode_scalar,
    require_unicode,
)
from hpstore.checkpoint.state.typed_objects import (
    mapping_type,
    object_parts,
    of_mapping,
    of_sequence,
    sequence_parts,
    warn_of_class,
)
from hpstore.errors import CheckpointError, IntegrityError
from hpstore.format.untrusted_bytes import MALFORMED, brief

MAX_DEPTH = 64
_MOST_LEVELS = 4 * MAX_DEPTH  # of JSON: a dict with keys that are no texts takes three

# Any below: trees hold whatever a training state holds; every leaf is checked by its type
Tree = Any
Json = Any


class PerRank:
    """A value that every rank keeps for itself: recorded by rank, given back to the same rank."""

    def __init__(self, value: Tree) -> None:
        self.value = value


class NamedValues(tuple[Any, ...]):
    """What a namedtuple was saved as: a tuple that knows its fields. A state that has a namedtuple
    with the same fields in its place gets one of its class back (see fill)."""

    _fields: tuple[str, ...]

    @classmethod
    def of(cls, values: Iterable[Any], fields: Iterable[str]) -> NamedValues:
        """Values by the names of their fields."""
        made = cls(values)
        made._fields = tuple(map(str, fields))
        if len(made) != len(made._fields):
            raise ValueError(f"{len(made)} values for the fields {made._fields}")
        return made


def field_names(value: Tree) -> tuple[str, ...]:
    """Fields of a namedtuple, () for anything else."""
    names = getattr(value, "_fields", ()) if isinstance(value, tuple) else ()
    return tuple(names) if all(type(name) is str for name in names) else ()


class Absent:
    """Stands for what a rank keeps for itself and the checkpoint has not for this rank."""


ABSENT = Absent()


class CollectedTensors:
    """Tensors met while encoding, by path, in order. `columns`: of them, once all are met."""

    def __init__(self, *, rank: int = 0, allow_pickle: bool = False) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.columns: TensorColumns
        self.rank, self.allow_pickle = rank, allow_pickle

    def add(self, tensor: torch.Tensor, path: str) -> str:
        """Note one; returns its path. Raises CheckpointError where that is the path of another."""
        if path in self.tensors:
            raise CheckpointError(
                f"state: two tensors have the path {path!r}, as those of {{'a/b': x}} and {{'a': "
                "{'b': y}} have one: rename one of them. Nothing was written."
            )
        self.tensors[path] = tensor
        return path


def join(path: str, name: object) -> str:
    """Path of a child."""
    text = str(name)
    return f"{path}/{text}" if path else text


def require_depth(path: str, depth: int) -> None:
    """Raise CheckpointError for what is nested too deeply, as all is that contains itself."""
    if depth > MAX_DEPTH:
        raise CheckpointError(
            f"state {path[:80]!r}... is nested deeper than {MAX_DEPTH} levels, or contains itself. "
            "Nothing was changed; leave out what refers back to its parent"
        )


def encode_tree(value: Tree, path: str, found: CollectedTensors) -> Json:
    """JSON for `value`; its tensors go into `found`. Raises CheckpointError naming the path."""
    tree = _encode(value, path, found, 0)
    found.columns = columns_of(found.tensors)
    return tree


def _encode(value: Tree, path: str, found: CollectedTensors, depth: int) -> Json:
    require_depth(path, depth)
    kind = type(value)
    if kind is dict and TAG not in value and _has_plain_keys(value):
        if all_json(value.values()):
            return dict(value)
        start = f"{path}/" if path else ""
        require_depth(path, depth + 1)  # once: there may be very many tensors in it
        return {
            k: {TAG: "tensor", "item": found.add(v, start + k)}
            if type(v) in PLAIN_TYPES
            else _encode(v, start + k, found, depth + 1)
            for k, v in value.items()
        }
    if isinstance(value, torch.Tensor):
        return _encode_tensor(value, path, found)
    if kind in JSON_TYPES:
        return _encode_plain(value, path)
    if kind is list:
        return _encode_list(value, path, found, depth)
    if kind is tuple:
        return {TAG: "tuple", "v": _encode_list(value, path, found, depth)}
    try:
        return _encode_typed(value, path, found, depth)
    except Unrestorable:
        if not found.allow_pickle:
            raise
        return _refused(value, path, found)


def _encode_plain(value: Tree, path: str) -> Json:
    """A number, text or None."""
    kind = type(value)
    if kind is str and not is_unicode(value):
        raise CheckpointError(
            f"state {path!r} is text with half a surrogate pair, which has no UTF-8. Nothing was "
            'written; save text.encode(errors="surrogatepass")'
        )
    if kind is int and value.bit_length() > MOST_BITS:
        raise CheckpointError(
            f"state {path!r} is a number of {value.bit_length()} bits, and a checkpoint holds up "
            f"to {MOST_BITS}. Nothing was written; save number.to_bytes(...)"
        )
    if kind is float and not math.isfinite(value):
        return {TAG: "float", "v": repr(value)}
    return value


def _encode_list(
    value: Sequence[Any], path: str, found: CollectedTensors, depth: int
) -> list[Json]:
    if all_json(value):
        return list(value)
    kinds = set(map(type, value))
    if kinds <= ROWS and len(kinds) == 1 and all_json(list(chain.from_iterable(value))):
        return [list(row) if kinds == {list} else {TAG: "tuple", "v": list(row)} for row in value]
    start = f"{path}/" if path else ""
    return [_encode(v, f"{start}{i}", found, depth + 1) for i, v in enumerate(value)]


def _encode_typed(value: Tree, path: str, found: CollectedTensors, depth: int) -> Json:
    """What is more than a number, text, list, tuple or dict."""
    if isinstance(value, PerRank):
        mine = _encode(value.value, f"{path}@{found.rank}", found, depth + 1)
        return {TAG: "ranks", "v": {str(found.rank): mine}}
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return {TAG: "ndarray", "item": _array_item(value, path, found)}
    scalar = encode_scalar(value, path)
    if scalar is not None:
        require_unicode(scalar, type(value), path)
        return scalar
    if isinstance(value, str):
        warn_of_class(type(value), path)
        return _encode_plain(str.__str__(value), path)
    if isinstance(value, Mapping):
        return _encode_mapping(value, mapping_type(value, path), path, found, depth)
    if isinstance(value, torch.Size):
        return {TAG: "size", "v": list(value)}
    if isinstance(value, tuple):
        inner = _encode_list(value, path, found, depth)
        names = field_names(value)
        require_unicode(names, type(value), path)
        if not names:
            warn_of_class(type(value), path)
        return {TAG: "tuple", "v": inner} | ({"fields": list(names)} if names else {})
    sequence = sequence_parts(value)
    if sequence is not None:
        return {TAG: "tuple", "v": _encode_list(sequence[1], path, found, depth), **sequence[0]}
    source = kind_of(value)
    if source is not None:
        return {TAG: source, **(encode_source(value) or {})}
    parts = object_parts(value, path)
    if parts is not None:
        return _encode_mapping(parts[1], parts[0], path, found, depth)
    return _refused(value, path, found)


def _has_plain_keys(value: Mapping[Any, Any]) -> bool:
    return set(map(type, value)) <= {str} and all(map(str.isascii, value))


def _encode_tensor(value: torch.Tensor, path: str, found: CollectedTensors) -> Json:
    if type(value) not in PLAIN_TYPES:
        require_savable(value, f"state {path!r}")
        if not has_chunks(value) and not isinstance(value, torch.nn.Buffer):
            warn_of_class(type(value), path)
    return {TAG: "tensor", "item": found.add(value, path)}


def _array_item(value: np.ndarray[Any, Any], path: str, found: CollectedTensors) -> str:
    if isinstance(value, np.ma.MaskedArray):
        raise CheckpointError(
            f"state {path!r} is a masked array: save its .data and .mask, the mask would be lost"
        )
    if value.dtype.fields is not None:
        raise CheckpointError(
            f"state {path!r} is a numpy array of {value.dtype}: save each field by itself. Nothing "
            "was written."
        )
    if type(value) not in (np.ndarray, np.memmap):  # of a map no more is kept than its values
        warn_of_class(type(value), path)
    if not value.dtype.isnative:
        value = value.astype(value.dtype.newbyteorder("="))
    if not value.flags.writeable:  # torch would warn of it: a view of a tensor could be written
        value = value.copy()
    try:
        tensor = torch.from_numpy(np.ascontiguousarray(value).reshape(value.shape))
    except TypeError as error:
        raise CheckpointError(
            f"state {path!r} is a numpy array of {value.dtype}, which torch has no type for: save "
            "it as a list, or as numbers. Nothing was written."
        ) from error
    return found.add(tensor, path)


def _encode_mapping(
    value: Mapping[Any, Any], extra: Json, path: str, found: CollectedTensors, depth: int
) -> Json:
    """`extra`: what is recorded beside the entries, {} for a plain dict."""
    if not extra and all(type(k) is str and k != TAG for k in value):
        for key in value:
            if not is_unicode(key):
                raise CheckpointError(
                    f"state {path!r} has the key {key!r}, text with half a surrogate pair"
                )
        return {k: _encode(v, join(path, k), found, depth + 1) for k, v in value.items()}
    rows = []
    for key, child in value.items():
        node, where = _encode(key, f"{path} (key)", found, depth + 1), join(path, key)
        if not where.isascii():  # there may be very many
            require_unicode(where, type(key), f"{path} (key)")
        rows.append([node, _encode(child, where, found, depth + 1)])
    return {TAG: "dict", "v": rows, **extra}


def _refused(value: Tree, path: str, found: CollectedTensors) -> Json:
    if found.allow_pickle:
        return {TAG: "pickle", "v": base64.b64encode(pickled.dumps(value, path)).decode()}
    if isinstance(value, np.ndarray):
        raise CheckpointError(
            f"state {path!r} is a numpy array of objects: save it as a list. Nothing was written."
        )
    named = value if isinstance(value, type) else type(value)
    kind = f"{'class ' if named is value else ''}{named.__module__}.{named.__qualname__}"
    if hasattr(value, "state_dict") and named is not value:
        raise CheckpointError(
            f"state {path!r} is a {kind}, which is asked for no state there: it is inside what a "
            "state_dict() has returned, or has no load_state_dict(). Put its state_dict() in its "
            "place. Nothing was written."
        )
    raise CheckpointError(
        f"state {path!r} is a {kind}; a checkpoint "
        "holds tensors, numpy arrays, numbers, strings, bytes, lists, tuples, dicts, sets, enums, "
        "dataclasses, paths, times, random generators, and objects with state_dict() and "
        "load_state_dict(). Nothing was written. Checkpointer(allow_pickle=True) saves such "
        "objects as pickles, which only a trusted pool may give back."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """How a tree is turned back into values: `tensor(name)` gives items, `array(name)` those that
    were numpy arrays, on the host. Default: tensor."""

    tensor: Callable[[str], torch.Tensor]
    array: Callable[[str], torch.Tensor] | None = None
    rank: int = 0
    allow_pickle: bool = False
    classes: Classes = field(default_factory=Classes)


def decode_tree(node: Json, how: Decoding) -> Tree:
    """Inverse of encode_tree. Raises CheckpointError, IntegrityError for what is no such tree."""
    try:
        return _decode(node, how)
    except MALFORMED as error:
        raise IntegrityError(f"the recorded state is malformed: {brief(error)}") from error


def _decode(node: Json, how: Decoding) -> Tree:
    if isinstance(node, list):
        if set(map(type, node)) <= JSON_TYPES:
            return list(node)
        return [_decode(child, how) for child in node]
    if not isinstance(node, dict):
        return node
    if TAG not in node:
        if holds_leaves(node):
            return dict(node)
        return {name: _decode(child, how) for name, child in node.items()}
    kind = node[TAG]
    if kind == "tensor":
        return how.tensor(node["item"])
    if kind == "ndarray":
        return (how.array or how.tensor)(node["item"]).numpy()
    if kind == "dict":
        parts = {_decode(k, how): _decode(v, how) for k, v in node["v"]}
        return of_mapping(node, parts, how.classes) if "type" in node else parts
    if kind == "tuple":
        return _decode_tuple(node, [_decode(child, how) for child in node["v"]])
    if kind == "ranks":
        mine = node["v"].get(str(how.rank), ABSENT)
        return ABSENT if mine is ABSENT else _decode(mine, how)
    if kind == "pickle":
        if not how.allow_pickle:
            raise CheckpointError(
                "this checkpoint holds pickled objects; they run code when they are loaded. "
                "Checkpointer(allow_pickle=True) loads them, from a pool that you trust."
            )
        return pickled.loads(base64.b64decode(node["v"]))
    if kind in SOURCES:
        return decode_source(kind, node)
    return decode_scalar(kind, node, how.classes)


def _decode_tuple(node: Mapping[str, Any], parts: list[Any]) -> Tree:
    if "type" in node:
        return of_sequence(node, parts)
    return NamedValues.of(parts, node["fields"]) if "fields" in node else tuple(parts)


def check_tree(node: Json) -> None:
    """Raise ValueError for a recorded tree whose nodes lack what those who walk it take for
    granted. One pass; long lists of plain values are not looked into."""
    todo = [(node, 0)]
    while todo:
        here, depth = todo.pop()
        if depth > _MOST_LEVELS:
            raise ValueError(f"the state is nested deeper than {_MOST_LEVELS} levels")
        if isinstance(here, list):
            inside: Iterable[Json] = () if is_plain(here) else here
        elif TAG in here:
            inside = _checked_parts(here)
        else:
            inside = here.values()
        todo += [(child, depth + 1) for child in inside if type(child) in (list, dict)]


def _checked_parts(node: Mapping[str, Json]) -> Iterable[Json]:
    """What is to be looked at in a tagged node. Raises ValueError."""
    kind = node[TAG]
    value = node.get("item" if kind in ("tensor", "ndarray") else "v")
    inside: Iterable[Json] = ()
    if kind == "dcp":
        return inside
    if kind in ("tensor", "ndarray"):
        good = type(value) is str
    elif kind == "dict":
        good = isinstance(value, list) and all(isinstance(r, list) and len(r) == 2 for r in value)
        inside = chain.from_iterable(value or ()) if good else ()
    elif kind == "ranks":
        good = isinstance(value, dict)
        inside = value.values() if isinstance(value, dict) else ()
    else:
        good = isinstance(kind, str) and (value is not None or kind == "float")
        good = good and (kind != "tuple" or isinstance(value, list))
        inside = (value,)
    if not good:
        raise ValueError(f"a value of kind {str(kind)[:40]!r} is malformed")
    return inside


def tensor_names(
    node: Json, *, rank: int | None = None, kinds: Collection[str] = ("tensor", "ndarray")
) -> list[str]:
    """Names of the items that a tree refers to; with `rank` only that rank's own and the common."""
    found: list[str] = []
    todo = [node]
    while todo:
        here = todo.pop()
        if isinstance(here, list):
            todo += reversed(here)
        elif isinstance(here, dict):
            kind = here.get(TAG)
            if kind in kinds:
                found.append(here["item"])
            elif kind == "ranks":
                todo += [c for name, c in here["v"].items() if rank is None or name == str(rank)]
            elif kind in ("dict", "tuple"):
                todo.append(here["v"])
            elif kind is None:
                todo += reversed(here.values())
    return found
