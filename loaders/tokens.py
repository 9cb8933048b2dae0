"""Byte tokens in a pool: one object per 64 MiB, read back as random windows in a fixed order.

The order is a pure function of (seed, batch number), so the state of a run is one integer, whatever
has been read ahead.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Iterable, Iterator

import numpy as np
import torch

from hpstore.closing import Closing
from hpstore.errors import ConfigError, IntegrityError
from hpstore.pool import Pool
from hpstore.pooled import PooledReader
from hpstore.units import MIB

SHARD_BYTES = 64 * MIB


def write_corpus(pool: Pool, name: str, texts: Iterable[bytes]) -> int:
    """Store texts back to back as `data/<name>/...`; returns the number of tokens (bytes).

    The manifest is put last: a corpus that was cut short does not exist.
    """
    sizes: list[int] = []
    pending = bytearray()

    def flush(count: int) -> None:
        pool.put(f"data/{name}/shard-{len(sizes):05d}", bytes(pending[:count]))
        sizes.append(count)
        del pending[:count]

    for text in texts:
        pending += text
        while len(pending) >= SHARD_BYTES:
            flush(SHARD_BYTES)
    if pending:
        flush(len(pending))
    if not sizes:
        raise ConfigError(f"corpus {name!r} would be empty")
    pool.put(f"data/{name}/manifest", json.dumps({"format": 1, "shards": sizes}).encode())
    return sum(sizes)


class TokenCorpus:
    """A corpus in a pool. Close it, or use it as a context manager."""

    def __init__(self, pool: Pool, name: str) -> None:
        raw = json.loads(pool.get(f"data/{name}/manifest"))
        if raw.get("kind") is not None:
            raise ConfigError(f"{name!r} is a {raw['kind']}, not a corpus: open it with Dataset")
        if raw.get("format") != 1 or not isinstance(raw.get("shards"), list):
            raise IntegrityError(f"corpus {name!r}: its manifest is malformed")
        self.shard_sizes = [int(size) for size in raw["shards"]]
        self._pool, self._name = pool, name
        self._readers: dict[int, PooledReader] = {}

    def __len__(self) -> int:
        return sum(self.shard_sizes)

    def window(
        self, shard: int, start: int, out: np.ndarray[tuple[int], np.dtype[np.uint8]]
    ) -> None:
        """Fill `out` with tokens of one shard from `start`."""
        if shard not in self._readers:
            self._readers[shard] = self._pool.reader(f"data/{self._name}/shard-{shard:05d}")
        if self._readers[shard].read_into(out, start) != len(out):
            raise IntegrityError(f"corpus {self._name!r}: shard {shard} is shorter than recorded")

    def close(self) -> None:
        """Release open shards. Idempotent."""
        for reader in self._readers.values():
            reader.close()
        self._readers = {}


class TokenBatches(Closing):
    """Endless batches of random windows, (batch, length + 1) int64; read ahead by one thread.

    state_dict() counts batches handed out, not batches read ahead.
    """

    AHEAD = 4

    def __init__(
        self, corpus: TokenCorpus, *, batch_size: int, length: int, seed: int
    ) -> None:  # fmt: skip
        if min(corpus.shard_sizes) <= length:
            raise ConfigError(f"windows of {length + 1} tokens do not fit the smallest shard")
        self.corpus, self.batch_size, self.length, self.seed = corpus, batch_size, length, seed
        self.position = 0
        self.wait_seconds = 0.0
        self._stop = threading.Event()
        self._queue: queue.Queue[tuple[int, torch.Tensor | Exception]] = queue.Queue(self.AHEAD)
        self._thread: threading.Thread | None = None

    def batch_at(self, position: int) -> torch.Tensor:
        """Batch number `position`: the same at every call and in every process."""
        rng = np.random.default_rng([self.seed, position])
        sizes = np.array(self.corpus.shard_sizes, np.int64)
        shards = rng.choice(len(sizes), self.batch_size, p=sizes / sizes.sum())
        out = np.empty((self.batch_size, self.length + 1), np.uint8)
        for row, shard in enumerate(shards):
            start = int(rng.integers(0, sizes[shard] - self.length))
            self.corpus.window(int(shard), start, out[row])
        return torch.from_numpy(out).long()

    def __iter__(self) -> Iterator[torch.Tensor]:
        return self

    def __next__(self) -> torch.Tensor:
        if self._thread is None:
            self._stop.clear()
            self._thread = threading.Thread(
                target=self._read_ahead, args=(self.position,), name="hpstore-tokens", daemon=True
            )
            self._thread.start()
        began = time.perf_counter()
        position, batch = self._queue.get()
        self.wait_seconds += time.perf_counter() - began
        if isinstance(batch, Exception):
            self._halt()  # the next call tries again
            raise batch
        if position != self.position:
            raise AssertionError(f"batch {position} arrived instead of {self.position}")
        self.position += 1
        return batch

    def _read_ahead(self, position: int) -> None:
        while not self._stop.is_set():
            item: torch.Tensor | Exception
            try:
                item = self.batch_at(position)
            except Exception as error:  # noqa: BLE001 (raised again by __next__)
                item = error
            while not self._stop.is_set():
                try:
                    self._queue.put((position, item), timeout=0.1)
                    break
                except queue.Full:
                    continue
            if isinstance(item, Exception):
                return
            position += 1

    def _halt(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        while not self._queue.empty():
            self._queue.get_nowait()

    def state_dict(self) -> dict[str, int]:
        """Where a resumed run goes on."""
        return {"position": self.position, "seed": self.seed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on at a saved position. The seed must be the same."""
        if state["seed"] != self.seed:
            raise ConfigError(f"seed {state['seed']} was saved, {self.seed} is set")
        self._halt()
        self.position = state["position"]

    def close(self) -> None:
        """Stop reading ahead. Idempotent."""
        self._halt()
        self.corpus.close()


__all__ = ["TokenBatches", "TokenCorpus", "write_corpus"]
