"""Which samples a loader reads, by their columns and lengths: decided once, before any record."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from hpstore.errors import ConfigError
from hpstore.loaders.dataset.fields import BFLOAT16, Array, FieldKind, mask_name
from hpstore.loaders.dataset.python_numbers import as_numbers
from hpstore.loaders.dataset.ragged_lengths import ragged_lengths
from hpstore.loaders.dataset.record_layout import Int64s
from hpstore.loaders.dataset.record_reader import StoredData

_LENGTH = "len("  # len(name) in a comparison: of a ragged field

_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "in": lambda column, values: np.isin(column, _as_column(column, values)),
    "not in": lambda column, values: ~np.isin(column, _as_column(column, values)),
}
_FLOAT_BITS = 1023  # of ints that surely are within the range of floats
_UP = ("<", ">=")  # what they say of a number, they say of the next whole one


def _compare(column: Array, sign: str, value: Any) -> Any:
    """A column compared with a number, or with several. Whole numbers are never rounded: numpy
    makes floats of both sides where one of them is a float, or they have no int in common."""
    value = _number(value) if sign not in ("in", "not in") else value
    if column.dtype.kind in "iu" and isinstance(value, float) and math.isfinite(value):
        if sign in ("==", "!=") and not value.is_integer():
            return np.full(column.shape, sign == "!=")
        value = math.ceil(value) if sign in _UP else math.floor(value)
    elif isinstance(value, int) and value.bit_length() > _FLOAT_BITS and column.dtype.kind == "f":
        value = math.inf if value > 0 else -math.inf
    elif isinstance(value, int | float) and _is_beyond(column, value):
        column = column.astype(np.float64)
    return _COMPARISONS[sign](column, value)


def _as_column(column: Array, values: Iterable[Any]) -> Array:
    """Those of the numbers that a column may hold, in its dtype: as == compares with each."""
    found = [_number(value) for value in values]
    if column.dtype.kind in "iu":
        fits = np.iinfo(column.dtype)
        whole = {int(v) for v in found if not isinstance(v, float) or v.is_integer()}
        return np.array([v for v in whole if fits.min <= v <= fits.max], column.dtype)
    some = [v for v in found if isinstance(v, float) or v.bit_length() <= _FLOAT_BITS]
    some = [v for v in some if not _is_beyond(column, v)]
    with np.errstate(over="ignore"):
        return np.array(some, column.dtype if column.dtype.kind in "fc" else np.float64)


def _is_beyond(column: Array, value: float) -> bool:
    """Whether a finite number exceeds the range of the column's floats, where it would become an
    infinity."""
    if column.dtype.kind != "f" or column.dtype.itemsize >= 8 or not math.isfinite(value):
        return False
    return abs(value) > float(np.finfo(column.dtype).max)


def _as_bfloat16(value: Any) -> Any:
    """A number as a field of bfloat16 rounds it, as numpy does for the floats that it has."""
    value = _number(value)
    if not isinstance(value, float):
        return value
    rounded = torch.tensor(value, dtype=torch.bfloat16).item()
    return rounded if math.isfinite(rounded) else value


def _number(value: Any) -> Any:
    """A number of Python's."""
    return value.item() if isinstance(value, np.generic) else value


class Columns(Mapping[str, Array]):
    """The scalar fields of a dataset as whole numpy columns, read when they are asked for.

    Also those that the dataset was opened without. bfloat16 is float32 here. Arrays are read-only
    and shared. Columns stay in memory as long as this does.
    """

    def __init__(self, data: StoredData) -> None:
        self._data = StoredData(data.pool, data.name, data.manifest)
        self._kept: dict[str, Array] = {}

    def __getitem__(self, name: str) -> Array:
        """Values of a scalar field, (n, *shape). Raises ConfigError for other fields."""
        if name in self._kept:
            return self._kept[name]
        made = self._data.stored.get(name)
        if made is None or made.kind is not FieldKind.SCALAR:
            what = "is no field" if made is None else "is no column: it lies in the records"
            hint = f"; its length is {_LENGTH}{name})" if made and made.is_ragged else ""
            raise ConfigError(
                f"filter: {name!r} of data set {self._data.name!r} {what}{hint}. Columns are "
                f"{list(self)}"
            )
        column = self._data.scalars(name, np.arange(len(self._data)))
        return self._keep(name, as_numbers(made.dtype, column))

    def lengths(self, name: str) -> Int64s:
        """Elements of each value of a ragged field, int64 (n,); of text and bytes its bytes."""
        key = f"{_LENGTH}{name})"
        if key in self._kept:
            return self._kept[key]
        return self._keep(key, ragged_lengths(self._data, name).astype(np.int64))

    def there(self, name: str) -> Array | None:
        """Which samples have a value of an optional field, bool (n,); None for other fields."""
        made = self._data.fields.get(name)
        return self[mask_name(name)] if made is not None and made.optional else None

    def is_bfloat16(self, name: str) -> bool:
        """Whether a column has the values of a field of bfloat16."""
        made = self._data.stored.get(name)
        return made is not None and made.dtype == BFLOAT16

    def _keep(self, name: str, column: Array) -> Array:
        column.flags.writeable = False
        self._kept[name] = column
        return column

    def __contains__(self, name: object) -> bool:
        return name in list(self)

    def __iter__(self) -> Iterator[str]:
        return (n for n, made in self._data.stored.items() if made.kind is FieldKind.SCALAR)

    def __len__(self) -> int:
        return sum(1 for _ in self)


