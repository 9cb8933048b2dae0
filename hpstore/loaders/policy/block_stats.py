"""What a decision needs of a block, side by side, so that a request costs one look into memory."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hpstore.loaders.policy.cache_plan import Floats, Int32s, Int64s
from hpstore.runtime.buffers import aligned_array

_ROW = 8  # bytes


class BlockRows:
    """Copied rows of some blocks, n of them. Change `keys`, then Table.put().

    `keys` float32[n], `places` int32[n].
    """

    __slots__ = ("keys", "places", "words")

    def __init__(self, words: Floats) -> None:
        self.words = words
        self.keys: Floats = words[:, 0].copy()
        self.places: Int32s = words.view(np.int32)[:, 1]


class Table:
    """A row for each block: `keys` float32[blocks], -inf; `places` int32[blocks], -1; and apart
    from it `seen` uint8[blocks], 0. 9 bytes a block.

    In an array of their own places would cost a call and, of millions of blocks, a miss. All are
    views, and stay where they are.
    """

    def __init__(self, blocks: int) -> None:
        memory = aligned_array(_ROW * blocks).reshape(blocks, _ROW)
        self._words: Floats = memory.view(np.float32)
        # as one value each: numpy copies those fastest, bit for bit
        self._whole = memory.view(np.int64)[:, 0]
        self.keys: Floats = self._words[:, 0]
        self.keys[:] = -np.inf
        self.places: Int32s = memory.view(np.int32)[:, 1]
        self.places[:] = -1
        self.seen: npt.NDArray[np.uint8] = np.zeros(blocks, np.uint8)
        self.nbytes = memory.nbytes + self.seen.nbytes

    def take(self, blocks: Int64s) -> BlockRows:
        """Rows of blocks, int64[n]."""
        return BlockRows(self._words.take(blocks, axis=0))

    def put(self, blocks: Int64s, rows: BlockRows) -> None:
        """Changed rows of blocks, each once: as they were taken, but for `keys`."""
        rows.words[:, 0] = rows.keys
        self._whole[blocks] = rows.words.view(np.int64)[:, 0]
