"""State as a typed JSON tree plus named tensors. No pickle, unless it is asked for.

Tensors and numpy arrays become items with a path ("optimizer/state/head.weight/exp_avg"); what is
left (numbers, strings, containers) is JSON with a tag `$` where JSON has no type of its own. An
object of any other type is refused with the path at which it stands.
"""

from __future__ import annotations

import base64
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hpstore.checkpoint import opaque
from hpstore.errors import CheckpointError, CheckpointMismatch, IntegrityError

_log = logging.getLogger(__name__)
TAG = "$"
MOST_BITS = 14_000  # of an int: Python reads and writes 4,300 digits
MAX_DEPTH = 64
_PARTS = {
    torch.sparse_coo: "x.coalesce().indices() and .values()",
    torch.sparse_csr: "x.crow_indices(), .col_indices() and .values()",
    torch.sparse_csc: "x.ccol_indices(), .row_indices() and .values()",
    torch.sparse_bsr: "x.crow_indices(), .col_indices() and .values()",
    torch.sparse_bsc: "x.ccol_indices(), .row_indices() and .values()",
    torch.jagged: "x.values() and .offsets()",
}
_QUANTISED = "x.int_repr(), and x.q_scale() and .q_zero_point() (or those by channel),"

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


class Collected:
    """Tensors met while encoding, by path, in order."""

    def __init__(self, *, rank: int = 0, allow_pickle: bool = False) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.rank, self.allow_pickle = rank, allow_pickle


def join(path: str, name: object) -> str:
    """Path of a child."""
    text = str(name)
    return f"{path}/{text}" if path else text


def encode_tree(value: Tree, path: str, found: Collected, depth: int = 0) -> Json:
    """JSON for `value`; its tensors go into `found`. Raises CheckpointError naming the path."""
    if depth > MAX_DEPTH:
        raise CheckpointError(f"state {path!r} is nested deeper than {MAX_DEPTH}")
    if isinstance(value, torch.Tensor):
        return _encode_tensor(value, path, found)
    if type(value) is dict and TAG not in value and all(map(_is_plain_key, value)):
        start = f"{path}/" if path else ""  # the common case, without a call more a leaf
        return {k: encode_tree(v, start + k, found, depth + 1) for k, v in value.items()}
    if isinstance(value, PerRank):
        mine = encode_tree(value.value, f"{path}@{found.rank}", found, depth + 1)
        return {TAG: "ranks", "v": {str(found.rank): mine}}
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return {TAG: "ndarray", "item": _array_item(value, path, found)}
    if isinstance(value, str) and not _is_unicode(value):
        raise CheckpointError(f"state {path!r} is text with half a surrogate pair")
    if type(value) is int and value.bit_length() > MOST_BITS:
        raise CheckpointError(f"state {path!r} is a number of {value.bit_length()} bits")
    if value is None or isinstance(value, (bool, str)) or type(value) is int:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {TAG: "float", "v": repr(value)}
    if isinstance(value, Mapping):
        return _encode_mapping(value, path, found, depth)
    if type(value) is list:
        return [encode_tree(v, join(path, i), found, depth + 1) for i, v in enumerate(value)]
    if isinstance(value, torch.Size):
        return {TAG: "size", "v": list(value)}
    if isinstance(value, tuple):
        inner = [encode_tree(v, join(path, i), found, depth + 1) for i, v in enumerate(value)]
        names = field_names(value)
        return {TAG: "tuple", "v": inner} | ({"fields": list(names)} if names else {})
    return _encode_scalar(value, path, found)


def _is_plain_key(key: object) -> bool:
    return type(key) is str and key.isascii()


def _is_unicode(text: str) -> bool:
    return not any(0xD800 <= ord(character) <= 0xDFFF for character in text)


_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)


def _has_chunks(value: torch.Tensor) -> bool:
    return hasattr(value, "__create_chunk_list__")


def _encode_tensor(value: torch.Tensor, path: str, found: Collected) -> Json:
    plain = type(value) in _PLAIN_TYPES
    if not plain and is_lazy(value):
        raise CheckpointError(
            f"state {path!r} is a parameter without a shape yet, of a lazy module: nothing was "
            "written. Run the module once, or save what has run alone"
        )
    if value.layout is not torch.strided or value.is_quantized or value.is_nested:
        require_plain(value, f"state {path!r}")
    if value.is_meta:
        raise CheckpointError(f"state {path!r} is a meta tensor: it holds no values to save")
    if not plain and is_traceable_wrapper_subclass(value) and not _has_chunks(value):
        raise CheckpointError(
            f"state {path!r} is a {type(value).__qualname__}, made of several tensors: it would "
            "not be saved as it is. Save these, or what it stands for, instead."
        )
    if path in found.tensors:
        raise CheckpointError(f"state: two tensors are called {path!r}")
    found.tensors[path] = value
    return {TAG: "tensor", "item": path}


