"""Loaders on slow devices, with the cache, with a plain LRU and without: time for two epochs.

All contenders hand out the same batches, which is checked. Nothing else is done with a batch.
"""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import Sampler, WeightedRandomSampler

import hpstore
from hpstore.benchmarks.cache.lru_reference import Lru, LruData
from hpstore.benchmarks.harness.measure import forget
from hpstore.config import find_config
from hpstore.devices import Device
from hpstore.devices.opener import device_opener
from hpstore.devices.wrappers import Bandwidth, ThrottledDevice
from hpstore.loaders import Cache, DataLoader, Dataset, DatasetWriter, Field
from hpstore.pool.pool import Pool

NAME, BATCH, EPOCHS, SEED = "bench", 32, 2, 20261121
DEVICES, PARITY = 4, 1
MEMORY_SHARE = 4  # the data are so many times the cache
LAG = 0.37  # of an epoch, by which the second job comes later
TO_NOTHING, TO_LRU, SHUFFLED = 0.7, 0.85, 1.02  # the bars
NOTHING, LRU, OURS = "no cache", "LRU", "hpstore"
Found = dict[str, Any]  # JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheScale:
    """How much, and how slow."""

    rows: int = 2048
    record_bytes: int = 96 * 1024
    bytes_per_second: float = 100e6  # of all devices together

    @property
    def memory_bytes(self) -> int:
        return self.rows * self.record_bytes // MEMORY_SHARE


QUICK = CacheScale(rows=256, record_bytes=16 * 1024, bytes_per_second=40e6)


def measure_end_to_end(
    *,
    scale: CacheScale,
    repeats: int,
    directory: Path | None,
    keep: Callable[[Found], None] = forget,
    say: Callable[[str], None] = forget,
) -> Found:
    """Cases by name, with verdicts. The contenders of a repetition run one after the other.

    `keep` receives the figures so far after each repetition, `say` the name of what runs now.
    """
    with tempfile.TemporaryDirectory(prefix="hpstore-bench-", dir=directory) as root:
        config = _write(Path(root), scale)
        cases = {
            "importance": ((NOTHING, LRU, OURS, OPAQUE), _importance),
            "two jobs": ((NOTHING, LRU, OURS), _two_jobs),
            "full shuffle, one epoch": ((NOTHING, OURS), _one_epoch),
        }
        found: Found = {
            "rows": scale.rows,
            "record_bytes": scale.record_bytes,
            "memory_bytes": scale.memory_bytes,
            "bytes_per_second": scale.bytes_per_second,
        }
        for name, (contenders, case) in cases.items():
            tried = _repetitions(config, scale, contenders, case)
            for number in range(1, repeats + 1):
                say(f"{name}, {number} of {repeats}")
                found[name] = next(tried)
                keep(found)
    return found


def _repetitions(
    config: Path, scale: CacheScale, contenders: tuple[str, ...], case: Case
) -> Iterator[Found]:
    """A case over and over; what all repetitions so far have found."""
    times: dict[str, list[float]] = {who: [] for who in contenders}
    facts: dict[str, Found] = {}
    while True:
        wanted: list[list[str]] | None = None
        for who in contenders:
            with Contender(who, config, scale) as contender:
                began = time.perf_counter()
                seen = case(contender)
                times[who].append(time.perf_counter() - began)
                facts[who] = contender.facts()
            wanted = wanted or seen
            if seen != wanted:
                raise AssertionError(f"{who} handed out other batches than {contenders[0]}")
        rows = {who: {"seconds": _spread(times[who]), **facts[who]} for who in contenders}
        yield {"contenders": rows, **verdicts(times), "same_batches": True}


def verdicts(times: dict[str, list[float]]) -> Found:
    """Time to that of the others, pair by pair: the median counts."""
    found: Found = {}
    for who in times.keys() - {NOTHING, LRU}:
        bars = {NOTHING: TO_NOTHING, LRU: TO_LRU} if LRU in times else {NOTHING: SHUFFLED}
        for other, bar in bars.items():
            pairs = sorted(a / b for a, b in zip(times[who], times[other], strict=True))
            ratio = statistics.median(pairs)
            found[f"{who} to {other}"] = {
                "ratio": round(ratio, 3),
                "lowest": round(pairs[0], 3),
                "highest": round(pairs[-1], 3),
                "bar": bar,
                "met": ratio <= bar,
            }
    return found


def _spread(values: list[float]) -> Found:
    return {
        "median": round(statistics.median(values), 2),
        "lowest": round(min(values), 2),
        "highest": round(max(values), 2),
    }


# --- contenders -------------------------------------------------------------------------------

OPAQUE = "hpstore, order unknown"


