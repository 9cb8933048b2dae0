"""Records of a dataset in a pool, as blocks of a cache."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np

from hpstore.loaders.cache.block_source import MemoryLost, Sizes, Targets
from hpstore.loaders.dataset.record_layout import Int64s
from hpstore.loaders.dataset.record_reader import StoredData
from hpstore.loaders.dataset.record_stream import Stream

_ROWS = 1 << 16  # looked up at a time


class RecordSource:
    """Block i is record i of a stream. Reads the sizes of all records when they have many.

    The fingerprint tells generations of a dataset apart.
    """

    def __init__(self, data: StoredData, stream: Stream) -> None:
        self._data, self._stream = data, stream
        self.name = f"{data.name}/{stream.number}"
        self.identity = f"{self.name} {data.manifest.fingerprint}"
        self.block_count = len(data)
        self.sizes: Sizes = stream.fixed.length if stream.fixed is not None else self._lengths()

    def _lengths(self) -> Int64s:
        parts = [
            self._data.locate(
                self._stream, np.arange(at, min(at + _ROWS, self.block_count), dtype=np.int64)
            ).length
            for at in range(0, self.block_count, _ROWS)
        ]
        return np.concatenate(parts)

    def read(self, blocks: Int64s, targets: Targets) -> None:
        """As BlockSource.read: verified, straight from the devices where that can be."""
        late: list[Future[None]] = []
        if not self._data.read_rows(self._stream, blocks, list(targets), lost=late.extend):
            raise MemoryLost(late or None)