def require_plain(tensor: torch.Tensor, where: str) -> None:
    """Raise CheckpointError for sparse, nested and quantised tensors, saying what to save."""
    if tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested:
        return
    if tensor.is_nested and tensor.layout is torch.strided:
        raise CheckpointError(
            f"{where} is a nested tensor, which cannot be saved as it is; nothing was written. "
            "Save x.unbind(), a tuple, and make it of that after restore()"
        )
    layout = str(tensor.layout).removeprefix("torch.")
    parts = _PARTS.get(tensor.layout, "the dense tensors that it is made of")
    if tensor.is_quantized:
        layout, parts = "quantised", _QUANTISED
    raise CheckpointError(
        f"{where} is a {layout} tensor, which cannot be saved as it is; nothing was written. Save "
        f"{parts} and make it of them after restore(), or save .to_dense()"
        + (" (.dequantize() for this one)" if tensor.is_quantized else "")
    )


def _array_item(value: np.ndarray[Any, Any], path: str, found: Collected) -> str:
    if isinstance(value, np.ma.MaskedArray):
        raise CheckpointError(
            f"state {path!r} is a masked array: save its .data and .mask, the mask would be lost"
        )
    if value.dtype.fields is not None:
        raise CheckpointError(f"state {path!r}: numpy arrays of {value.dtype} cannot be saved")
    if not value.dtype.isnative:
        value = value.astype(value.dtype.newbyteorder("="))
    try:
        found.tensors[path] = torch.from_numpy(np.ascontiguousarray(value).reshape(value.shape))
    except TypeError as error:
        raise CheckpointError(f"state {path!r}: {error}") from error
    return path


def _encode_mapping(value: Mapping[Any, Any], path: str, found: Collected, depth: int) -> Json:
    plain = all(type(k) is str and k != TAG for k in value)
    if plain:
        for key in value:
            if not _is_unicode(key):
                raise CheckpointError(
                    f"state {path!r} has the key {key!r}, text with half a surrogate pair"
                )
        return {k: encode_tree(v, join(path, k), found, depth + 1) for k, v in value.items()}
    rows = [
        [encode_tree(k, f"{path} (key)", found, depth + 1),
         encode_tree(v, join(path, k), found, depth + 1)]
        for k, v in value.items()
    ]  # fmt: skip
    return {TAG: "dict", "v": rows}


