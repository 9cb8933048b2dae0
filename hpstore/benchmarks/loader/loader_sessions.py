"""What one repetition of one loader does in a process of its own: write its store, or read epochs.

An epoch is timed from the call that makes the loader, or its iterator where there is one already,
to the last batch in the consumer's hands. The consumer takes batches as fast as they come, adds up
their labels and checks every 64th of them byte by byte; an epoch that has not every sample once is
an error, not a figure.
"""

from __future__ import annotations

import gc
import multiprocessing
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hpstore.benchmarks.harness.memory_use import resident_bytes
from hpstore.benchmarks.harness.sessions import Found, Sections
from hpstore.benchmarks.loader import loader_limits as limits
from hpstore.benchmarks.loader.loader_contenders import kind_of
from hpstore.benchmarks.loader.loader_data import Batch, Data
from hpstore.benchmarks.loader.loader_ours import HpstoreLoader, OursKept
from hpstore.benchmarks.loader.loader_peers import LoaderPeer, Memmap
from hpstore.benchmarks.loader.loader_raw import Raw
from hpstore.units import MIB

_CHECKED = 64  # one batch of so many is looked at
WARM_SECONDS, WARM_EPOCHS = 1.0, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderSpec:
    """What a session is to do."""

    contender: str
    directory: Path  # with the stores in it
    data: Data
    device: str = "cpu"
    cold: bool = True
    lost: int = 0  # devices that hpstore lacks
    group: Path | None = None  # the control group that limits it
    epoch_seconds: float = 60.0  # an epoch that takes longer is cut

    def peer(self) -> LoaderPeer:
        """The contender."""
        multiprocessing.set_start_method("fork", force=True)  # a session's own is the fork server
        kind = kind_of(self.contender)
        made = kind(self.directory / kind.store, self.data, self.device)
        if isinstance(made, HpstoreLoader):
            made.lost = self.lost
        return made


def write_session(sections: Sections, spec: LoaderSpec) -> Found:
    """The store of a contender."""
    who = spec.peer()
    who.directory.mkdir()
    began = time.perf_counter()
    who.write()
    return {"seconds": time.perf_counter() - began}


