"""Single values of a training state as tagged JSON: what JSON has no type of its own for. Pure.

A value comes back as the type that it was. An enum is named by its class, which is looked up among
the modules that are loaded already: a checkpoint never imports one.
"""

from __future__ import annotations

import base64
import datetime
import decimal
import enum
import fractions
import io
import pathlib
import sys
import uuid
import zoneinfo
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from hpstore.checkpoint.state.plain_values import is_unicode
from hpstore.errors import CheckpointError
from hpstore.format.numpy_files import require_characters
from hpstore.format.untrusted_bytes import MOST, whole

# Any below: values of every type, and their JSON
TAG = "$"
_FIXED = "biufcmMSU"  # kinds of numpy types whose values are bytes of a fixed length
_DTYPE_LETTERS = 64  # of numpy's name of a type
_TORCH = (torch.layout, torch.memory_format, torch.qscheme)
_PATHS: dict[type, str] = {
    type(pathlib.Path()): "path",
    pathlib.PurePosixPath: "posix path",
    pathlib.PureWindowsPath: "windows path",
}


def encode_scalar(value: Any, path: str) -> dict[str, Any] | None:
    """JSON of one value; None for a type that has none. Raises CheckpointError naming the path."""
    if isinstance(value, enum.Enum):
        return _encode_enum(value, path)
    if type(value) in (bytes, bytearray):
        kind = type(value).__name__
        return {TAG: kind, "v": base64.b64encode(value).decode()}
    if type(value) is io.BytesIO:
        body = base64.b64encode(value.getvalue()).decode()
        return {TAG: "BytesIO", "v": body, "at": value.tell()}
    if isinstance(value, np.generic) and value.dtype.kind in _FIXED:
        return {TAG: "scalar", "dtype": value.dtype.str, "v": value.tobytes().hex()}
    if type(value) is complex:
        return {TAG: "complex", "v": [repr(value.real), repr(value.imag)]}
    if isinstance(value, torch.dtype):
        return {TAG: "dtype", "v": dtype_name(value)}
    if isinstance(value, np.dtype) and not value.hasobject and value.names is None:
        return {TAG: "numpy dtype", "v": value.str}
    if isinstance(value, torch.device):
        return {TAG: "device", "v": str(value)}
    if isinstance(value, _TORCH):
        return {TAG: "torch", "v": str(value).removeprefix("torch.")}
    if type(value) in _PATHS:
        return {TAG: _PATHS[type(value)], "v": str(value)}
    if type(value) in (decimal.Decimal, uuid.UUID):
        return {TAG: type(value).__name__.lower(), "v": str(value)}
    if type(value) is fractions.Fraction:
        return {TAG: "fraction", "v": [hex(value.numerator), hex(value.denominator)]}
    return _encode_time(value, path)


def require_unicode(node: Any, kind: type, path: str) -> None:
    """Raise CheckpointError for text in a node that has no UTF-8: a manifest is UTF-8."""
    todo = [node]
    while todo:
        here = todo.pop()
        if isinstance(here, str) and not is_unicode(here):
            raise CheckpointError(
                f"state {path!r} is a {kind.__qualname__} whose text has half a surrogate pair, "
                "and so no UTF-8. Nothing was written; save bytes, such as os.fsencode(path)"
            )
        if isinstance(here, dict):
            todo += here.values()
        elif isinstance(here, (list, tuple)):
            todo += here


def _encode_time(value: Any, path: str) -> dict[str, Any] | None:
    kind = type(value)
    if kind is datetime.timedelta:
        return {TAG: "timedelta", "v": [value.days, value.seconds, value.microseconds]}
    if kind is datetime.date:
        return {TAG: "date", "v": value.isoformat()}
    if kind is datetime.timezone:
        offset, name = value.utcoffset(None), value.tzname(None)
        parts = [offset.days, offset.seconds, offset.microseconds]
        named = name != datetime.timezone(offset).tzname(None)
        return {TAG: "timezone", "v": [*parts, name] if named else parts}
    if kind is zoneinfo.ZoneInfo and value.key:
        return {TAG: "zone", "v": value.key}
    if kind not in (datetime.datetime, datetime.time):
        return None
    zone = None if value.tzinfo is None else encode_scalar(value.tzinfo, path)
    if value.tzinfo is not None and zone is None:
        raise Unrestorable(
            f"state {path!r} is a time in a {type(value.tzinfo).__qualname__}, whose rules no "
            "checkpoint can hold; use datetime.timezone or zoneinfo. Nothing was written."
        )
    text = value.replace(tzinfo=None).isoformat()
    return {TAG: kind.__name__, "v": text, "zone": zone, "fold": value.fold}


def _encode_enum(value: enum.Enum, path: str) -> dict[str, Any]:
    """By name; combined flags, which may have none, by their number."""
    shown = {TAG: "enum", "class": class_name(type(value), path)}
    if isinstance(value, enum.Flag):
        return {**shown, "v": value.value}
    return {**shown, "v": value.name}


def class_name(kind: type, path: str) -> str:
    """How a class is found again. Raises CheckpointError for one that a restore would not find."""
    name = f"{kind.__module__}:{kind.__qualname__}"
    if class_named(name) is not kind:
        raise Unrestorable(
            f"state {path!r} is a {kind.__qualname__}, a class that {kind.__module__} does not "
            "have at its top: no restore would find it. Define it there. Nothing was written."
        )
    return name


def class_named(name: str) -> type | None:
    """A class of a module that is loaded. Nothing is imported, and no code of the module runs."""
    module, _, qualname = name.partition(":")
    here: Any = sys.modules.get(module)
    for part in qualname.split("."):
        here = getattr(here, "__dict__", {}).get(part)
    return here if isinstance(here, type) else None


