"""The .metadata of a DCP checkpoint, read without unpickling: no code of its writer can run.

torch writes that file as a pickle. Its opcodes are listed here by the standard library's
disassembler, and the few that torch's writer uses build plain records: classes are names that must
be on a list, nothing is imported and nothing is called (docs/decisions/0117).
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from hpstore.checkpoint.format.items import Box, covers
from hpstore.errors import MalformedFile
from hpstore.format.untrusted_bytes import parsing, whole

# Any: values on the stack of a pickle, checked before use

_PLACE = "torch.distributed.checkpoint.metadata"
_CLASSES = {
    *(
        (_PLACE, name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
        )
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
}
_CALLS: dict[tuple[str, str], Callable[[tuple[Any, ...]], Any]] = {
    ("torch", "Size"): lambda given: _as(tuple, given[0]),  # no copy: a memoised one costs nothing
    ("torch.serialization", "_get_layout"): lambda given: given[0],
    (_PLACE, "_MEM_FORMAT_ENCODING"): lambda given: given[0],
    ("collections", "OrderedDict"): lambda given: {},
    **{
        (module, name): lambda given: None  # the place of the save, which nothing here reads
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
    },
}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_NUMBERS = ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT")
_TEXTS = ("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8")
_SIZED = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_MOST_AXES = 64  # torch's own limit of a tensor's dimensions


@dataclass(frozen=True, slots=True)
class _Name:
    """A class or function that a pickle names."""

    module: str
    name: str


class _Record:
    """An object of one of the classes, with the fields that the pickle gives it."""

    __slots__ = ("fields", "kind")

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.fields: dict[str, Any] = {}

    def take(self, state: Any) -> None:
        """What the pickle gives an object of the class as its state."""
        if self.kind == "TensorProperties":  # the one with a __getstate__ of its own
            state = {"dtype": _as(tuple, state)[0]}
        if self.fields:
            raise ValueError(f"a {self.kind} is given its state twice")
        self.fields = _as(dict, state)  # no copy: many records may be given one dict


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBytes:
    """Where torch.save's bytes of one entry are."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DcpTensor:
    """A tensor of a DCP checkpoint and its parts, which cover it exactly once."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[tuple[Box, StoredBytes], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class DcpEntries:
    """What a DCP checkpoint holds, by flattened name, and where that belongs in nested dicts."""

    tensors: Mapping[str, DcpTensor]
    values: Mapping[str, StoredBytes]
    paths: Mapping[str, tuple[str | int, ...]]
    names: tuple[str, ...]  # of both, in the order of the save


def read_metadata_pickle(data: bytes, where: str) -> DcpEntries:
    """The entries of a .metadata file. Raises MalformedFile for anything else."""
    with parsing(where, MalformedFile):
        root = _Machine().run(data)
        if not isinstance(root, _Record) or root.kind != "Metadata":
            raise ValueError("it is no Metadata of torch.distributed.checkpoint")
        return _entries(root, len(data))


class _Machine:
    """Runs the opcodes of one pickle. Memory: about that of the objects that it describes."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def run(self, data: bytes) -> Any:
        """The object that the pickle describes. Raises what it stumbles over."""
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name == "STOP":
                return self._stack.pop()
            self._step(opcode.name, argument)
        raise ValueError("it ends in the middle")

    def _step(self, name: str, argument: Any) -> None:
        stack = self._stack
        if name in _TEXTS or name in _NUMBERS:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name == "MEMOIZE":
            self._memo[len(self._memo)] = stack[-1]
        elif name in ("BINPUT", "LONG_BINPUT"):
            self._memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self._memo[argument])
        elif name == "MARK":
            self._marks.append(len(stack))
        elif name in _SIZED:
            stack.append(tuple(self._popped(_SIZED[name])))
        elif name in _MAKERS:
            stack.append(_MAKERS[name]())
        elif name not in ("PROTO", "FRAME"):
            self._fill_or_call(name, argument)

    def _fill_or_call(self, name: str, argument: Any) -> None:
        stack = self._stack
        if name == "TUPLE":
            stack.append(tuple(self._marked()))
        elif name in ("APPEND", "APPENDS"):
            found = [stack.pop()] if name == "APPEND" else self._marked()
            _as(list, stack[-1]).extend(found)
        elif name in ("SETITEM", "SETITEMS"):
            found = self._popped(2) if name == "SETITEM" else self._marked()
            _set_all(_as(dict, stack[-1]), found)
        elif name in ("GLOBAL", "STACK_GLOBAL"):
            pair = argument.split(" ") if name == "GLOBAL" else self._popped(2)
            stack.append(_named(*pair))
        elif name in ("NEWOBJ", "REDUCE"):
            kind, given = self._popped(2)
            stack.append(_made(_as(_Name, kind), _as(tuple, given), plain=name == "NEWOBJ"))
        elif name == "BUILD":
            state = stack.pop()
            _as(_Record, stack[-1]).take(state)
        else:
            raise ValueError(f"opcode {name} is none of those that torch's writer uses")

    def _popped(self, count: int) -> list[Any]:
        if len(self._stack) < count:
            raise ValueError("its stack is empty")
        found = self._stack[-count:]
        del self._stack[-count:]
        return found

    def _marked(self) -> list[Any]:
        at = self._marks.pop()
        found = self._stack[at:]
        del self._stack[at:]
        return found


