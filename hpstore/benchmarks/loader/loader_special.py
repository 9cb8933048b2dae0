"""Figures of hpstore's loader alone: first batches, the epoch boundary, a batch that is ready, a
state, memory over many epochs, what a kill leaves behind.
"""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from hpstore.benchmarks.harness.memory_use import resident_bytes
from hpstore.benchmarks.harness.sessions import Found, Sections
from hpstore.benchmarks.loader import loader_limits as limits
from hpstore.benchmarks.loader.loader_contenders import kind_of
from hpstore.benchmarks.loader.loader_data import BATCH, Data
from hpstore.benchmarks.loader.loader_ours import OURS, HpstoreLoader
from hpstore.benchmarks.loader.loader_sessions import LoaderSpec
from hpstore.loaders import DataLoader
from hpstore.units import MIB

MODES = tuple(kind.name for kind in OURS)
PROCESSES = 3  # in which SEVERAL are measured: one that the machine holds up decides nothing
SEVERAL = ("first batch", "epoch boundary")
BOUNDARIES, READY, EPOCHS, WARM_EPOCHS = 5, 50, 50, 10
MANY, STATES = 1_000_000_000, 20
GROWTH_BATCHES = 12
_PAUSE_SECONDS = 0.02  # between batches that are taken when they are ready


def _ours(spec: LoaderSpec, mode: str) -> HpstoreLoader:
    kind = kind_of(mode)
    made = kind(spec.directory / kind.store, spec.data, spec.device)
    assert isinstance(made, HpstoreLoader)
    return made


def _first(loader: DataLoader) -> float:
    """Seconds from iter() to the first batch; the loader is closed."""
    began = time.perf_counter()
    next(iter(loader))
    taken = time.perf_counter() - began
    loader.close()
    return taken


def first_session(sections: Sections, spec: LoaderSpec) -> Found:
    """Seconds to the first batch, construction included, by mode and position; caches dropped.

    Dropping caches drops what no process has mapped, so also the code of unused libraries: the
    process has made a tensor before."""
    torch.from_numpy(np.zeros(1))  # who trains has used torch: its pages stay when caches go
    found: Found = {}
    for mode in MODES:
        rows: dict[str, list[float]] = {}
        for name, share in (("start", 0.0), ("half", 0.5), ("99 %", 0.99)):
            who = _ours(spec, mode)
            limits.drop_caches(who.directory, spec.data.nbytes)
            sections.warm(512 * MIB)
            began = time.perf_counter()
            who.open()
            rows[f"{name}: open"] = [time.perf_counter() - began]
            began = time.perf_counter()
            loader = who.make()
            if share:
                at = int(spec.data.rows * share) // BATCH * BATCH
                loader.load_state_dict(loader.state_dict() | {"samples": at})
            made = time.perf_counter() - began
            rows[name] = [made + _first(loader)]
            who.close()
            gc.collect()
        found[mode] = rows
    return found


def joined(sessions: Sequence[Found]) -> Found:
    """Figures of several sessions: all of each mode and position."""
    return {
        mode: {name: [s for one in sessions for s in one[mode][name]] for name in sessions[0][mode]}
        for mode in sessions[0]
    }


def boundary_session(sections: Sections, spec: LoaderSpec) -> Found:
    """Gaps between the last batch of an epoch and the first of the next, in batch times."""
    found: Found = {}
    for mode in MODES:
        sections.warm(2 * spec.data.nbytes)
        who, gaps, usual = _ours(spec, mode), [], 0.0
        loader, last = who.make(), 0.0
        for epoch in range(BOUNDARIES + 1):
            began = 0.0
            batches = 0
            for _ in loader:
                now = time.perf_counter()
                if not began:
                    began = now
                    if last:
                        gaps.append(now - last)
                batches, last = batches + 1, now
            if epoch:
                usual = (last - began) / max(1, batches - 1)
        loader.close()
        who.close()
        found[mode] = {"gaps_in_batches": [gap / max(usual, 1e-9) for gap in gaps]}
    return found