class Unrestorable(CheckpointError):
    """A value of which no restore could make the same again; a pickle may."""


class Classes:
    """Classes that a restore may make values of: those of loaded modules, and those that the state
    has in their places, which is how a script finds what it saved under another name.

    `known()`: these by qualified name. Without `strict`, or for a display, what is of an unknown
    class becomes a StandIn.
    """

    def __init__(
        self, known: Callable[[], Mapping[str, type]] = dict, *, strict: bool = True
    ) -> None:
        self._known, self._strict = known, strict

    def find(self, name: str, fits: Callable[[type], bool]) -> type | None:
        """The class; None, when not strict, for one that is not there or does not fit."""
        found = class_named(name) or self._known().get(name.partition(":")[2])
        if found is not None and fits(found):
            return found
        if self._strict:
            raise CheckpointError(
                f"the checkpoint holds a value of the class {name}, which is not loaded or is no "
                "class of its kind now. Import its module first, or pass strict=False, which gives "
                "a StandIn for it. Nothing was changed."
            )
        return None


class StandIn:
    """A value whose class is not loaded: the class's name, and what it held."""

    def __init__(self, class_name: str, value: Any) -> None:
        self.class_name, self.value = class_name, value

    def __repr__(self) -> str:
        return f"<{self.class_name} {self.value!r}>"


def decode_scalar(kind: str, node: Mapping[str, Any], classes: Classes) -> Any:
    """Inverse of encode_scalar. Raises CheckpointError, ValueError, KeyError, TypeError."""
    value = node["v"]
    if kind == "enum":
        return _decode_enum(node["class"], value, classes)
    if kind == "scalar":
        dtype = _plain_dtype(node["dtype"])
        if dtype.kind not in _FIXED:
            raise ValueError(f"no scalar has the numpy type {dtype}")
        raw = bytes.fromhex(value)
        if not dtype.itemsize and not any(raw):  # "<U0", of which numpy writes the end
            return dtype.type()
        found = np.frombuffer(raw, dtype)
        require_characters(found)
        return found[0]
    if kind in ("datetime", "time"):
        zone = node["zone"]
        made = getattr(datetime, kind).fromisoformat(value)
        tzinfo = None if zone is None else decode_scalar(zone[TAG], zone, classes)
        return made.replace(tzinfo=tzinfo, fold=node["fold"])
    if kind == "BytesIO":
        stream = io.BytesIO(base64.b64decode(value))
        stream.seek(whole(node["at"], "a place in a stream"))
        return stream
    if kind not in _READERS:
        raise CheckpointError(f"manifest holds a value of unknown type {kind!r}")
    return _READERS[kind](value)


def _decode_enum(name: str, value: Any, classes: Classes) -> Any:
    found: Any = classes.find(name, lambda kind: issubclass(kind, enum.Enum))
    if found is None:
        return StandIn(name, value)
    if issubclass(found, enum.Flag):
        return found(value)
    if value not in found.__members__:
        raise CheckpointError(f"{name} has no {value!r} now, which was saved. Nothing was changed.")
    return found.__members__[value]


def _decode_torch(name: str) -> Any:
    found = getattr(torch, name, None)
    if not isinstance(found, _TORCH):
        raise CheckpointError(f"this torch has no {name!r}")
    return found


def _device(text: str) -> torch.device:
    try:
        return torch.device(text)
    except RuntimeError as error:
        raise ValueError(f"no device is called {text!r}") from error


def _plain_dtype(text: str) -> np.dtype[Any]:
    if len(text) > _DTYPE_LETTERS:
        raise ValueError(f"{text[:40]!r}... is no plain numpy type")
    found = np.dtype(text)
    if found.hasobject or found.names is not None:
        raise ValueError(f"{text!r} is no plain numpy type")
    return found


def _float(text: str) -> float:
    """Of a complex number. Those of numpy were once written as numpy shows them."""
    return float(text.removeprefix("np.float64(").removesuffix(")"))


def _timedelta(parts: list[int]) -> datetime.timedelta:
    days, seconds, microseconds = parts
    return datetime.timedelta(days, seconds, microseconds)


def dtype_name(dtype: torch.dtype) -> str:
    """Inverse of dtype_named."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """A torch dtype by its name, "bfloat16". Raises CheckpointError."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"this torch has no dtype {name!r}")
    return found


_READERS: dict[str, Callable[[Any], Any]] = {
    "float": float,
    "bytes": base64.b64decode,
    "bytearray": lambda text: bytearray(base64.b64decode(text)),
    "complex": lambda parts: complex(_float(parts[0]), _float(parts[1])),
    "size": lambda sizes: torch.Size([whole(n, "a size", least=-MOST - 1) for n in sizes]),
    "dtype": dtype_named,
    "numpy dtype": _plain_dtype,
    "device": _device,
    "torch": _decode_torch,
    "path": pathlib.Path,
    "posix path": pathlib.PurePosixPath,
    "windows path": pathlib.PureWindowsPath,
    "decimal": decimal.Decimal,
    "fraction": lambda parts: fractions.Fraction(int(parts[0], 16), int(parts[1], 16)),
    "uuid": uuid.UUID,
    "timedelta": _timedelta,
    "date": datetime.date.fromisoformat,
    "timezone": lambda parts: datetime.timezone(_timedelta(parts[:3]), *map(str, parts[3:4])),
    "zone": zoneinfo.ZoneInfo,
}