def _encode_scalar(value: Tree, path: str, found: Collected) -> Json:
    if isinstance(value, bytes):
        return {TAG: "bytes", "v": base64.b64encode(value).decode()}
    if isinstance(value, complex):
        return {TAG: "complex", "v": [repr(float(value.real)), repr(float(value.imag))]}
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return {TAG: "scalar", "dtype": value.dtype.str, "v": value.tobytes().hex()}
    if isinstance(value, torch.dtype):
        return {TAG: "dtype", "v": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {TAG: "device", "v": str(value)}
    if found.allow_pickle:
        return {TAG: "pickle", "v": base64.b64encode(opaque.dumps(value, path)).decode()}
    raise CheckpointError(
        f"state {path!r} is a {type(value).__module__}.{type(value).__qualname__}; a checkpoint "
        "holds tensors, numpy arrays, numbers, strings, bytes, lists, tuples, dicts, and objects "
        "with state_dict() and load_state_dict(). Nothing was written. Checkpointer("
        "allow_pickle=True) saves such objects as pickles, which only a trusted pool may give back."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """How a tree is turned back into values: `tensor(name)` gives items."""

    tensor: Callable[[str], torch.Tensor]
    rank: int = 0
    allow_pickle: bool = False


def decode_tree(node: Json, how: Decoding) -> Tree:
    """Inverse of encode_tree. Raises CheckpointError, IntegrityError for what is no such tree."""
    try:
        return _decode(node, how)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError) as error:
        raise IntegrityError(f"the recorded state is malformed: {error!r}") from error


def _decode(node: Json, how: Decoding) -> Tree:
    if isinstance(node, list):
        return [_decode(child, how) for child in node]
    if not isinstance(node, dict):
        return node
    if TAG not in node:
        return {name: _decode(child, how) for name, child in node.items()}
    kind = node[TAG]
    if kind == "tensor":
        return how.tensor(node["item"])
    if kind == "ndarray":
        return how.tensor(node["item"]).numpy()
    if kind == "dict":
        return {_decode(k, how): _decode(v, how) for k, v in node["v"]}
    if kind == "tuple":
        inner = (_decode(child, how) for child in node["v"])
        return NamedValues.of(inner, node["fields"]) if "fields" in node else tuple(inner)
    if kind == "ranks":
        mine = node["v"].get(str(how.rank), ABSENT)
        return ABSENT if mine is ABSENT else _decode(mine, how)
    if kind == "pickle":
        if not how.allow_pickle:
            raise CheckpointError(
                "this checkpoint holds pickled objects; they run code when they are loaded. "
                "Checkpointer(allow_pickle=True) loads them, from a pool that you trust."
            )
        return opaque.loads(base64.b64decode(node["v"]))
    return _decode_scalar(kind, node)


def tensor_names(node: Json, *, rank: int | None = None) -> list[str]:
    """Names of the items that a tree refers to; with `rank` only that rank's own and the common."""
    found: list[str] = []
    todo = [node]
    while todo:
        here = todo.pop()
        if isinstance(here, list):
            todo += reversed(here)
        elif isinstance(here, dict):
            kind = here.get(TAG)
            if kind in ("tensor", "ndarray"):
                found.append(here["item"])
            elif kind == "ranks":
                todo += [c for name, c in here["v"].items() if rank is None or name == str(rank)]
            elif kind in ("dict", "tuple"):
                todo.append(here["v"])
            elif kind is None:
                todo += reversed(here.values())
    return found


def _decode_scalar(kind: str, node: Mapping[str, Any]) -> Tree:
    value = node["v"]
    if kind == "float":
        return float(value)
    if kind == "bytes":
        return base64.b64decode(value)
    if kind == "complex":
        return complex(_float(value[0]), _float(value[1]))
    if kind == "scalar":
        return np.frombuffer(bytes.fromhex(value), np.dtype(node["dtype"]))[0]
    if kind == "size":
        return torch.Size(value)
    if kind == "dtype":
        return dtype_named(value)
    if kind == "device":
        return torch.device(value)
    raise CheckpointError(f"manifest holds a value of unknown type {kind!r}")


def dtype_name(dtype: torch.dtype) -> str:
    """Inverse of dtype_named."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """A torch dtype by its name, "bfloat16". Raises CheckpointError."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"this torch has no dtype {name!r}")
    return found


def fill(target: Tree, value: Tree, path: str, *, strict: bool) -> Tree:
    """Put a loaded `value` into `target` in place where it can be; returns what takes its place.

    Dicts and lists are filled element by element, tensors copied into, objects with
    load_state_dict given their state; a namedtuple becomes a new one of its class; everything else
    is replaced. Raises CheckpointMismatch.
    """
    if isinstance(target, PerRank):
        if isinstance(value, Absent):
            _log.warning("%r: this rank was not there when it was saved; left as it is", path)
            return target
        target.value = fill(target.value, value, path, strict=strict)
        return target
    if isinstance(value, Absent):
        raise CheckpointMismatch(f"{path!r} was recorded by rank, and not for this one")
    if isinstance(target, torch.Tensor):
        return _fill_tensor(target, value, path)
    if hasattr(target, "load_state_dict"):
        target.load_state_dict(value)
        return target
    if isinstance(target, dict) and isinstance(value, Mapping):
        check_names(target, value, path, strict=strict)
        for name, child in value.items():
            if name in target:
                target[name] = fill(target[name], child, join(path, name), strict=strict)
        return target
    if isinstance(target, list) and isinstance(value, Sequence) and len(target) == len(value):
        for index, child in enumerate(value):
            target[index] = fill(target[index], child, join(path, index), strict=strict)
        return target
    if isinstance(target, tuple) and field_names(target):
        check_fields(path, target, value)
        parts = enumerate(zip(target, value, strict=True))
        filled = [fill(mine, child, join(path, n), strict=strict) for n, (mine, child) in parts]
        make = getattr(type(target), "_make", None)
        return make(filled) if make else NamedValues.of(filled, field_names(target))
    if isinstance(target, np.ndarray):
        check_leaf(path, target, value)
        if not np.shares_memory(target, value):  # the read may have filled it already
            target[...] = value
        return target
    return value


def _fill_tensor(target: torch.Tensor, value: Tree, path: str) -> torch.Tensor:
    check_leaf(path, target, value)
    try:
        if value is not target:  # the read may have filled it already
            with torch.no_grad():
                target.copy_(value)
    except RuntimeError as error:
        raise CheckpointMismatch(f"{path!r} cannot be filled in place: {error}") from error
    return target


def check_fields(path: str, target: tuple[Any, ...], value: Tree) -> None:
    """Raise CheckpointMismatch unless a namedtuple can take a loaded value: its fields, or as many
    values of a plain tuple, as they were saved before fields were recorded."""
    mine, saved = field_names(target), field_names(value)
    if not isinstance(value, tuple) or len(value) != len(mine) or saved not in ((), mine):
        found = saved or f"a {type(value).__name__}"
        raise CheckpointMismatch(
            f"{path!r}: {found} was saved, {type(target).__qualname__}{mine} is wanted"
        )


def check_leaf(
    path: str, target: torch.Tensor | np.ndarray[Any, Any], value: Tree
) -> None:  # fmt: skip
    """Raise CheckpointMismatch unless a loaded value can be put into a tensor or array."""
    kind = torch.Tensor if isinstance(target, torch.Tensor) else np.ndarray
    if isinstance(target, torch.Tensor):
        require_shape(path, target)
    if not isinstance(value, kind) or value.shape != target.shape:
        found = tuple(value.shape) if isinstance(value, kind) else type(value).__name__
        raise CheckpointMismatch(
            f"{path!r}: {found} does not fit a {kind.__name__} of {tuple(target.shape)}"
        )
    wanted = target.dtype
    if isinstance(wanted, np.dtype):
        wanted = wanted.newbyteorder("=")
    else:
        require_memory(path, target)
    if value.dtype != wanted:
        raise CheckpointMismatch(f"{path!r}: {value.dtype} was saved, {wanted} is wanted")


def _float(text: str) -> float:
    """Of a complex number. Those of numpy were once written as numpy shows them."""
    return float(text.removeprefix("np.float64(").removesuffix(")"))


def require_shape(path: str, target: torch.Tensor) -> None:
    """Raise CheckpointMismatch for a tensor that has none to compare with what was saved."""
    if is_lazy(target):
        raise CheckpointMismatch(
            f"{path!r} has no shape yet, its module is lazy: run the module once, then restore. "
            "Nothing was changed."
        )
    if target.is_nested:
        raise CheckpointMismatch(
            f"{path!r} is a nested tensor, which no checkpoint fills: give a tuple such as its "
            "unbind(). Nothing was changed."
        )


def require_memory(path: str, target: Any) -> None:
    """Raise CheckpointMismatch for a tensor that has no memory for all of its elements."""
    if any(size > 1 and not step for size, step in zip(target.shape, target.stride(), strict=True)):
        raise CheckpointMismatch(
            f"{path!r} is an expanded tensor: several of its elements are one place in memory. "
            "Give its clone(). Nothing was changed."
        )
    if target.device.type == "meta":
        raise CheckpointMismatch(
            f"{path!r} is on the meta device and has no memory to fill: call the module's "
            "to_empty(device=...) first. Nothing was changed."
        )


def check_names(
    target: Mapping[Any, Any], value: Mapping[Any, Any], path: str, *, strict: bool
) -> None:
    """Raise CheckpointMismatch when recorded and wanted names differ, unless not strict."""
    if not strict:
        return
    untaken = [str(name) for name in value if name not in target]
    absent = [str(name) for name in target if name not in value]
    if untaken or absent:
        place = f"under {path!r}" if path else "at the top"
        raise CheckpointMismatch(
            f"state and checkpoint differ {place}: recorded but not taken {untaken[:8]}, wanted "
            f"but not recorded {absent[:8]}. Nothing was changed. Pass strict=False to load what "
            "fits."
        )


__all__ = [
    "MAX_DEPTH",
    "Absent",
    "Collected",
    "Decoding",
    "NamedValues",
    "PerRank",
    "check_fields",
    "check_leaf",
    "check_names",
    "decode_tree",
    "dtype_name",
    "dtype_named",
    "encode_tree",
    "field_names",
    "fill",
    "join",
    "require_memory",
    "require_plain",
    "require_shape",
    "tensor_names",
]
