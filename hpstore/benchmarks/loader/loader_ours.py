"""hpstore's side of the loader benchmark: a 4+2 pool of six directories, three ways to read it."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

import hpstore
from hpstore.benchmarks.harness.raw_devices import DATA, linked_pool, make_pool
from hpstore.benchmarks.loader.loader_data import BATCH, Batch, Data
from hpstore.benchmarks.loader.loader_peers import LoaderPeer
from hpstore.config import find_config
from hpstore.loaders import DataLoader, Dataset, DatasetWriter, Field, LoaderMemory
from hpstore.node_memory.kept_datasets import free_datasets
from hpstore.node_memory.meeting_place import keeper_directory
from hpstore.runtime.local_messages import Lost
from hpstore.units import MIB

NAME = "bench"
BLOCK_ROWS = 512
SETTLE_SECONDS = 60.0
_LOOK_SECONDS = 0.01
LOST = {0: (), 1: ("d0",), 2: ("d0", "d1")}  # devices that are missing


class HpstoreLoader(LoaderPeer):
    """DataLoader(shuffle=True) with its default memory: what fits is kept while it is read."""

    name, group, package, store = "hpstore", "hpstore", "hpstore", "pool"
    configuration = "4+2 over six directories, shuffle='global', default cache"
    options: ClassVar[dict[str, Any]] = {"shuffle": "global"}
    lost = 0

    def write(self) -> None:
        with make_pool(self.directory / "pool", recycle_bytes=0) as pool:
            write_data_set(pool, self.data, shard_bytes=_shard_bytes(self.data.nbytes))

    def open(self) -> Dataset:
        """Open the dataset in a pool that lacks `lost` devices."""
        if not hasattr(self, "_dataset"):
            config = self.directory / "pool" / "pool.toml"
            if self.lost:
                config = linked_pool(self.directory / "pool", LOST[self.lost])
            self._pool = hpstore.open(config, read_only=True)
            self._dataset = Dataset(self._pool, NAME)
        return self._dataset

    def make(self, **options: Any) -> DataLoader:
        """A loader of it."""
        away = {} if self.device == "cpu" else {"device": self.device}
        own = {"memory": LoaderMemory(node_minutes=0)}  # a session finds what itself has read
        return DataLoader(self.open(), BATCH, **{**own, **self.options, **away, **options})

    def epoch(self, number: int) -> Iterator[Batch]:
        if not hasattr(self, "_loader"):
            self._loader = self.make()
        self._loader.set_epoch(number)
        return map(_pair, iter(self._loader))

    def stats(self) -> dict[str, Any]:
        """Of the loader of epoch()."""
        return self._loader.stats()

    def in_memory(self, seconds: float = SETTLE_SECONDS) -> float:
        """Wait until the loader of epoch() has all data in its memory; how long that took. An
        epoch may end before. TimeoutError when it does not come about.
        """
        began = time.perf_counter()
        while (stats := self.stats())["pages_in_memory"] < stats["pages_to_keep"]:
            if time.perf_counter() - began > seconds:
                raise TimeoutError(
                    f"{stats['pages_in_memory']} of {stats['pages_to_keep']} pages are in memory "
                    f"after {seconds:.0f} s"
                )
            time.sleep(_LOOK_SECONDS)
        return time.perf_counter() - began

    def close(self) -> None:
        if hasattr(self, "_loader"):
            self._loader.close()
            del self._loader
        if hasattr(self, "_dataset"):
            self._dataset.close()
            self._pool.close()
            del self._dataset, self._pool


def write_data_set(pool: hpstore.Pool, data: Data, *, shard_bytes: int) -> None:
    """Write all records of `data` as the dataset NAME."""
    shape = (None,) if data.ragged else (int(data.lengths[0]),)
    fields = {"value": Field("uint8", shape), "label": Field("int64")}
    with DatasetWriter(pool, NAME, fields, shard_bytes=shard_bytes) as out:
        for first in range(0, data.rows, BLOCK_ROWS):
            numbers = range(first, min(first + BLOCK_ROWS, data.rows))
            rows = [data.record(number) for number in numbers]
            values = rows if data.ragged else np.stack(rows)
            out.write_batch({"value": values, "label": np.array(numbers)})


def _pair(batch: Any) -> Batch:
    return batch["value"], batch["label"]


def _shard_bytes(nbytes: int) -> int:
    """256 MiB, or less where that would leave fewer than eight shards to spread."""
    return max(4 * MIB, min(256 * MIB, nbytes // 8 // MIB * MIB))


class OursRecords(HpstoreLoader):
    """No cache: every record is read when it is due."""

    name = "hpstore global, no cache"
    configuration = "4+2 over six directories, shuffle='global', cache=0"
    options: ClassVar[dict[str, Any]] = {"shuffle": "global", "cache": 0}


class OursWindow(HpstoreLoader):
    """No cache: whole stripes are read ahead and shuffled by windows."""

    name = "hpstore window, no cache"
    configuration = "4+2 over six directories, shuffle='window', cache=0"
    options: ClassVar[dict[str, Any]] = {"shuffle": "window", "cache": 0}


class OursWindowCached(HpstoreLoader):
    """Window shuffle with its default memory."""

    name = "hpstore window"
    configuration = "4+2 over six directories, shuffle='window', default cache"
    options: ClassVar[dict[str, Any]] = {"shuffle": "window"}


class OursKept(HpstoreLoader):
    """A loader that has filled the node's memory and reads on."""

    name = "hpstore, kept loader"
    configuration = "4+2 over six directories, shuffle='global', default cache, node's memory"
    options: ClassVar[dict[str, Any]] = {"shuffle": "global", "memory": LoaderMemory()}

    def free(self) -> None:
        """Let the node's memory of the dataset go."""
        settings = find_config(self.directory / "pool" / "pool.toml").settings
        with contextlib.suppress(Lost):
            free_datasets(keeper_directory(settings), NAME)


class OursNew(OursKept):
    """The first epoch of a new process on a node that has the data in memory."""

    name = "hpstore, new process"


RESTART: tuple[type[HpstoreLoader], ...] = (OursKept, OursNew)
OURS: tuple[type[HpstoreLoader], ...] = (HpstoreLoader, OursWindowCached, OursRecords, OursWindow)


def lost_share(directory: Path, lost: int) -> float:
    """Share of the data columns' bytes that lie on the missing devices."""
    places = sorted(directory.glob("pool/d[0-9]"))
    return share_on(places, [place for place in places if place.name in LOST[lost]], DATA)


def share_on(places: Sequence[Path], some: Sequence[Path], data: int) -> float:
    """Share of the data columns' bytes (k = `data`, below 10) that lie on some devices of all."""
    held = {
        place: sum(
            file.stat().st_size
            for column in range(data)
            for file in place.glob(f"objects/data/**/@*.c0{column}.*")
        )
        for place in places
    }
    total = sum(held.values())
    return sum(held[place] for place in some) / total if total else 0.0


def batches(loader: DataLoader, count: int) -> list[Any]:
    """The next batches of a new iteration."""
    return list(itertools.islice(iter(loader), count))
