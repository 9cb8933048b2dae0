"""A plain LRU of records, in the loader's place for a cache: what the cache is measured against."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

from hpstore.codec.galois import Bytes
from hpstore.loaders import Dataset
from hpstore.loaders.dataset.large_records import Lost
from hpstore.loaders.dataset.record_layout import Int64s
from hpstore.loaders.dataset.record_stream import Stream
from hpstore.pool.pool import Pool

Key = tuple[int, int]  # stream, record


class Lru:
    """Records within a number of bytes, the least recently used one leaves. Thread-safe.

    What is kept is never written again: views may be copied from without a lock.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes, self.used_bytes, self.hits = capacity_bytes, 0, 0
        self._kept: OrderedDict[Key, Bytes] = OrderedDict()
        self._lock = threading.Lock()  # guards all of it

    def find(self, keys: Sequence[Key]) -> list[Bytes | None]:
        """Records that are there; they are the last to leave now."""
        with self._lock:
            found = [self._kept.get(key) for key in keys]
            for key, data in zip(keys, found, strict=True):
                if data is not None:
                    self._kept.move_to_end(key)
                    self.hits += 1
        return found

    def keep(self, records: Iterable[tuple[Key, Bytes]]) -> None:
        """Take records in. They belong to the cache from now on."""
        with self._lock:
            for key, data in records:
                if key not in self._kept:
                    self._kept[key] = data
                    self.used_bytes += len(data)
            while self.used_bytes > self.capacity_bytes:
                _, gone = self._kept.popitem(last=False)
                self.used_bytes -= len(gone)


class LruData(Dataset):
    """A dataset whose records are read through an LRU, which other datasets may share."""

    def __init__(self, pool: Pool, name: str, lru: Lru) -> None:
        super().__init__(pool, name)
        self._lru = lru

    def read_rows(
        self,
        stream: Stream,
        indices: Int64s,
        rows: Sequence[Bytes],
        addresses: Int64s | None = None,
        room: Sequence[Bytes] | None = None,
        lost: Lost | None = None,
    ) -> bool:
        """As StoredData.read_rows; a record that a batch has twice is read once."""
        keys = [(stream.number, index) for index in indices.tolist()]
        lacking: dict[Key, list[int]] = {}
        for i, (key, data) in enumerate(zip(keys, self._lru.find(keys), strict=True)):
            if data is None:
                lacking.setdefault(key, []).append(i)
            else:
                rows[i][:] = data
        if not lacking:
            return True
        firsts = [where[0] for where in lacking.values()]
        wanted, into = indices[np.array(firsts)], [rows[i] for i in firsts]
        behind = None if room is None else [room[i] for i in firsts]
        if not super().read_rows(stream, wanted, into, room=behind, lost=lost):
            return False
        for first, *again in lacking.values():
            for i in again:
                rows[i][:] = rows[first]
        self._lru.keep((keys[i], rows[i].copy()) for i in firsts)
        return True
