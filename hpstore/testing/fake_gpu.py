"""A stand-in for a GPU under the loader: CPU tensors, copies that run late, FakeCuFile below.

It satisfies loaders' `Gpu` by its shape alone; testing lies below loaders.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
import xxhash

from hpstore.codec import ErasureCode, choose_backend
from hpstore.codec.galois import Bytes
from hpstore.errors import ConfigError
from hpstore.format.geometry import Code
from hpstore.testing.fake_direct import FakeCuFile


# Any below: DecodeJobs and Blocks of loaders
class FakeMark:
    """Copies that have not run. They read their sources when they do, as those of a stream do."""

    def __init__(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._pairs = pairs
        self._seconds = 0.0
        self._lock = threading.Lock()  # guards _pairs

    def done(self) -> bool:
        """Whether they have run: only after a caller has waited."""
        with self._lock:
            return not self._pairs

    def wait_on_host(self) -> None:
        """Run them, unless they have."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
            began = time.perf_counter()
            for target, source in pairs:
                target.copy_(source)
            self._seconds += time.perf_counter() - began

    def seconds(self) -> float:
        """Of the copies; 0 before they have run."""
        return self._seconds

    def order(self, tensors: Iterable[torch.Tensor]) -> None:
        """Run them: what the caller does next is later work of the stream."""
        self.wait_on_host()
        list(tensors)


class FakeFence(FakeMark):
    """A place in the user's stream: `run` runs what comes before it."""

    def __init__(self, run: Callable[[], object]) -> None:
        super().__init__([])
        self.run = run


class FakeGpu:
    """`driver_of_all` is what direct reads go through. `obstacles`: by directory, "" for all.

    A copy runs when its mark is waited for or ordered, so that memory that is used again too early
    shows. `decoded`, `verified`: how many units and blocks were. `pinned`: bytes by address.
    """

    device = torch.device("cpu")

    def __init__(
        self,
        driver: FakeCuFile | None = None,
        *,
        obstacles: dict[str, str] | None = None,
        kernels: bool = True,
    ) -> None:
        self.driver_of_all = FakeCuFile() if driver is None else driver
        self.pinned: dict[int, int] = {}
        self.asked: list[str] = []
        self.begun_by: list[threading.Thread] = []
        self.decoded = self.verified = 0
        self._obstacles = {} if obstacles is None else obstacles
        self._kernels = kernels
        self._pending = threading.local()
        self._stream, self._ran = list[Callable[[], object]](), 0  # the user's
        self.allocated_bytes = 0
        # guards the counters and `pinned`; the collector may unpin on a thread that holds it
        self._lock = threading.RLock()
        self._code = ErasureCode(choose_backend())

    def begin(self) -> None:
        """Notes the thread."""
        self.begun_by.append(threading.current_thread())

    def pin(self, memory: Bytes) -> None:
        """Like CUDA, refuses what overlaps memory that is locked, be that there any more or not."""
        first, size = memory.ctypes.data, memory.nbytes
        with self._lock:
            for other, nbytes in list(self.pinned.items()):
                if first < other + nbytes and other < first + size:
                    raise ConfigError(f"{size} bytes at {first:#x} are page-locked already")
            self.pinned[first] = size

    def unpin(self, address: int) -> None:
        """Only what is page-locked."""
        with self._lock:
            del self.pinned[address]

    def side(self) -> AbstractContextManager[object]:
        """Every thread has a side stream of its own."""
        self._pending.pairs = []
        return nullcontext()

    def upload(self, tensor: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        """New memory, filled when the mark behind it is waited for."""
        made = torch.full_like(tensor, 1) if into is None else into
        self._pending.pairs.append((made, tensor))
        return made

    def is_there(self, tensor: torch.Tensor) -> bool:
        """Return False: tensors of this GPU cannot be distinguished from other tensors."""
        return False

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Of the CPU."""
        with self._lock:
            self.allocated_bytes += nbytes
        return torch.empty(nbytes, dtype=torch.uint8)

    def lend(self, memory: torch.Tensor, gone: Callable[[], object]) -> torch.Tensor:
        """By way of an array, which the storage holds."""
        array = memory.numpy()[:]
        weakref.finalize(array, gone).atexit = False
        return torch.from_numpy(array)

    def enqueue(self, kernel: Callable[[], object]) -> None:
        """Queue a kernel of a user's step on the user's stream; it runs when a caller waits."""
        self._stream.append(kernel)

    def run(self, count: int | None = None) -> None:
        """Run the first `count` of all that were enqueued so far, or all, unless they have."""
        while self._ran < (len(self._stream) if count is None else count):
            self._ran += 1
            self._stream[self._ran - 1]()

    def fence(self) -> FakeFence:
        """Behind what was enqueued until now."""
        return FakeFence(partial(self.run, len(self._stream)))

    def behind(self, fence: Any) -> None:
        """Runs what comes before the fence: the copies that follow run later."""
        fence.run()

    def start(self) -> object:
        """Return None: copies measure their time themselves."""
        return None

    def mark(self, started: object = None) -> FakeMark:
        """Behind all uploads of this thread since side()."""
        pairs, self._pending.pairs = self._pending.pairs, []
        return FakeMark(pairs)

    def obstacle(self, directory: str) -> str | None:
        """What was given for the directory, or for all."""
        self.asked.append(directory)
        return self._obstacles.get(directory, self._obstacles.get(""))

    def driver(self) -> FakeCuFile:
        """The one that was given."""
        return self.driver_of_all

    def decode(self, memory: torch.Tensor, jobs: Any) -> None:
        """By the codec of the host."""
        self._need_kernels()
        jobs.check(memory.numel())
        held = memory.numpy()
        for sources, targets in zip(jobs.sources.tolist(), jobs.targets.tolist(), strict=True):
            self._code.reconstruct(
                Code.RS_CAUCHY,
                jobs.data,
                jobs.parity,
                jobs.have,
                jobs.want,
                [held[at : at + jobs.length] for at in sources],
                [held[at : at + jobs.length] for at in targets],
            )
        with self._lock:
            self.decoded += jobs.targets.size

    def verify(self, memory: torch.Tensor, blocks: Any) -> torch.Tensor:
        """By xxhash."""
        self._need_kernels()
        blocks.check(memory.numel())
        held = memory.numpy()
        rows = zip(blocks.starts, blocks.lengths, blocks.seeds, blocks.expected, strict=True)
        good = [
            xxhash.xxh3_64_intdigest(held[at : at + length].data, int(seed)) == int(wanted)
            for at, length, seed, wanted in rows
        ]
        with self._lock:
            self.verified += len(good)
        return torch.from_numpy(np.array(good, bool))

    def _need_kernels(self) -> None:
        if not self._kernels:
            raise RuntimeError("the fake GPU was told to have no kernels")
