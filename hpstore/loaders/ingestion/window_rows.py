"""The records of one window of a source in blocks, handed out in a mixed order by columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from hpstore.loaders.dataset.record_layout import Int64s
from hpstore.loaders.ingestion.source_rows import (
    GROUP_ROWS,
    Column,
    ColumnRows,
    ItemRows,
    SourceItem,
    SourceRows,
    joined_column,
    taken_of,
)


@dataclass(frozen=True, slots=True)
class WindowRows:
    """Rows of several reads, one after another. `block`, `record`: the place behind the last."""

    parts: list[SourceRows]
    block: int
    record: int

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def mixed(self, order: Int64s, most_bytes: int) -> Iterator[tuple[int, SourceRows]]:
        """The rows in this order, in pieces; each with its place in `order`. A row that has no
        columns like the others' comes by itself."""
        starts = np.cumsum([0, *map(len, self.parts)])
        names = next((set(p.columns) for p in self.parts if p.columns is not None), set[str]())
        good = [p.columns is not None and set(p.columns) == names for p in self.parts]
        alike = [part for part, has in zip(self.parts, good, strict=True) if has]
        columns = {
            name: joined_column([part.columns[name] for part in alike if part.columns is not None])
            for name in (alike[0].columns or () if alike else ())
        }
        has = np.repeat(good, np.diff(starts))
        place = np.cumsum(has) - 1  # of a row among those with columns
        nbytes = np.concatenate([part.nbytes for part in self.parts])
        origins = np.concatenate([part.origins for part in self.parts])
        for low, high in _stretches(has[order], nbytes[order], most_bytes):
            rows = order[low:high]
            if has[rows[0]]:
                yield low, self._gathered(columns, place[rows], origins, nbytes, rows, starts)
            else:
                yield low, ItemRows([self._item(int(rows[0]), starts)])

    def _gathered(
        self,
        columns: Mapping[str, Column],
        places: Int64s,
        origins: Int64s,
        nbytes: Int64s,
        rows: Int64s,
        starts: Int64s,
    ) -> SourceRows:
        return ColumnRows(
            {name: taken_of(column, places) for name, column in columns.items()},
            origins[rows],
            lambda row: self._item(int(rows[row]), starts).name,
            nbytes[rows],
        )

    def _item(self, row: int, starts: Int64s) -> SourceItem:
        part = int(np.searchsorted(starts, row, "right")) - 1
        return self.parts[part].item(row - int(starts[part]))


def _stretches(has: np.ndarray, nbytes: Int64s, most_bytes: int) -> Iterator[tuple[int, int]]:
    """[low, high) of rows that are written together: with columns, of bounded rows and bytes."""
    bounds = np.flatnonzero(np.diff(has)) + 1
    ends = np.cumsum(nbytes)
    for first, last in pairwise([0, *bounds.tolist(), len(has)]):
        low = first
        while low < last:
            before = int(ends[low - 1]) if low else 0
            fits = int(np.searchsorted(ends, before + most_bytes, "right")) if has[low] else 0
            high = min(max(fits, low + 1), low + GROUP_ROWS, last)
            yield low, high
            low = high
