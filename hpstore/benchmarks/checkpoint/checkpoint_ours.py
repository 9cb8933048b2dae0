"""hpstore's side of the checkpoint benchmark: a 4+2 pool of six directories, two steps kept."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch

import hpstore
from hpstore.benchmarks.checkpoint.checkpoint_peers import KEPT_STEPS, SaverPeer, Timing
from hpstore.benchmarks.checkpoint.checkpoint_state import State, flat
from hpstore.benchmarks.harness.raw_devices import DATA, PARITY, make_pool
from hpstore.checkpoint import Checkpointer
from hpstore.runtime.buffers import aligned_array
from hpstore.units import GIB, round_up

PREFIX = "bench"
_ALIGNMENT = 4096
PREPARE_SECONDS = 120.0


def make_checkpointer(pool: hpstore.Pool, **options: Any) -> Checkpointer:
    """A Checkpointer on the benchmark's prefix. Any: passed through."""
    return Checkpointer(pool, PREFIX, rng=False, **options)


def open_or_make(directory: Path) -> hpstore.Pool:
    """The pool in a directory."""
    if (directory / "pool.toml").exists():
        return hpstore.open(directory / "pool.toml")
    return make_pool(directory, recycle_bytes=2 * GIB)


PREPARE_SECONDS = 120.0


class HpstoreSaver(SaverPeer):
    """Checkpointer.save and restore."""

    name = "hpstore"
    package = "hpstore"
    syncs_itself = True
    last_step = KEPT_STEPS + 2  # the first into files that retention gave up
    configuration: ClassVar[str] = (
        f"{DATA}+{PARITY} over six directories, keep_last={KEPT_STEPS}, files recycled; those of "
        "the first saves written before them (prewrite=True), which is not in their time"
    )

    @classmethod
    def version(cls) -> str:
        return hpstore.__version__

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def prepare(self, state: State) -> None:
        self.pool = open_or_make(self.directory)
        self.checkpointer = make_checkpointer(self.pool, keep_last=KEPT_STEPS, example=state)
        if not self.checkpointer.saver.wait_prewritten(PREPARE_SECONDS):
            raise RuntimeError(f"files were not prepared within {PREPARE_SECONDS:.0f} s")

    def save(self, state: State, step: int) -> Timing:
        """save() to its return, and to result(), in which retention has deleted an older step."""
        began = time.perf_counter()
        handle = self.checkpointer.save(step, state)
        blocked = time.perf_counter() - began
        handle.result()
        return Timing(blocked_seconds=blocked, durable_seconds=time.perf_counter() - began)

    @property
    def loads(self) -> dict[str, Callable[[State, int], None]]:
        """One: opening the pool belongs to a load in a new process."""

        def load(target: State, step: int) -> None:
            if not hasattr(self, "checkpointer"):
                self.pool = hpstore.open(self.directory / "pool.toml")
                self.checkpointer = make_checkpointer(self.pool, keep_last=KEPT_STEPS)
            self.checkpointer.restore(target, step)

        return {"restore": load}

    def close(self) -> None:
        if hasattr(self, "checkpointer"):
            self.checkpointer.close()
            self.pool.close()
            del self.checkpointer, self.pool

    def lose_devices(self) -> None:
        """Take m directories away that hold data columns of the newest step."""
        held = [
            path
            for path in sorted(self.directory.glob("d[0-9]"))
            if any(path.glob("objects/**/@*.c0[01].*"))
        ]
        sizes = {path: _data_bytes(path) for path in held}
        for path in sorted(held, key=lambda path: -sizes[path])[:PARITY]:
            path.rename(path.with_name(f"gone-{path.name}"))


def _data_bytes(directory: Path) -> int:
    found = directory.glob("objects/**/@*.c0[01].*")
    return max(path.stat().st_size for path in found)


class Copy:
    """One copy of a state into kept, populated, huge-page memory: the least that a save can stall.

    torch's copy_ in a loop, tensors on 4 KiB boundaries; the better of one and two threads.
    """

    def __init__(self, state: State) -> None:
        tensors = list(flat(state).values())
        size = sum(round_up(tensor.nbytes, _ALIGNMENT) for tensor in tensors)
        memory = torch.from_numpy(aligned_array(size, populate=True))
        self._pairs, at = [], 0
        for tensor in tensors:
            place = memory[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            self._pairs.append((place, tensor))
            at += round_up(tensor.nbytes, _ALIGNMENT)

    def seconds(self, rounds: int = 3) -> float:
        """The fastest number of threads, its median; one unmeasured round first."""
        usual, found = torch.get_num_threads(), []
        try:
            for threads in (1, 2):
                torch.set_num_threads(threads)
                self._once()
                found.append(sorted(self._once() for _ in range(rounds))[rounds // 2])
        finally:
            torch.set_num_threads(usual)
        return min(found)

    def _once(self) -> float:
        began = time.perf_counter()
        for place, tensor in self._pairs:
            place.copy_(tensor)
        return time.perf_counter() - began