_MAKERS: dict[str, Callable[[], Any]] = {
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
}


def _as(kind: type, value: Any) -> Any:
    """`value`, which is of this very type. Raises TypeError."""
    if type(value) is not kind:
        raise TypeError(f"a {type(value).__name__} where a {kind.__name__} belongs")
    return value


def _set_all(target: dict[Any, Any], found: list[Any]) -> None:
    """Put keys and values; a key is text, a number or a record: to hash a tuple may recurse."""
    for key, value in zip(found[::2], found[1::2], strict=True):
        if type(key) not in (str, int, _Record):
            raise TypeError(f"a {type(key).__name__} as a key")
        target[key] = value


def _named(module: Any, name: Any) -> Any:
    """A class or function on the list, or a dtype of torch."""
    pair = (_as(str, module), _as(str, name))
    if pair in _CLASSES or pair in _CALLS:
        return _Name(module, name)
    found = getattr(torch, name, None) if module == "torch" else None
    if isinstance(found, torch.dtype):
        return found
    raise ValueError(f"it names {module[:80]}.{name[:80]}, which no DCP checkpoint needs")


def _made(kind: _Name, given: tuple[Any, ...], *, plain: bool) -> Any:
    pair = (kind.module, kind.name)
    if pair in _CALLS:
        return _CALLS[pair](given)
    if not plain or given:
        raise ValueError(f"{kind.name} is called with arguments")
    return _Record(kind.name)


# --- from records to entries ---------------------------------------------------------------------


def _entries(root: _Record, most_parts: int) -> DcpEntries:
    """`most_parts`: of all tensors. One list of parts may be that of many tensors."""
    stored = _storage(_as(dict, root.fields["storage_data"]))
    tensors: dict[str, DcpTensor] = {}
    values: dict[str, StoredBytes] = {}
    described = _as(dict, root.fields["state_dict_metadata"])
    for name, entry in described.items():
        kind = _as(_Record, entry).kind
        if kind == "BytesStorageMetadata":
            values[_as(str, name)] = stored[name, None]
        elif kind == "TensorStorageMetadata":
            most_parts -= len(_as(list, entry.fields["chunks"]))
            if most_parts < 0:
                raise ValueError("it describes more parts of tensors than it has bytes")
            tensors[_as(str, name)] = _tensor(name, entry, stored)
        else:
            raise ValueError(f"{name[:80]!r} is a {kind}")
    return DcpEntries(
        tensors=tensors,
        values=values,
        paths=checked_paths(root.fields.get("planner_data")),
        names=tuple(described),
    )


def _storage(found: dict[Any, Any]) -> dict[tuple[str, tuple[int, ...] | None], StoredBytes]:
    """Places by name and offsets."""
    places = {}
    for index, info in found.items():
        facts = _fields(info, "_StorageInfo")
        if facts.get("transform_descriptors"):
            raise ValueError("its files are transformed by an extension: load it with that")
        file = _as(str, facts["relative_path"])
        if "/" in file or "\\" in file or file in ("", ".", "..") or "\0" in file:
            raise ValueError(f"{file[:80]!r} is no name of a file beside it")
        key = _fields(index, "MetadataIndex")
        offset = key.get("offset")
        places[_as(str, key["fqn"]), None if offset is None else _sizes(offset)] = StoredBytes(
            file=file,
            offset=whole(facts["offset"], "offset"),
            length=whole(facts["length"], "length"),
        )
    return places


