"""Figures of the loader that are in no report: a script, run by itself, never imported.

Usage, in an empty directory: `python loader_by_hand.py processes` (docs/decisions/0049: functions
in two threads and in two processes, by turns), `python loader_by_hand.py growth [MODE...]`
(docs/data.md: the session "growth" of large records, all modes in one process or those that are
named; the log shows which devices sit out), or `python loader_by_hand.py copies KIND BATCH_SIZE...`
(docs/decisions/0052: data in memory, A or B, copied past the cache and through it, by turns; 5 GB
of disk and of memory). It prints JSON, one line per figure.
"""

from __future__ import annotations

import functools
import json
import logging
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import hpstore
from hpstore.benchmarks.loader import loader_special
from hpstore.benchmarks.loader.loader_data import Data
from hpstore.benchmarks.loader.loader_ours import HpstoreLoader
from hpstore.benchmarks.loader.loader_sessions import LoaderSpec
from hpstore.loaders import DataLoader, Dataset, DatasetWriter, Field
from hpstore.loaders.batching import streaming_copy
from hpstore.loaders.dataset.batch_values import Ragged
from hpstore.units import GIB, MIB

SIZE_BYTES = 200_000 * 12_288
BATCH, BATCHES, EPOCHS, TURNS, COPY_TURNS = 256, 100, 4, 3, 10


# Any below: a sample or a batch is the user's
def in_python(sample: dict[str, Any]) -> dict[str, Any]:
    """5,000 additions, which hold the GIL."""
    return {**sample, "sum": torch.tensor(sum(range(5000)))}


def next_to_nothing(batch: dict[str, Any]) -> dict[str, Any]:
    """One addition by torch."""
    return {**batch, "more": batch["label"] + 1}


def say(found: dict[str, Any]) -> None:
    """A line, at once."""
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


def processes(directory: Path) -> None:
    """Return samples per second, medians of four epochs."""
    devices = [directory / f"d{number}" for number in range(6)]
    rng = np.random.default_rng(0)
    fields = {"image": Field("uint8", (12_288,)), "label": Field("int64")}
    with hpstore.create(devices, data=4, parity=2, config=directory / "pool.toml") as pool:
        with DatasetWriter(pool, "a", fields) as writer:
            for _ in range(BATCHES):
                images = rng.integers(0, 256, (BATCH, 12_288), np.uint8)
                writer.write_batch({"image": images, "label": np.arange(BATCH)})
        for given in ({"transform": in_python}, {"batch_transform": next_to_nothing}):
            for _ in range(TURNS):
                for context in (None, "fork"):
                    found = rate(Dataset(pool, "a"), context, given)
                    said = {"function": next(iter(given)), "processes": context, "rate": found}
                    say(said)


def rate(data: Dataset, context: str | None, given: dict[str, Any]) -> int:
    """Of the epochs after the first."""
    loader = DataLoader(
        data, BATCH, shuffle=True, num_workers=2, multiprocessing_context=context, **given
    )
    rates = []
    for _ in range(EPOCHS + 1):
        began = time.perf_counter()
        samples = sum(len(batch["label"]) for batch in loader)
        rates.append(samples / (time.perf_counter() - began))
    loader.close()
    return round(statistics.median(rates[1:]))


class NoSections:
    """Nothing is measured around them."""

    def warm(self, nbytes: int) -> None:
        """Not needed: memory is the figure."""


def growth(directory: Path, modes: Sequence[str]) -> None:
    """Bytes by mode."""
    logging.basicConfig(level=logging.INFO)
    loader_special.MODES = tuple(modes or loader_special.MODES)
    spec = LoaderSpec(contender="hpstore", directory=directory, data=Data("B", SIZE_BYTES))
    sections: Any = NoSections()
    for mode, row in loader_special.growth_session(sections, spec).items():
        say({"mode": mode, **row})


def copies(directory: Path, kind: str, batch_sizes: Sequence[int]) -> None:
    """Return samples per second, medians of whole epochs.

    Batches are taken, or taken and copied on.
    """
    data = Data(kind, SIZE_BYTES)
    if not (directory / "pool").exists():
        (directory / "pool").mkdir()
        HpstoreLoader(directory / "pool", data).write()
    records = HpstoreLoader(directory / "pool", data).open()
    sink = torch.zeros(256 * MIB, dtype=torch.uint8)
    streaming_copy.LARGE_BYTES = 0
    for size in batch_sizes:
        loader = DataLoader(records, size, shuffle=True, cache=6 * GIB)
        for _ in loader:
            pass
        for onto in (None, sink):
            rates: dict[str, list[float]] = {"past": [], "through": []}
            for _ in range(COPY_TURNS):
                for way, found in rates.items():
                    found.append(copied(loader, way == "past", onto))
            pairs = [past / other for past, other in zip(*rates.values(), strict=True)]
            medians = {way: round(statistics.median(found)) for way, found in rates.items()}
            batch_bytes = data.nbytes * size // data.rows
            said = {"batch_bytes": batch_bytes, "copied_on": onto is not None, **medians}
            say({**said, "ratio": round(statistics.median(pairs), 2)})
        loader.close()


def copied(loader: DataLoader, past: bool, onto: torch.Tensor | None) -> float:
    """Return samples per second of an epoch."""
    installed = streaming_copy._installed
    if not past:
        streaming_copy._installed = functools.cache(lambda: None)
    began, samples = time.perf_counter(), 0
    try:
        for batch in loader:
            samples += len(batch["label"])
            if onto is not None:
                value = batch["value"]
                flat = (value.values if isinstance(value, Ragged) else value).reshape(-1)
                onto[: len(flat)].copy_(flat)
    finally:
        streaming_copy._installed = installed
    return samples / (time.perf_counter() - began)


if __name__ == "__main__":
    here = Path.cwd()
    if sys.argv[1] == "processes":
        processes(here)
    elif sys.argv[1] == "copies":
        copies(here, sys.argv[2], [int(size) for size in sys.argv[3:]])
    else:
        growth(here, sys.argv[2:])
