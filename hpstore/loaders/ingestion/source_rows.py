"""Records that were read together: by columns where they have some, else one by one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hpstore.loaders.dataset.fields import Array
from hpstore.loaders.dataset.record_layout import Int64s
from hpstore.loaders.dataset.stored_values import StoredValues, joined_values
from hpstore.loaders.dataset.value_rows import ValueRows
from hpstore.loaders.ingestion.value_sizes import sample_bytes, value_bytes
from hpstore.units import MIB

Sample = Mapping[str, object]
Column = Array | list[object] | StoredValues  # (n, *shape), or one value a row
GROUP_ROWS, GROUP_BYTES = 1024, 8 * MIB
_NUMBERS = {int, float, bool}


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceItem:
    """One record of a source: a sample, or what is wrong with it.

    `origin`: its number in the source; with blocks, block << 32 | number in the block.
    """

    name: str
    origin: int
    sample: Sample | None = None
    problem: str = ""


class SourceRows(ABC):
    """Records in their order. `nbytes`: about what each takes, 0 of one that is bad."""

    origins: Int64s
    nbytes: Int64s

    def __len__(self) -> int:
        return len(self.origins)

    @property
    @abstractmethod
    def columns(self) -> Mapping[str, Column] | None:
        """Their values; None where one of them is bad, or they have not the same names."""

    @abstractmethod
    def item(self, row: int) -> SourceItem:
        """One of them."""

    def items(self) -> Iterator[SourceItem]:
        """One after another."""
        return map(self.item, range(len(self)))

    @abstractmethod
    def part(self, low: int, high: int) -> SourceRows:
        """Rows [low, high)."""


class ItemRows(SourceRows):
    """Records that are there one by one."""

    def __init__(self, items: Sequence[SourceItem]) -> None:
        self._items = items
        self.origins = np.array([item.origin for item in items], np.int64)
        sizes = [sample_bytes(item.sample) if item.sample else 0 for item in items]
        self.nbytes = np.array(sizes, np.int64)

    @property
    def columns(self) -> Mapping[str, Column] | None:
        first = self._items[0].sample
        samples = [item.sample for item in self._items]
        if first is None or any(s is None or s.keys() != first.keys() for s in samples):
            return None
        return {name: [sample[name] for sample in samples if sample] for name in first}

    def item(self, row: int) -> SourceItem:
        return self._items[row]

    def part(self, low: int, high: int) -> SourceRows:
        return ItemRows(self._items[low:high])


class ColumnRows(SourceRows):
    """Good records by columns. `name_of`: what to call one of them in a message."""

    def __init__(
        self,
        columns: Mapping[str, Column],
        origins: Int64s,
        name_of: Callable[[int], str],
        nbytes: Int64s | None = None,
    ) -> None:
        self._columns, self.origins, self._name_of = columns, origins, name_of
        self.nbytes = columns_bytes(columns, len(origins)) if nbytes is None else nbytes

    @property
    def columns(self) -> Mapping[str, Column]:
        return self._columns

    def item(self, row: int) -> SourceItem:
        sample = {name: value_of(column, row) for name, column in self._columns.items()}
        return SourceItem(name=self._name_of(row), origin=int(self.origins[row]), sample=sample)

    def part(self, low: int, high: int) -> SourceRows:
        return ColumnRows(
            {name: part_of(column, low, high) for name, column in self._columns.items()},
            self.origins[low:high],
            lambda row: self._name_of(low + row),
            self.nbytes[low:high],
        )


def value_of(column: Column, row: int) -> object:
    """The value of a row, as a sample has it."""
    return column.value(row) if isinstance(column, StoredValues) else column[row]


def part_of(column: Column, low: int, high: int) -> Column:
    """Rows [low, high)."""
    return column.part(low, high) if isinstance(column, StoredValues) else column[low:high]


def taken_of(column: Column, rows: Int64s) -> Column:
    """These rows, in this order."""
    if isinstance(column, StoredValues):
        return column.taken(rows)
    if isinstance(column, list):
        return [column[row] for row in rows.tolist()]
    return column[rows]


def joined_column(parts: Sequence[Column]) -> Column:
    """All of them, one after another: as they are where they are alike, else as a list."""
    if len(parts) == 1:
        return parts[0]
    if all(isinstance(p, np.ndarray) for p in parts):
        arrays = [p for p in parts if isinstance(p, np.ndarray)]
        if len({(a.dtype, a.shape[1:]) for a in arrays}) == 1:
            return np.concatenate(arrays)
    stored = [p for p in parts if isinstance(p, StoredValues)]
    if len(stored) == len(parts) and len({p.text for p in stored}) == 1:
        return joined_values(stored)
    return [value_of(part, row) for part in parts for row in range(len(part))]


def columns_bytes(columns: Mapping[str, Column], rows: int) -> Int64s:
    """About how much memory each row takes: as sample_bytes() of its sample."""
    found = np.zeros(rows, np.int64)
    for column in columns.values():
        if isinstance(column, StoredValues):
            found += _stored_bytes(column)
        elif isinstance(column, np.ndarray):
            found += 8 if column.ndim == 1 else column.nbytes // max(1, len(column))
        elif set(map(type, column)) <= _NUMBERS:
            found += 8
        else:
            found += np.fromiter(map(value_bytes, column), np.int64, rows)
    return found


def _stored_bytes(column: StoredValues) -> Int64s:
    found = column.rows.lengths.copy()
    if column.text and not _is_ascii(column.rows):
        for row, raw in enumerate(column.rows):  # its characters: bytes that do not continue one
            if len(raw) and raw.max() > 0x7F:
                found[row] -= int(((raw & 0xC0) == 0x80).sum())
    if column.there is not None:
        found[~column.there] = 8
    return found


def _is_ascii(rows: ValueRows) -> bool:
    """Whether all between the first and the last byte of them is."""
    for place, memory in enumerate(rows.memories):
        here = rows.which == place
        if here.any():
            low, high = rows.starts[here].min(), (rows.starts + rows.lengths)[here].max()
            if memory[low:high].max(initial=0) > 0x7F:
                return False
    return True


def grouped(
    items: Iterable[SourceItem], *, rows: int = GROUP_ROWS, nbytes: int = GROUP_BYTES
) -> Iterator[SourceRows]:
    """Good records together, up to so many rows and bytes; a bad one by itself."""
    group: list[SourceItem] = []
    held = 0
    for item in items:
        if item.sample is None:
            if group:
                yield ItemRows(group)
            group, held = [], 0
            yield ItemRows([item])
            continue
        group.append(item)
        held += sample_bytes(item.sample)
        if len(group) >= rows or held >= nbytes:
            yield ItemRows(group)
            group, held = [], 0
    if group:
        yield ItemRows(group)


def gathered(
    found: Iterable[SourceRows], *, rows: int = GROUP_ROWS, nbytes: int = GROUP_BYTES
) -> Iterator[SourceRows]:
    """Small reads together, up to so many rows and bytes, where their columns are alike."""
    group: list[SourceRows] = []
    count = held = 0
    for one in found:
        size = int(one.nbytes.sum())
        fits = count + len(one) <= rows and held + size <= nbytes
        if group and not (fits and _alike(group[0], one)):
            yield _together(group)
            group, count, held = [], 0, 0
        group.append(one)
        count, held = count + len(one), held + size
    if group:
        yield _together(group)


def _alike(first: SourceRows, other: SourceRows) -> bool:
    return (
        isinstance(first, ColumnRows)
        and isinstance(other, ColumnRows)
        and first.columns.keys() == other.columns.keys()
    )


def _together(group: Sequence[SourceRows]) -> SourceRows:
    columns = [part.columns for part in group]
    if len(group) == 1 or columns[0] is None:
        return group[0]
    starts = np.cumsum([0, *map(len, group)])

    def name_of(row: int) -> str:
        part = int(np.searchsorted(starts, row, "right")) - 1
        return group[part].item(row - int(starts[part])).name

    return ColumnRows(
        {name: joined_column([c[name] for c in columns if c]) for name in columns[0]},
        np.concatenate([part.origins for part in group]),
        name_of,
        np.concatenate([part.nbytes for part in group]),
    )


def pieces(rows: SourceRows, most_bytes: int) -> Iterator[tuple[int, SourceRows]]:
    """Cut into parts of at most GROUP_ROWS and `most_bytes`, one row at least; each with where it
    begins."""
    if len(rows) <= GROUP_ROWS and int(rows.nbytes.sum()) <= most_bytes:
        yield 0, rows
        return
    ends = np.cumsum(rows.nbytes)
    low = 0
    while low < len(rows):
        before = int(ends[low - 1]) if low else 0
        fits = int(np.searchsorted(ends, before + most_bytes, "right"))
        high = min(max(fits, low + 1), low + GROUP_ROWS, len(rows))
        yield low, rows.part(low, high)
        low = high