def _tensor(
    name: str, entry: _Record, stored: Mapping[tuple[str, tuple[int, ...] | None], StoredBytes]
) -> DcpTensor:
    dtype = _dtype(_fields(entry.fields["properties"], "TensorProperties"))
    shape = _sizes(entry.fields["size"])
    parts = []
    for chunk in _as(list, entry.fields["chunks"]):
        facts = _fields(chunk, "ChunkStorageMetadata")
        box = Box(offsets=_sizes(facts["offsets"]), sizes=_sizes(facts["sizes"]))
        place = stored[name, box.offsets]
        if box.count * dtype.itemsize > place.length:
            raise ValueError(f"{name[:80]!r}: {place.length} bytes hold no {box.sizes} of {dtype}")
        parts.append((box, place))
    if any(len(box.offsets) != len(shape) or len(box.sizes) != len(shape) for box, _ in parts):
        raise ValueError(f"parts of {name[:80]!r} have other dimensions")
    if not covers([box for box, _ in parts], shape):
        raise ValueError(f"the parts of {name[:80]!r} do not cover it exactly once")
    return DcpTensor(dtype=dtype, shape=shape, parts=tuple(parts))


def _dtype(properties: dict[str, Any]) -> torch.dtype:
    """Of TensorProperties' state: a dict, or a tuple that begins with the dtype."""
    found = properties["dtype"]
    if not isinstance(found, torch.dtype):
        raise TypeError("a tensor without a dtype")
    return found


def _fields(record: Any, kind: str) -> dict[str, Any]:
    found = _as(_Record, record)
    if found.kind != kind:
        raise TypeError(f"a {found.kind} where a {kind} belongs")
    fields: dict[str, Any] = found.fields
    return fields


def _sizes(value: Any) -> tuple[int, ...]:
    found = _as(tuple, value)
    if len(found) > _MOST_AXES:
        raise ValueError(f"a tensor of {len(found)} dimensions")
    return tuple(whole(size, "size") for size in found)


def checked_paths(found: Any) -> dict[str, tuple[str | int, ...]]:
    """A default planner's data: where each name belongs. Raises TypeError for other planners'."""
    paths = _as(dict, {} if found is None else found)
    for path in paths.values():
        if not _as(tuple, path) or any(type(part) not in (str, int) for part in path):
            raise TypeError("a name without a path of names and numbers")
    return dict(paths)


def nested(
    names: Sequence[str], paths: Mapping[str, tuple[str | int, ...]], leaf: Callable[[str], Any]
) -> dict[str, Any]:
    """Nested dicts and lists with `leaf(name)` for each name, as torch nests them.

    Raises IntegrityError for paths that contradict each other, and for lists with holes that no
    save leaves: an index alone would take any amount of memory.
    """
    root: dict[Any, Any] = {}
    with parsing("the tree of names"):
        for name in names:
            path = paths.get(name, (name,))
            holder: dict[Any, Any] = root
            for part in path[:-1]:
                holder = _as(dict, holder.setdefault(part, {}))
            if path[-1] in holder:
                raise ValueError(f"two entries are at {path}")
            holder[path[-1]] = _Leaf(leaf(name))
        found: dict[str, Any] = _as(dict, _Lists(len(names)).made(root))
    return found


class _Leaf:
    """A value, which is no level of the tree."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class _Lists:
    """Makes lists of the levels whose names are numbers, as torch does."""

    def __init__(self, entries: int) -> None:
        self._holes = 1024 + 16 * entries  # DCP writes no empty dicts: lists may have some

    def made(self, level: Any) -> Any:
        """The values of a level and of those below it."""
        if isinstance(level, _Leaf):
            return level.value
        kinds = {type(name) for name in level}
        if int not in kinds:
            return {name: self.made(child) for name, child in level.items()}
        if str in kinds or min(level) < 0:
            raise ValueError("a level has names and numbers")
        self._holes -= max(level) + 1 - len(level)
        if self._holes < 0:
            raise ValueError(f"a list of {max(level) + 1} entries, of which {len(level)} are there")
        return [self.made(level[n]) if n in level else None for n in range(max(level) + 1)]