def ready_session(sections: Sections, spec: LoaderSpec) -> Found:
    """Seconds of next() when the batch has been there for a while; the one before is still held."""
    found: Found = {}
    for mode in MODES:
        sections.warm(spec.data.nbytes)
        who, times = _ours(spec, mode), []
        loader = who.make()
        batches: Any = iter(loader)
        fresh: Any = next(batches)
        batch: Any = fresh
        for _ in range(min(READY, spec.data.rows // BATCH - 2)):
            time.sleep(_PAUSE_SECONDS)
            while not batches.ready:
                time.sleep(_PAUSE_SECONDS)
            began = time.perf_counter()
            fresh = next(batches)
            times.append(time.perf_counter() - began)
            batch = fresh
        del batch, fresh
        loader.close()
        who.close()
        found[mode] = {"seconds": times}
    return found


class _Many(torch.utils.data.Dataset[int]):
    """As many samples as no test machine holds; each is its number."""

    def __len__(self) -> int:
        return MANY

    def __getitem__(self, index: int) -> int:
        return index


def state_session(sections: Sections, spec: LoaderSpec) -> Found:
    """Seconds of state_dict() in mid-epoch, at 1e9 samples and over the dataset; the first too."""
    who = _ours(spec, MODES[0])
    found: Found = {}
    many = DataLoader(_Many(), BATCH, shuffle=True)
    loaders = {f"{MANY:.0e} samples": many, MODES[0]: who.make()}
    for name, loader in loaders.items():
        times: list[float] = []
        for _ in itertools.islice(loader, STATES):
            began = time.perf_counter()
            loader.state_dict()
            times.append(time.perf_counter() - began)
        loader.close()
        found[name] = {"seconds": times}
    who.close()
    return found


def growth_session(sections: Sections, spec: LoaderSpec) -> Found:
    """Resident bytes gained between the tenth and the last epoch of a small set, by mode; the most
    beyond those of the process before its first loader, and what the loader says that it may take.
    """
    share = GROWTH_BATCHES * BATCH / spec.data.rows
    small = Data(spec.data.kind, int(spec.data.size_bytes * share))
    directory = spec.directory / "growth"
    if not directory.exists():
        (directory / "pool").mkdir(parents=True)
        _ours(replace(spec, directory=directory, data=small), MODES[0]).write()
    gc.collect()
    before = resident_bytes()
    found: Found = {}
    for mode in MODES:
        who = _ours(replace(spec, directory=directory, data=small), mode)
        loader = who.make()
        sizes: list[int] = []
        for _ in range(EPOCHS):
            for _ in loader:
                pass
            gc.collect()
            sizes.append(resident_bytes())
        loader.close()
        who.close()
        found[mode] = {
            "growth_bytes": sizes[-1] - sizes[min(WARM_EPOCHS, len(sizes) - 1)],
            "taken_bytes": max(sizes) - before,
            "budget_bytes": small.nbytes + int(loader.memory.prefetch_bytes),
        }
    return found


def read_for_ever(spec: LoaderSpec, told: Connection) -> None:
    """Read without end, in a process that the parent kills; send a message for each batch."""
    loader = _ours(spec, MODES[0]).make()
    while True:
        for _ in loader:
            told.send(True)


def kill_session(sections: Sections, spec: LoaderSpec) -> Found:
    """Names in shared memory after a SIGKILL in mid-epoch that were not there before."""
    before = set(os.listdir("/dev/shm"))
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=read_for_ever, args=(spec, theirs))
    child.start()
    theirs.close()
    try:
        for _ in range(3):
            ours.recv()
    except EOFError:
        return {"skipped": "the process that was to be killed ended by itself"}
    finally:
        child.kill()
        child.join()
    return {"left": sorted(set(os.listdir("/dev/shm")) - before)}


SPECIAL = {
    "first batch": first_session,
    "epoch boundary": boundary_session,
    "ready batch": ready_session,
    "state": state_session,
    "growth": growth_session,
    "kill": kill_session,
}
