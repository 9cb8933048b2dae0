"""What is in a batch: tensors, ragged fields, texts; and the room that batches take."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from hpstore.codec.galois import Bytes
from hpstore.loaders.dataset.fields import Field, mask_name
from hpstore.units import MIB, round_up


@dataclass(frozen=True, slots=True)
class Ragged:
    """Values of a ragged field of a batch: row i is values[offsets[i]:offsets[i + 1]].

    Parameters
    ----------
    values
        (total, *inner shape). For bytes, uint8.
    offsets
        int64 (rows + 1), on the same device.
    """

    values: torch.Tensor
    offsets: torch.Tensor

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> torch.Tensor:
        """The value of one row, a view."""
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        row %= len(self)
        return self.values[int(self.offsets[row]) : int(self.offsets[row + 1])]

    def __iter__(self) -> Iterator[torch.Tensor]:
        bounds = self.offsets.tolist()
        return (self.values[a:b] for a, b in itertools.pairwise(bounds))

    def nested(self) -> torch.Tensor:
        """As torch's jagged nested tensor, over the same memory."""
        return jagged(self.values, self.offsets, self.offsets)

    def to(self, *args: Any, **kwargs: Any) -> Ragged:
        """Move both tensors.

        Parameters
        ----------
        *args, **kwargs
            As Tensor.to takes them. A dtype is for the values alone.

        Returns
        -------
        Ragged
            A tensor that needs no change is not copied.
        """
        values = self.values.to(*args, **kwargs)
        return Ragged(values, self.offsets.to(values.device))

    def pin_memory(self) -> Ragged:
        """Both tensors in page-locked memory."""
        return Ragged(self.values.pin_memory(), self.offsets.pin_memory())


def jagged(values: torch.Tensor, offsets: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """A nested tensor. `known`: the offsets once more; on the host they tell the longest row, up to
    which torch pads, and nobody waits for a GPU.
    """
    bounds: dict[str, Any] = {}
    if known.device.type == "cpu" and len(known) > 1:
        lengths = known.diff()
        bounds = {"min_seqlen": int(lengths.min()), "max_seqlen": int(lengths.max())}
    made: torch.Tensor = torch.nested.nested_tensor_from_jagged(values, offsets, **bounds)
    return made


# Any: texts, what JSON holds, images of different sizes, None
BatchValue: TypeAlias = torch.Tensor | Ragged | list[Any]
Batch = dict[str, BatchValue]


def nbytes_of(batch: Batch) -> int:
    """Bytes of its values; of text as many as it has characters."""
    total = 0
    for value in batch.values():
        if isinstance(value, Ragged):
            total += value.values.nbytes + value.offsets.nbytes
        else:
            total += sum(map(len, value)) if isinstance(value, list) else value.nbytes
    return total


def samples_of(batch: Batch, fields: Mapping[str, Field], count: int) -> list[dict[str, Any]]:
    """The samples of a batch as Dataset.__getitem__ has them: views, bytes and str as objects."""
    columns: dict[str, list[Any]] = {}
    for name, made in fields.items():
        value = batch[name]
        if isinstance(value, Ragged) and made.is_bytes:
            columns[name] = [one.numpy().tobytes() for one in value]
        else:
            columns[name] = list(value)
        if made.optional:
            there = mask_of(batch, name)
            columns[name] = [v if t else None for v, t in zip(columns[name], there, strict=True)]
    return [{name: columns[name][row] for name in columns} for row in range(count)]


def mask_of(batch: Batch, name: str) -> list[bool]:
    """Which rows of an optional field have a value."""
    mask = batch[mask_name(name)]
    assert isinstance(mask, torch.Tensor)
    found: list[bool] = mask.tolist()
    return found


def chosen_rows(value: BatchValue, rows: Sequence[int]) -> BatchValue:
    """Some rows of a value, in this order; copies."""
    if isinstance(value, list):
        return [value[row] for row in rows]
    if isinstance(value, Ragged):
        values = [value[row] for row in rows]
        ends = torch.tensor([0, *map(len, values)]).cumsum(0)
        return Ragged(torch.cat(values) if values else value.values[:0], ends)
    out = torch.empty((len(rows), *value.shape[1:]), dtype=value.dtype)
    row_bytes(out)[:] = row_bytes(value)[list(rows)]
    return out


def row_bytes(tensor: torch.Tensor) -> Bytes:
    """Its rows as bytes, (n, bytes of a row), over the same memory: torch has no index_put for
    unsigned integers."""
    flat = tensor.contiguous().reshape(len(tensor), math.prod(tensor.shape[1:]))
    raw: Bytes = flat.view(torch.uint8).numpy()
    return raw


def slot_bytes(nbytes: int) -> int:
    """Of the slot for so many: room for batches that are a little larger, as of many sizes."""
    return round_up(nbytes + nbytes // 16, MIB) if nbytes >= MIB else MIB