Comparison: TypeAlias = tuple[str, str, Any]  # Any: a number, or several of them for "in"
RowFilter: TypeAlias = Callable[[Columns], Any] | Sequence[Comparison]
"""A function of the columns that returns a mask, bool (n,), or comparisons that must all hold.

A sample without a value of an optional field is kept by no comparison, but by `== None`; a function
sees zeros there, and which they are in the column `<name>_mask`.
"""


def filtered_rows(data: StoredData, condition: RowFilter) -> Int64s:
    """Find the samples that a filter keeps, as for a Subset. Reads columns and tables alone.

    Parameters
    ----------
    data
        An open dataset.
    condition
        As a DataLoader's `filter`. What a function raises has a note that names the dataset.

    Returns
    -------
    numpy.ndarray
        int64 (n,), ascending, at least one. It is the caller's.

    Raises
    ------
    ConfigError
        The filter cannot be used, or keeps nothing.
    """
    mask = filter_mask(data, condition)
    if not mask.any():
        raise ConfigError(
            f"filter keeps none of the {len(data)} samples of data set {data.name!r}: there is "
            "nothing to read. Nothing was started; change the filter"
        )
    return np.flatnonzero(mask).astype(np.int64)


def filter_mask(data: StoredData, condition: RowFilter) -> Array:
    """Which samples a filter keeps, bool (n,). Raises as filtered_rows, but for keeping nothing."""
    require_filter(condition)
    columns = Columns(data)
    if callable(condition):
        try:
            made = np.asarray(condition(columns))
        except Exception as error:
            error.add_note(f"hpstore: in filter, of data set {data.name!r}")
            raise
        return _require_mask(made, data, "the function")
    mask = np.ones(len(data), bool)
    for name, sign, value in condition:
        found = _require_mask(
            np.asarray(_kept_by(columns, name, sign, value)), data, f"{name} {sign}"
        )
        mask &= found
    return mask


def _kept_by(columns: Columns, name: str, sign: str, value: Any) -> Any:
    """Which samples one comparison keeps. One without a value is kept by `== None` alone."""
    inner = name.removeprefix(_LENGTH).removesuffix(")")
    ragged = name == f"{_LENGTH}{inner})" and name not in columns
    there = columns.there(inner if ragged else name)
    if value is None:
        if there is None:
            here = len(columns.lengths(inner) if ragged else columns[name])
            there = np.ones(here, np.bool_)
        return ~there if sign == "==" else there
    if not ragged and columns.is_bfloat16(name):
        several = sign in ("in", "not in")
        value = [_as_bfloat16(one) for one in value] if several else _as_bfloat16(value)
    made = _compare(columns.lengths(inner) if ragged else columns[name], sign, value)
    if there is None:
        return made
    return made & there.reshape(there.shape + (1,) * (np.ndim(made) - 1))


def require_filter(condition: object) -> None:
    """Raise ConfigError unless this is a RowFilter."""
    if callable(condition):
        return
    if isinstance(condition, str) or not isinstance(condition, Sequence) or not condition:
        raise ConfigError(
            f"filter is {condition!r}: give a function of the columns that returns a mask, or "
            'comparisons such as [("label", "==", 3), ("len(text)", ">=", 64)]'
        )
    for one in condition:
        if not isinstance(one, tuple) or len(one) != 3 or not isinstance(one[0], str):
            raise ConfigError(f"filter: {one!r} is no comparison (name, sign, value)")
        name, sign, value = one
        if not isinstance(sign, str) or sign not in _COMPARISONS:
            raise ConfigError(f"filter: {sign!r} is none of {', '.join(_COMPARISONS)}")
        if value is None and sign in ("==", "!="):
            continue
        values = value if sign in ("in", "not in") else [value]
        if not isinstance(values, list | tuple | set | frozenset | range | np.ndarray):
            raise ConfigError(f"filter: {name!r} {sign} {value!r}: give a list of numbers")
        if not all(isinstance(v, bool | int | float | np.number | np.bool_) for v in values):
            raise ConfigError(f"filter: {name!r} {sign} {value!r}: columns hold numbers")


def _require_mask(made: Array, data: StoredData, what: str) -> Array:
    if made.dtype != np.bool_ or made.shape != (len(data),):
        raise ConfigError(
            f"filter: {what} gives {made.dtype.name} of shape {made.shape} for data set "
            f"{data.name!r}, not one bool for each of its {len(data)} samples"
        )
    return made
