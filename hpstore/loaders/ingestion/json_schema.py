"""What the values of JSON are as fields and as samples. Pure.

Numbers are exact: an int that a float would round is refused, not rounded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Self

import numpy as np
import torch

from hpstore.errors import ConfigError
from hpstore.loaders.dataset.fields import BFLOAT16, Array, Field
from hpstore.loaders.dataset.python_numbers import is_float
from hpstore.loaders.ingestion.infer_fields import infer_fields

_MOST_DIMENSIONS = 32
_LEAVE_OUT = "leave it out with fields=[...] (--field names those to take)"


def json_fields(records: Sequence[Mapping[str, Any]]) -> dict[str, Field]:
    """Fields of objects as JSON has them. The one place where such a schema becomes fields.

    Booleans, numbers and text are scalars and str, lists of numbers arrays: float64 where one of
    them has a fraction, ragged where the first dimension differs; a null makes the field optional.
    Objects and other lists become what infer_fields says of them: JSON, chats, lists of strings.
    Raises ConfigError, naming the key, for keys that not all have.
    """
    names = list(dict.fromkeys(chain.from_iterable(records)))
    columns = {name: _Column.of([r[name] for r in records if name in r]) for name in names}
    return infer_fields(
        [{name: _typical(name, record, columns[name]) for name in names} for record in records]
    )


@dataclass(frozen=True, slots=True)
class _Column:
    """What the numbers of a key are, in all records, and the shape inside its lists. `plain`: no
    record has an object, or a list that is no array of numbers."""

    number: type
    inner: tuple[int, ...]
    plain: bool

    @classmethod
    def of(cls, values: Sequence[Any]) -> Self:
        types: set[type] = set()
        inner: tuple[int, ...] = ()
        plain = not any(isinstance(value, Mapping) for value in values)
        for value in values:
            try:
                flat, shape = _flat(value) if type(value) is list else ([value], ())
            except ConfigError:
                plain = False
                continue
            found = set(map(type, flat))
            if type(value) is list:  # lists of empty lists are no arrays of inner shape
                plain &= (found <= {int, float} or found == {bool}) and bool(flat or not value)
            types |= found
            inner = shape[1:] if flat else inner
        known = next((kind for kind in (float, int, bool) if kind in types), float)
        return cls(known, inner, plain)


def _typical(name: str, record: Mapping[str, Any], column: _Column) -> object:
    """A value of the type that the column has. Raises ConfigError."""
    if name not in record:
        raise ConfigError(f"{name!r} is missing in a record: all must have it; {_LEAVE_OUT}")
    value = record[name]
    if value is None or not column.plain:
        return value
    if not isinstance(value, list):
        return float(value) if column.number is float and type(value) is int else value
    flat, shape = _flat(value)
    kind = bool if set(map(type, flat)) == {bool} else column.number
    return np.empty(shape if flat else (0, *column.inner), np.dtype(kind))


_WORDS = {dict: "objects", list: "lists", str: "text", type(None): "null", bool: "booleans"}


def _flat(value: list[Any]) -> tuple[list[Any], tuple[int, ...]]:
    """Elements of nested lists, and their shape. Raises ConfigError where they have none."""
    shape = [len(value)]
    while value and type(value[0]) is list:
        size = len(value[0])
        if any(type(part) is not list or len(part) != size for part in value):
            raise ConfigError("a list of lists of different lengths, which no field can hold")
        if len(shape) == _MOST_DIMENSIONS:
            raise ConfigError(f"a list nested deeper than {_MOST_DIMENSIONS}")
        shape.append(size)
        value = list(chain.from_iterable(value))
    return value, tuple(shape)


def json_value(name: str, value: Any, made: Field) -> object:
    """A value as the field has it. Raises ConfigError where it is another type, or not exact."""
    if value is None:
        if made.optional:
            return None
        raise ConfigError(f"it holds a null: {name!r}")
    if made.is_json:
        return value  # the writer checks it
    if made.dtype in ("str", "bytes"):
        if not isinstance(value, str):
            raise ConfigError(f"{name!r} is {_said(value)}, not text")
        return value if made.dtype == "str" else value.encode(errors="surrogatepass")
    if not made.shape:
        if not isinstance(value, bool | int | float):
            raise ConfigError(f"{name!r} is {_said(value)}, the field has {made.dtype}")
    elif not isinstance(value, list):
        raise ConfigError(f"{name!r} is {_said(value)}, not a list")
    try:
        return _array(value, made) if isinstance(value, list) else exact(value, made)
    except ConfigError as error:
        raise ConfigError(f"{name!r} is {error}") from None


def exact(value: complex, made: Field) -> complex:
    """A number as it is. Raises ConfigError for an int that a float of 64 bits would round, too."""
    floating = made.dtype == BFLOAT16 or made.dtype.startswith("float")
    if floating and type(value) is int and not is_float(value):
        raise ConfigError(f"{_said(value)}, which {made.dtype} would round")
    return value


def _array(value: list[Any], made: Field) -> Array | torch.Tensor:
    flat, shape = _flat(value)
    types = set(map(type, flat))
    floating = made.dtype == BFLOAT16 or made.storage.kind == "f"
    taken = {int, float} if floating else {bool} if made.dtype == "bool" else {int}
    if not types <= taken:
        raise ConfigError(f"a list of {_kinds(types - taken)}, the field has {made.dtype}")
    if not value:
        shape = (0, *made.inner_shape)
    if floating and types != {float}:
        for number in flat:
            exact(number, made)
    found: Array | torch.Tensor
    try:
        if made.dtype == BFLOAT16:
            found = torch.tensor(flat, dtype=torch.bfloat16).reshape(shape)
        else:
            with np.errstate(over="ignore"):  # said below
                found = np.array(flat, made.storage).reshape(shape)
    except OverflowError as error:
        raise ConfigError(f"a list of which a number does not fit {made.dtype}") from error
    if floating and int(torch.as_tensor(found).isinf().sum()) > sum(map(math.isinf, flat)):
        raise ConfigError(f"a list of which a number is infinite as {made.dtype}")
    return found


def _kinds(types: set[type]) -> str:
    return ", ".join(sorted(_WORDS.get(kind, kind.__name__) for kind in types))


def _said(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 40 else f"{shown[:40]}..."
