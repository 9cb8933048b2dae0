"""A stand-in for cuFile on CPU memory: the same calls, faults on demand, and an eye on misuse.

It satisfies loaders' `DirectDriver` by its shape alone; testing lies below loaders.
"""

from __future__ import annotations

import os
import threading

import numpy as np
import torch

from hpstore.codec.galois import Bytes
from hpstore.errors import DirectUnavailable
from hpstore.runtime.buffers import HUGE_BYTES, aligned_array
from hpstore.units import KIB

FREED_BYTE = 0xDD  # what freed memory is overwritten with
DEVICE_NOT_SUPPORTED = -5007


class FakeCuFile:
    """GPU memory is CPU memory; reads are plain ones, unless `plan` has something for them.

    `plan`: one letter for each read, then none: "." goes well, "S" reads one page less, "E" gives
    a negative code back, "H" hangs until `release` is set. `route`: what the counters call good
    reads; "" for a library that does not count. `misuse` lists what would be a bug of the caller:
    two reads into one range, memory or files let go under a read, unregistered handles.
    """

    kind = "fake"
    open_flags = 0

    def __init__(self, plan: str = "", *, route: str = "p2p", refuse: str = "") -> None:
        self.release = threading.Event()
        self.hanging = threading.Event()  # a read hangs now
        self.misuse: list[str] = []
        self.opened = False
        self.reads = 0
        self._plan, self._route, self._refuse = plan, route, refuse
        self._files: dict[int, int] = {}  # handle -> descriptor
        self._memory: dict[int, tuple[Bytes, Bytes]] = {}  # address -> (its bytes, the whole map)
        self._busy: list[tuple[int, int, int]] = []  # (handle, first byte, last) of running reads
        self._counts = {"p2p": 0, "nvfs": 0, "posix": 0, "errors": 0}
        self._lock = threading.Lock()  # guards all of them

    def open(self) -> None:
        if self._refuse == "open":
            raise DirectUnavailable("the fake driver was told not to open")
        self.opened = True

    def close(self) -> None:
        with self._lock:
            if self._files or self._memory or self._busy or not self.opened:
                self.misuse.append("closed while files or memory are registered")
            self.opened = False

    def enter_thread(self) -> None:
        """Nothing: CPU memory needs no context."""

    def register_file(self, fd: int) -> int:
        if self._refuse == "file":
            raise DirectUnavailable("the fake driver was told not to take a file")
        with self._lock:
            handle = 1000 + max(self._files, default=0)
            self._files[handle] = fd
            return handle

    def release_file(self, handle: int) -> None:
        with self._lock:
            if any(user == handle for user, _, _ in self._busy):
                self.misuse.append("a file was released under a read")
            del self._files[handle]

    def allocate(self, nbytes: int) -> int:
        if self._refuse == "memory":
            raise DirectUnavailable("the fake driver was told to have no memory")
        if nbytes % HUGE_BYTES:
            self.misuse.append(f"{nbytes} bytes are no whole pages of a GPU")
        whole = aligned_array(nbytes + HUGE_BYTES)
        start = -whole.ctypes.data % HUGE_BYTES
        memory = whole[start : start + nbytes]
        with self._lock:
            self._memory[memory.ctypes.data] = (memory, whole)
        return int(memory.ctypes.data)

    def free(self, address: int, nbytes: int) -> None:
        with self._lock:
            memory, _ = self._memory.pop(address)
            if len(memory) != nbytes:
                self.misuse.append(f"{nbytes} bytes freed of {len(memory)}")
            if any(first < address + nbytes and last >= address for _, first, last in self._busy):
                self.misuse.append("memory was freed under a read")
            memory[:] = FREED_BYTE

    def view(self, address: int, nbytes: int) -> torch.Tensor:
        return torch.from_numpy(self._memory[address][0][:nbytes])

    def read(self, handle: int, file_offset: int, length: int, address: int, offset: int) -> int:
        letter = self._begin(handle, address + offset, length)
        try:
            if letter == "H":
                self.hanging.set()
                self.release.wait()
            if letter == "E":
                return DEVICE_NOT_SUPPORTED
            wanted = length - 4 * KIB if letter == "S" else length
            return self._copy(handle, file_offset, wanted, address, offset)
        finally:
            self._end(handle, address + offset, length, failed=letter == "E")

    def _begin(self, handle: int, first: int, length: int) -> str:
        with self._lock:
            last = first + length - 1
            if any(a <= last and b >= first for _, a, b in self._busy):
                self.misuse.append("two reads into one range")
            if handle not in self._files:
                self.misuse.append("read of a file that is not registered")
            self._busy.append((handle, first, last))
            number, self.reads = self.reads, self.reads + 1
            return self._plan[number] if number < len(self._plan) else "."

    def _end(self, handle: int, first: int, length: int, *, failed: bool) -> None:
        with self._lock:
            self._busy.remove((handle, first, first + length - 1))
            name = "errors" if failed else self._route
            if name:
                self._counts[name] += 1

    def _copy(self, handle: int, file_offset: int, length: int, address: int, offset: int) -> int:
        target = self._memory[address][0][offset : offset + length]
        if not len(target):
            return 0
        landed = np.empty(length, np.uint8)
        count = os.preadv(self._files[handle], [landed.data], file_offset)
        target[:count] = landed[:count]
        return count

    def describe(self, code: int) -> str:
        return "device not supported" if code == DEVICE_NOT_SUPPORTED else "unknown"

    def counters(self) -> dict[str, int] | None:
        with self._lock:
            return dict(self._counts) if self._route else None
