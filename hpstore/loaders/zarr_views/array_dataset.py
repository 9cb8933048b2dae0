"""Plain zarr arrays, written by anybody, as a torch map-style dataset."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.utils.data
import zarr

from hpstore.errors import ConfigError
from hpstore.format.checksum import digest128
from hpstore.loaders.dataset.dataset import Sample, sample_numbers
from hpstore.loaders.dataset.fields import Array, Value
from hpstore.loaders.dataset.zarr_attributes import is_bfloat16

_NUMBERS = "biufc"  # kinds of numpy dtypes that torch has
_TEXT = "UTO"  # text of fixed width, of any width, and objects, which zarr uses for it


class ZarrDataset(torch.utils.data.Dataset[Sample]):
    """Samples along the first axis of zarr arrays; sample i is a dict of row i of each.

    Numbers come as tensors, of text each row as a str. Of a dataset that is seen through zarr,
    bfloat16 is bfloat16, and an optional field has zeros where its mask is False.

    Reads go through zarr, one selection of each array for a batch, so a chunk is read once a batch.
    The length is that of now; arrays that grow later are opened again. Thread-safe; pickles when
    the arrays' store does.

    Parameters
    ----------
    arrays
        A group, whose arrays directly below it are taken in the order of their names, or arrays by
        name. They stay the caller's.
    fields
        Names of the arrays to read, all unless given. Each sample is a dict of them in that order.

    Raises
    ------
    ConfigError
        There is no such array, or none; arrays differ in length, or have a type that torch has not.
    """

    def __init__(
        self,
        arrays: zarr.Group | Mapping[str, zarr.Array[Any]],
        *,
        fields: Sequence[str] | None = None,
    ) -> None:
        found = dict(arrays.arrays()) if isinstance(arrays, zarr.Group) else dict(arrays)
        names = sorted(found) if isinstance(arrays, zarr.Group) else list(found)
        names = names if fields is None else list(dict.fromkeys(fields))
        unknown = [name for name in names if name not in found]
        if unknown:
            raise ConfigError(f"there is no zarr array {unknown[0]!r}; there are {sorted(found)}")
        self.arrays = {name: found[name] for name in names}
        if not self.arrays:
            raise ConfigError("a data set needs at least one zarr array")
        for name, array in self.arrays.items():
            _check_array(name, array)
        lengths = {name: int(array.shape[0]) for name, array in self.arrays.items()}
        if len(set(lengths.values())) > 1:
            raise ConfigError(f"zarr arrays differ in their first axis, the samples: {lengths}")
        self._length = next(iter(lengths.values()))

    def __len__(self) -> int:
        return self._length

    @property
    def fields(self) -> tuple[str, ...]:
        """Names, in the order of a sample."""
        return tuple(self.arrays)

    @property
    def fingerprint(self) -> str:
        """Equal for arrays of equal names, shapes, types and chunks; contents are not looked at."""
        facts = {
            name: [list(a.shape), str(a.dtype), list(a.chunks), str(a.metadata.zarr_format)]
            for name, a in self.arrays.items()
        }
        return digest128(json.dumps(facts).encode()).hex()

    def __getitem__(self, index: int) -> Sample:
        """One sample. Raises IndexError."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        """Samples in the order of `indices`; tensors are views of one array a field.

        A negative index counts from the end. Raises ConfigError for what is no whole number,
        IndexError, and what the store raises.
        """
        rows = sample_numbers(indices, len(self)).reshape(-1)
        bad = rows[(rows < -len(self)) | (rows >= len(self))]
        if len(bad):
            raise IndexError(f"sample {bad[0]} of a data set of {len(self)}")
        wanted, place = np.unique(np.where(rows < 0, rows + len(self), rows), return_inverse=True)
        columns = {name: _read_rows(a, wanted)[place] for name, a in self.arrays.items()}
        values = {name: _as_values(self.arrays[name], column) for name, column in columns.items()}
        return [{name: values[name][row] for name in values} for row in range(len(rows))]

    def __repr__(self) -> str:
        return f"<zarr data set, {len(self)} samples, fields {list(self.arrays)}>"


def _check_array(name: str, array: object) -> None:
    """Raise ConfigError unless rows of this can be samples."""
    if not isinstance(array, zarr.Array):
        raise ConfigError(f"field {name!r} is a {type(array).__name__}, not a zarr array")
    if array.ndim < 1:
        raise ConfigError(f"zarr array {name!r} has no axis for samples")
    kind = np.dtype(array.dtype).kind
    if kind not in _NUMBERS + _TEXT or (kind in _TEXT and array.ndim > 1):
        raise ConfigError(
            f"zarr array {name!r} is {array.ndim}-dimensional of {array.dtype}; numbers of any "
            "shape and one-dimensional text can be read as samples"
        )


def _read_rows(array: zarr.Array[Any], rows: npt.NDArray[np.int64]) -> Array:
    """Rows, ascending and unique, of one array; a slice where they are one run."""
    if not len(rows):
        return np.empty((0, *array.shape[1:]), array.dtype)
    first, last = int(rows[0]), int(rows[-1]) + 1
    if last - first == len(rows):
        return np.asarray(array[first:last])
    return np.asarray(array.oindex[rows])


def _as_values(array: zarr.Array[Any], column: Array) -> Sequence[Value]:
    if column.dtype.kind in _TEXT:
        return [str(value) for value in column]
    native = np.ascontiguousarray(column, column.dtype.newbyteorder("="))
    made = torch.from_numpy(native)
    return (made.view(torch.bfloat16) if is_bfloat16(array) else made).unbind(0)
