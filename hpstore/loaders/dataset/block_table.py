"""Long tables read by block and kept within a budget: checksums, lengths, scalars. Vectorised."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hpstore.errors import HpstoreError
from hpstore.loaders.dataset.record_layout import Int64s, even_rows

BLOCK_ROWS = 8192  # 64 KiB of 8-byte values: what the pool verifies at once
GROUP_BLOCKS = 16  # read together by who asks for many rows of few blocks
TABLE_BYTES = 256 << 20  # of one table; 32 million checksums
Table = npt.NDArray[Any]
Runs = list[tuple[int, int]]  # [(first row, rows), ...] in a cut
# {cut: runs} -> for each cut and each of its runs, the rows of each section
Load = Callable[[dict[int, Runs]], list[list[list[Table]]]]


class BlockTable:
    """Rows of several arrays of one length, in cuts (objects), read when they are asked for.

    Thread-safe; reads are outside of the lock. Memory: at most `budget_bytes`, never less than
    what two blocks take.
    """

    def __init__(
        self,
        cuts: Sequence[int],
        sections: Sequence[tuple[np.dtype[Any], tuple[int, ...]]],
        load: Load,
        *,
        block_rows: int = BLOCK_ROWS,
        budget_bytes: int = TABLE_BYTES,
    ) -> None:
        rows = np.array(cuts, np.int64)
        self._starts = np.concatenate([[0], np.cumsum(rows)]).astype(np.int64)
        self._even = even_rows(rows)
        self._block_rows = max(1, min(block_rows, int(rows.max(initial=1))))
        blocks = -(-rows // self._block_rows)
        self._first = np.concatenate([[0], np.cumsum(blocks)]).astype(np.int64)
        self._sections, self._load = sections, load
        count = int(self._first[-1])
        row_bytes = sum(d.itemsize * int(np.prod(s, dtype=np.int64)) for d, s in sections)
        self._slots = min(count, max(2, budget_bytes // (row_bytes * self._block_rows)))
        self._slot = np.full(count, -1, np.int64)  # of each block
        # rows lie one after another in memory once all are there: no gaps, a slot for every block
        full = self._first[:-1] * self._block_rows
        self._dense = self._slots == count and np.array_equal(full, self._starts[:-1])
        self._all: list[Table] | None = None
        self._holds = np.full(self._slots, -1, np.int64)  # the block in each slot
        self._hand = 0  # the slot that is taken next
        self._tables: list[Table] = []
        self._lock = threading.Lock()  # guards _slot, _holds, _hand, _tables
        self._loading = threading.Lock()  # held while blocks are read

    def renew(self) -> None:
        """After a fork."""
        self._lock, self._loading = threading.Lock(), threading.Lock()

    def cut_of(self, rows: Int64s) -> Int64s:
        """The object that holds each row."""
        if self._even:
            return rows // self._even
        return np.searchsorted(self._starts, rows, "right").astype(np.int64) - 1

    def get(self, rows: Int64s, cuts: Int64s | None = None) -> list[Table]:
        """The rows of every section, in the order that is asked for; copies.

        `cuts`: cut_of(rows), when it is known.
        """
        if self._all is not None:
            return [table[rows] for table in self._all]
        cuts = self.cut_of(rows) if cuts is None else cuts
        local, inside = np.divmod(rows - self._starts[cuts], self._block_rows)
        blocks = self._first[cuts] + local
        with self._lock:
            slots = self._slot[blocks]
            if len(rows) and slots.min() >= 0:
                return self._gather(slots, inside)
        wanted = np.unique(blocks)
        if len(wanted) <= self._slots:
            return self._get(blocks, inside, wanted)
        order = np.argsort(blocks, kind="stable")  # block by block, a table's worth at a time
        outs = [np.empty((len(rows), *shape), dtype) for dtype, shape in self._sections]
        bounds = np.searchsorted(blocks[order], wanted[:: self._slots])
        for low, high in zip(bounds, [*bounds[1:], len(rows)], strict=True):
            part = order[low:high]
            found = self._get(blocks[part], inside[part], np.unique(blocks[part]))
            for out, values in zip(outs, found, strict=True):
                out[part] = values
        return outs

    def _get(self, blocks: Int64s, inside: Int64s, wanted: Int64s) -> list[Table]:
        while True:
            with self._loading:  # threads want the same blocks at first: one reads them
                with self._lock:
                    missing = wanted[self._slot[wanted] < 0]
                    if not len(missing):
                        return self._gather(self._slot[blocks], inside)
                    near = self._with_neighbours(missing, len(blocks))
                loaded = self._read_any(near, missing)
                with self._lock:
                    for block, values in loaded:
                        self._install(block, values)
                    if self._slot[wanted].min(initial=0) >= 0:
                        return self._gather(self._slot[blocks], inside)

    def _with_neighbours(self, missing: Int64s, rows: int) -> Int64s:
        """Blocks to read where `rows` rows lack these: those of a window lie in few, and its next
        batches would each wait for a few more. Only where there is room for the whole table.
        """
        if self._slots < len(self._slot) or len(missing) * GROUP_BLOCKS > rows:
            return missing
        groups = np.unique(missing // GROUP_BLOCKS)
        near = (groups[:, None] * GROUP_BLOCKS + np.arange(GROUP_BLOCKS)).reshape(-1)
        near = near[near < len(self._slot)]
        lacking: Int64s = near[self._slot[near] < 0]
        return lacking

    def _read_any(self, near: Int64s, missing: Int64s) -> list[tuple[int, list[Table]]]:
        """All that are near, or what is missing: a neighbour that cannot be read harms nobody."""
        if len(near) > len(missing):
            with contextlib.suppress(HpstoreError):
                return self._read(near)
        return self._read(missing)

    def _gather(self, slots: Int64s, inside: Int64s) -> list[Table]:
        """One index, not two: numpy gives up the interpreter's lock for two, and has to queue."""
        if not self._tables:
            self._tables = self._fresh()
        rows = slots * self._block_rows + inside
        return [table.reshape(-1, *table.shape[2:])[rows] for table in self._tables]

    def _fresh(self) -> list[Table]:
        return [
            np.empty((self._slots, self._block_rows, *shape), dtype)
            for dtype, shape in self._sections
        ]

    def _read(self, missing: Int64s) -> list[tuple[int, list[Table]]]:
        """Blocks from their objects, all in one call."""
        found: list[tuple[int, list[Table]]] = []
        cuts = np.searchsorted(self._first, missing, "right") - 1
        of_cut = {cut: missing[cuts == cut] for cut in np.unique(cuts).tolist()}
        loaded = self._load({cut: self._runs(cut, blocks) for cut, blocks in of_cut.items()})
        for blocks, tables in zip(of_cut.values(), loaded, strict=True):
            found += zip(blocks.tolist(), tables, strict=True)
        return found

    def _runs(self, cut: int, blocks: Int64s) -> Runs:
        rows = int(self._starts[cut + 1] - self._starts[cut])
        firsts = ((blocks - self._first[cut]) * self._block_rows).tolist()
        return [(first, min(self._block_rows, rows - first)) for first in firsts]

    def _install(self, block: int, values: list[Table]) -> None:
        """Keep a block in the slot that was filled longest ago.

        In this order: the child of a fork in its midst finds no block that is not there.
        """
        if self._slot[block] >= 0:
            return  # another thread was faster
        if not self._tables:
            self._tables = self._fresh()
        slot, self._hand = self._hand, (self._hand + 1) % self._slots
        if self._dense:
            slot = block
        if self._holds[slot] >= 0:
            self._slot[self._holds[slot]] = -1
        self._holds[slot] = -1
        for table, found in zip(self._tables, values, strict=True):
            table[slot, : len(found)] = found
        self._slot[block] = slot
        self._holds[slot] = block
        if self._dense and self._holds.min() >= 0:
            self._all = [t.reshape(-1, *t.shape[2:]) for t in self._tables]