def epoch_session(sections: Sections, spec: LoaderSpec) -> Found:
    """Cold: one epoch, nothing in the page cache. Warm: the second epoch of a process whose first
    found all files in the page cache, and more (warm_epochs); hpstore has its pages in memory
    before the second begins.
    """
    who = spec.peer()
    room = min(2 * spec.data.nbytes, limits.LIMIT_BYTES if spec.group is not None else 1 << 62)
    gc.collect()  # of what was imported: it takes 0.2 s, at any moment of a first epoch
    if spec.cold:
        problem = limits.drop_caches(who.directory, spec.data.nbytes)
        sections.warm(room)
        limits.enter(spec.group)
        found = timed_epoch(who, 0, spec)
        found["problem"] = problem
    else:
        sections.warm(room)
        if not isinstance(who, HpstoreLoader):  # which reads past the page cache
            limits.read_all(who.directory)
        first = timed_epoch(who, 0, spec)
        settled = who.in_memory() if isinstance(who, HpstoreLoader) else 0.0
        gc.collect()
        sections.warm(room // 2)
        found = warm_epochs(who, spec)
        found["first_epoch"], found["settle_seconds"] = first, settled
    if isinstance(who, HpstoreLoader):
        found["stats"] = who.stats()
    found["memory_bytes"] = resident_bytes()
    who.close()
    return found


def new_process_session(sections: Sections, spec: LoaderSpec) -> Found:
    """The first epoch of a process whose data are in the node's memory, and what it read."""
    who = spec.peer()
    assert isinstance(who, OursKept)
    gc.collect()
    sections.warm(spec.data.nbytes // 2)
    found = timed_epoch(who, 0, spec)
    found["stats"] = who.stats()
    found["memory_bytes"] = resident_bytes()
    who.close()
    return found


def free_session(_: Sections, spec: LoaderSpec) -> Found:
    """The node's memory is as it was before."""
    who = spec.peer()
    assert isinstance(who, OursKept)
    who.free()
    return {}


def warm_epochs(who: LoaderPeer, spec: LoaderSpec) -> Found:
    """Whole epochs from the second on until they took WARM_SECONDS, WARM_EPOCHS at most, as one
    figure: all their samples over all their seconds. One alone may take 0.14 s, which a machine
    that is held up for as long makes half as fast.
    """
    each = [timed_epoch(who, 1, spec)]
    while (
        len(each) < WARM_EPOCHS
        and not each[-1]["cut"]
        and sum(one["seconds"] for one in each) < WARM_SECONDS
    ):
        each.append(timed_epoch(who, 1 + len(each), spec))
    seconds = [one["seconds"] for one in each]
    together = {
        key: statistics.fmean([one[key] for one in each], seconds)
        for key in ("rate", "steady_rate")
    }
    return (
        each[0]
        | together
        | {
            "main_us": statistics.fmean(one["main_us"] for one in each),
            "seconds": sum(seconds),
            "cut": each[-1]["cut"],
            "epochs": len(each),
            "second_epoch_rate": each[0]["rate"],
        }
    )


def timed_epoch(who: LoaderPeer, number: int, spec: LoaderSpec) -> Found:
    """Seconds of an epoch, to its first batch, and of this thread's own computing."""
    away = spec.device != "cpu" and not isinstance(who, HpstoreLoader)
    rows = labels = batches = 0
    computing = -time.thread_time()
    began = time.perf_counter()
    first = now = began
    found: Iterator[Batch] = who.epoch(number)
    checking = 0.0
    for values, marks in found:
        if away:
            values = moved(values, spec.device)
        now = time.perf_counter()
        if not batches:
            first = now
        rows += len(marks)
        labels += int(marks.sum())
        if not batches % _CHECKED:
            computing += time.thread_time()
            spec.data.check((values, marks), who.name)
            computing -= time.thread_time()
            checking += time.perf_counter() - now
        batches += 1
        if now - began > spec.epoch_seconds:
            break
    if spec.device != "cpu":
        torch.cuda.synchronize(spec.device)
    ended = time.perf_counter()
    computing += time.thread_time()
    whole = rows == spec.data.rows and labels == rows * (rows - 1) // 2
    cut = now - began > spec.epoch_seconds
    if not (whole or cut):
        raise RuntimeError(
            f"{who.name}: an epoch of {rows} samples, not {spec.data.rows} once each"
        )
    taken = max(ended - began - checking, 1e-9)
    return {
        "rate": rows / taken,
        "steady_rate": rows / max(ended - first - checking, 1e-9),
        "first_seconds": first - began,
        "seconds": taken,
        "batches": batches,
        "cut": cut,
        "main_us": computing / max(rows, 1) * 1e6,
    }


def raw_session(sections: Sections, spec: LoaderSpec) -> Found:
    """What the device gives without any loader, in samples per second."""
    raw = Raw(spec.directory / Memmap.store / "flat", spec.data)
    raw.write()
    limits.drop_caches(spec.directory / Memmap.store, spec.data.nbytes)
    sections.warm(64 * MIB)
    sequential, threads = raw.sequential(), raw.random()
    reads, why = raw.fio()
    mean = spec.data.nbytes / spec.data.rows
    return {
        "sequential_bytes": sequential,
        "sequential_rows": sequential / mean,
        "sequential_rows_by": "direct reads of 4 MiB in order, 8 threads",
        "random_reads": reads if reads is not None else threads,
        "random_reads_by": "fio io_uring, depth 32" if reads is not None else why,
        "random_reads_32_threads": threads,
        "batch_copy_rows": raw.copy(),
    }


# Any: values of a batch
def moved(values: Any, device: str) -> Any:
    """On the device, as a training loop does it."""
    if isinstance(values, torch.Tensor):
        return values.to(device, non_blocking=True)
    return [value.to(device, non_blocking=True) for value in values]
