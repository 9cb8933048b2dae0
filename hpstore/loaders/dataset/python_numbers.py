"""Python's numbers as arrays of a field's dtype; what would change is refused. Pure."""

from __future__ import annotations

import cmath
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hpstore.errors import ConfigError

# Any: arrays of every dtype pass through here
Array = npt.NDArray[Any]
_FLOAT_BITS = 53  # of an int that a float64 surely holds
_LEVELS = {"b": 0, "u": 1, "i": 1, "f": 2, "c": 3}  # kinds of dtypes: each holds those below it


def python_numbers(
    dtype: str, storage: np.dtype[Any], inner_shape: tuple[int, ...], value: list[Any]
) -> Array:
    """Numbers in lists as an array of a field's dtype. Raises ConfigError."""
    try:
        found = _array(storage, inner_shape, value)
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"is a list that is no array: {error}") from error
    wanted = 2 if dtype == "bfloat16" else _LEVELS[storage.kind]
    level = _LEVELS.get(found.dtype.kind, 9) if value else wanted
    if level > wanted or (level == 0) != (wanted == 0):
        raise ConfigError(f"is a list of {found.dtype.name}, the field has {dtype}")
    if level and bool in set(map(type, value if found.ndim == 1 else _flat(value))):
        raise ConfigError(f"is a list of numbers and of bools, the field has {dtype}")
    if dtype == "bfloat16":
        made: Array = torch.tensor(value, dtype=torch.bfloat16).view(torch.uint16).numpy()
        return made
    with np.errstate(over="ignore", invalid="ignore"):
        made = found.astype(storage)
    if wanted == 1 and not np.array_equal(made, found):
        raise ConfigError(f"has numbers that do not fit {dtype}")
    if np.isfinite(made).sum() != np.isfinite(found).sum():
        raise ConfigError(f"has numbers that are infinite as {dtype}")
    small = found.size == 0 or np.abs(found).max() < 1 << _FLOAT_BITS  # not with NaN
    if dtype == "float64" and not small:
        for one in _flat(value):
            _require_exact(one)
    return made


def _array(storage: np.dtype[Any], inner_shape: tuple[int, ...], value: list[Any]) -> Array:
    """Lists as numpy has them, but for ints that it makes floats of. Raises ValueError and
    OverflowError."""
    if not value:
        return np.empty((0, *inner_shape), storage)
    found: Array = np.array(value)
    if storage.kind in "iu" and found.dtype.kind in "fO" and set(map(type, _flat(value))) == {int}:
        return np.array(value, storage)  # some beyond int64
    return found


def python_number(dtype: str, storage: np.dtype[Any], value: complex) -> Array:
    """A number as a field's dtype. Raises ConfigError when it does not fit."""
    level = next(n for n, kind in enumerate((bool, int, float, complex)) if isinstance(value, kind))
    wanted = 2 if dtype == "bfloat16" else _LEVELS[storage.kind]
    if level > wanted or (level == 0) != (wanted == 0):
        raise ConfigError(f"is {value!r}, the field has {dtype}")
    try:
        if dtype == "bfloat16":
            made = torch.tensor(value, dtype=torch.bfloat16)
            stored, finite = made.view(torch.uint16).numpy(), bool(made.isfinite())
        else:
            if dtype == "float64":
                _require_exact(value)
            with np.errstate(over="ignore"):  # said below
                stored = np.array(value, storage)
            finite = bool(np.isfinite(stored))
    except (OverflowError, RuntimeError) as error:
        raise ConfigError(f"is {value!r}, which does not fit {dtype}") from error
    if not finite and cmath.isfinite(value):
        raise ConfigError(f"is {value!r}, which is infinite as {dtype}")
    return stored


def is_float(value: int) -> bool:
    """Whether a float is equal to a whole number. Pure."""
    size = abs(value).bit_length()
    return size <= 1024 and size - (value & -value).bit_length() < _FLOAT_BITS


def _require_exact(value: object) -> None:
    """Raise ConfigError for an int that no float64 is. Smaller floats round all that they hold."""
    if type(value) is int and not is_float(value):
        raise ConfigError(f"is {value}, which float64 rounds: give float({value}) to have that")


def _flat(value: object) -> Iterator[object]:
    if isinstance(value, list):
        for one in value:
            yield from _flat(one)
    else:
        yield value


def as_numbers(dtype: str, column: Array) -> Array:
    """Values in storage dtype as numbers to compare: bfloat16 as float32, a copy."""
    if dtype != "bfloat16":
        return column
    return (column.astype(np.uint32) << 16).view(np.float32)


def plain_numbers(storage: np.dtype[Any], values: Sequence[object]) -> Array | None:
    """One number a row, made at once; None unless all are ints, or floats, that surely fit."""
    kind = {"i": int, "u": int, "f": float}.get(storage.kind)
    if kind is None or (kind is float and storage.itemsize != 8):
        return None
    if any(type(value) is not kind for value in values):
        return None
    try:
        return np.array(values, storage)
    except OverflowError:
        return None