class Contender:
    """One way to read the data: loaders on throttled devices, cold, with what they share."""

    def __init__(self, who: str, config: Path, scale: CacheScale) -> None:
        self.who, self.scale = who, scale
        self.pool = Pool(find_config(config), read_only=True, opener=throttled(config, scale))
        self.lru = Lru(scale.memory_bytes) if who == LRU else None
        self.cache = Cache(scale.memory_bytes) if who in (OURS, OPAQUE) else None

    def loader(self, **options: Any) -> DataLoader:
        """Return the loader of one job, with a dataset of its own."""
        data = Dataset(self.pool, NAME) if self.lru is None else LruData(self.pool, NAME, self.lru)
        return DataLoader(data, BATCH, cache=self.cache or 0, **options)

    def facts(self) -> Found:
        """Hits, and what else was counted."""
        if self.lru is not None:
            return {"hits": self.lru.hits}
        if self.cache is None:
            return {}
        stats = self.cache.stats()
        names = (
            "memory_hit_total",
            "late_total",
            "miss_total",
            "again_total",
            "prefetch_total",
            "prefetch_used_total",
            "prefetch_wasted_total",
            "source_bytes",
            "stall_seconds",
            "order_left_total",
            "turn_missed_total",
        )
        return {name: round(stats[name], 3) for name in names if name in stats}

    def __enter__(self) -> Contender:
        return self

    def __exit__(self, *_: object) -> None:
        if self.cache is not None:
            self.cache.close()
        self.pool.close()


def throttled(config: Path, scale: CacheScale) -> Callable[[str], Device]:
    """Devices of a pool behind one link, as those of a file server."""
    opener = device_opener(find_config(config).settings)
    link = Bandwidth(scale.bytes_per_second)
    return lambda url: ThrottledDevice(opener(url), link)


def _write(root: Path, scale: CacheScale) -> Path:
    """Write the dataset at full speed; return where its pool is."""
    config, rng = root / "pool.toml", np.random.default_rng(SEED)
    places = [root / f"d{number}" for number in range(DEVICES)]
    fields = {"value": Field("uint8", (scale.record_bytes,)), "label": Field("int64")}
    with (
        hpstore.create(places, data=DEVICES - PARITY, parity=PARITY, config=config) as pool,
        DatasetWriter(pool, NAME, fields) as writer,
    ):
        for first in range(0, scale.rows, 128):
            labels = np.arange(first, min(first + 128, scale.rows))
            values = rng.integers(0, 256, (len(labels), scale.record_bytes), np.uint8)
            writer.write_batch({"value": values, "label": labels})
    return config


# --- cases ------------------------------------------------------------------------------------

Case = Callable[[Contender], list[list[str]]]
"""Runs loaders; a digest of every batch, by job."""


def _epoch(loader: DataLoader) -> Iterator[str]:
    for batch in loader:
        digest = xxhash.xxh3_64(batch["value"].numpy())
        digest.update(batch["label"].numpy())
        yield digest.hexdigest()


class Opaque(Sampler[int]):
    """A user's own sampler: nothing is known about it."""

    def __init__(self, sampler: Sampler[int]) -> None:
        self._sampler = sampler

    def __iter__(self) -> Iterator[int]:
        return iter(self._sampler)

    def __len__(self) -> int:
        return len(self._sampler)  # type: ignore[arg-type]


def _importance(contender: Contender) -> list[list[str]]:
    """Weights exp(1.2 x); x is AR(1) with 0.8 an epoch."""
    rng, rows = np.random.default_rng(SEED), contender.scale.rows
    x = rng.standard_normal(rows)
    weighted = WeightedRandomSampler(
        torch.exp(1.2 * torch.from_numpy(x)).tolist(),
        rows,
        generator=torch.Generator().manual_seed(SEED),
    )
    loader = contender.loader(sampler=Opaque(weighted) if contender.who == OPAQUE else weighted)
    seen: list[str] = []
    for _ in range(EPOCHS):
        weighted.weights = torch.exp(1.2 * torch.from_numpy(x))
        seen += _epoch(loader)
        x = 0.8 * x + 0.6 * rng.standard_normal(rows)
    loader.close()
    return [seen]


def _two_jobs(contender: Contender) -> list[list[str]]:
    """Each shuffles by its own seed; the second one begins when the first has made a part."""
    first, second = (contender.loader(shuffle=True, seed=seed) for seed in (1, 2))
    begin_at = int(LAG * len(first))
    seen: list[list[str]] = [[], []]
    begun = threading.Event()

    def later() -> None:
        begun.wait()
        for _ in range(EPOCHS):
            seen[1].extend(_epoch(second))

    thread = threading.Thread(target=later, name="second-job", daemon=True)
    thread.start()
    try:
        for _ in range(EPOCHS):
            for digest in _epoch(first):
                seen[0].append(digest)
                if len(seen[0]) == begin_at:
                    begun.set()
    finally:
        begun.set()
        thread.join()
        first.close()
        second.close()
    return seen


def _one_epoch(contender: Contender) -> list[list[str]]:
    loader = contender.loader(shuffle=True, seed=SEED)
    seen = list(_epoch(loader))
    loader.close()
    return [seen]
