"""What a decision needs of a block, side by side, so that a request costs one look into memory."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hpstore.loaders.policy.cache_plan import Bools, Floats, Int32s, Int64s
from hpstore.runtime.buffers import aligned_array

_NARROW, _WIDE = 8, 32  # bytes of a row; a line of the processor's cache has 64
_SEEN, _MARK = 28, 29  # where they are in a wide row


class BlockRows:
    """Copied rows of some blocks, n of them. Change `keys` and `seen`, then Table.put().

    `keys` float32[columns, n], `places` int32[n]; of more than one column also `seen`
    uint8[n, 1] and `marks`, else of no length.
    """

    __slots__ = ("keys", "marks", "places", "seen", "words")

    def __init__(self, words: Floats, columns: int) -> None:
        self.words = words
        # one key of all blocks after the other: numpy is slow at many short rows
        self.keys: Floats = words.T[:columns].copy()
        self.places: Int32s = words.view(np.int32)[:, columns]
        raw = words.view(np.uint8)[:, _SEEN:]  # nothing of a narrow row
        self.seen, self.marks = raw[:, :1], raw[:, 1:2]


class Table:
    """A row for each block: `keys` float32[blocks, columns], -inf; `places` int32[blocks], -1;
    `seen` uint8[blocks], 0; `marks` bool[blocks], False, with more than one column.

    9 bytes a block with one column, 32 with more, 6 at most. In arrays of their own each would cost
    a call and, of millions of blocks, a miss. All are views, replaced by lay().
    """

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._lay(1)
        self.places[:] = -1

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return (9 if self.columns == 1 else _WIDE) * self._blocks

    def lay(self, columns: int) -> None:
        """Rows of so many columns, their keys -inf, no mark set; the rest stays."""
        if columns == self.columns:
            self.keys[:] = -np.inf
            self.marks[:] = False
            return
        places, seen = self.places, self.seen
        self._lay(columns)
        self.places[:], self.seen[:] = places, seen

    def _lay(self, columns: int) -> None:
        self.columns = columns
        size = _NARROW if columns == 1 else _WIDE
        memory = aligned_array(size * self._blocks).reshape(self._blocks, size)
        self._words: Floats = memory.view(np.float32)
        # as one value each: numpy copies those fastest, bit for bit
        self._whole = memory.view(np.int64 if columns == 1 else f"V{size}")[:, 0]
        self.keys: Floats = self._words[:, :columns]
        self.keys[:] = -np.inf
        self.places: Int32s = memory.view(np.int32)[:, columns]
        self.marks: Bools = np.empty(0, np.bool_)
        self.seen: npt.NDArray[np.uint8] = np.zeros(self._blocks if columns == 1 else 0, np.uint8)
        if columns > 1:
            self.seen, self.marks = memory[:, _SEEN], memory[:, _MARK].view(np.bool_)

    def take(self, blocks: Int64s) -> BlockRows:
        """Rows of blocks, int64[n]."""
        return BlockRows(self._words.take(blocks, axis=0), self.columns)

    def put(self, blocks: Int64s, rows: BlockRows) -> None:
        """Changed rows of blocks, each once: as they were taken, but for `keys` and `seen`."""
        rows.words[:, : self.columns] = rows.keys.T
        self._whole[blocks] = rows.words.view(self._whole.dtype)[:, 0]
