"""Page-aligned buffers that are kept and reused: fresh memory costs 2-10 times a warm copy."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import logging
import mmap
import os
import threading
import weakref
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np

from hpstore.codec.galois import Bytes
from hpstore.errors import HpstoreError
from hpstore.runtime.budget import ByteBudget
from hpstore.units import MIB, round_up

_log = logging.getLogger(__name__)
HUGE_BYTES = 2 * MIB
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14; not in Python's mmap module yet
# by address: mmap.madvise holds the interpreter's lock while pages are cleared
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def aligned_array(nbytes: int, *, populate: bool = False) -> Bytes:
    """Anonymous memory as (nbytes,) uint8, page-aligned, huge pages where they are given.

    Freed when the last view of it goes. With `populate` every page is touched now, so that no
    later copy pays for page faults.
    """
    length = round_up(max(nbytes, 1), HUGE_BYTES if nbytes >= HUGE_BYTES else mmap.PAGESIZE)
    memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    array = _array_in(memory, nbytes)
    if populate:
        touch(array)
    return array


def shared_array(nbytes: int) -> tuple[Bytes, int]:
    """As aligned_array(), populated, of memory that other processes can map by the descriptor.

    The descriptor is the caller's to close; the memory is freed when nothing maps it any more.
    """
    length = round_up(max(nbytes, 1), mmap.PAGESIZE)
    descriptor = os.memfd_create("hpstore-staging", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, length)
        memory = mmap.mmap(descriptor, length, flags=mmap.MAP_SHARED)
    except BaseException:
        os.close(descriptor)
        raise
    array = _array_in(memory, nbytes)
    touch(array)
    return array, descriptor


def _array_in(memory: mmap.mmap, nbytes: int) -> Bytes:
    """The first bytes of mapped memory, in huge pages where there are enough of them."""
    if nbytes >= HUGE_BYTES:
        with contextlib.suppress(OSError):  # a kernel without huge pages: 4 KiB ones then
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8, nbytes) if nbytes else np.empty(0, np.uint8)


def touch(array: Bytes) -> None:
    """Every page of fresh anonymous memory (n,) is there afterwards: no read or copy faults.

    What is in it may be lost. Other threads run meanwhile: 1.5 GiB takes 0.2 s and more.
    """
    if not len(array):
        return
    start = array.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    length = round_up(array.ctypes.data + len(array) - start, mmap.PAGESIZE)
    if _madvise(start, length, _POPULATE_WRITE):  # an older kernel: one byte a page instead
        array[:: mmap.PAGESIZE] = 0
        array[-1] = 0


def advise_huge(address: int, nbytes: int) -> None:
    """Let anonymous memory have huge pages where they are given, as far as whole ones are in it."""
    start, end = round_up(address, HUGE_BYTES), (address + nbytes) // HUGE_BYTES * HUGE_BYTES
    if end > start:
        _madvise(start, end - start, mmap.MADV_HUGEPAGE)  # a kernel without them: 4 KiB ones


class PageLocks(Protocol):
    """What page-locks memory for a GPU."""

    def pin(self, memory: Bytes) -> None:
        """Page-lock memory until unpin(), which must come before it is freed."""

    def unpin(self, address: int) -> None:
        """Undo pin() of the memory that begins there."""


def lock_for_life(locks: PageLocks, memory: Bytes) -> weakref.finalize[..., Any]:
    """Page-lock (n,) uint8 until the last view of it has gone, which is before it is freed.

    `memory` must be what its views refer to, as aligned_array() makes it. To undo it sooner, call
    what is returned. Raises what pin() raises; what unpin() raises is logged.
    """
    locks.pin(memory)
    # not into a deque, as slots come back: memory that is unmapped under a lock would be copied
    # from pages that are no longer there (docs/decisions/0045)
    end = weakref.finalize(memory, _unlock, locks, memory.ctypes.data, memory.nbytes, os.getpid())
    end.atexit = False  # the process takes its locks along
    return end


def _unlock(locks: PageLocks, address: int, nbytes: int, pid: int) -> None:
    if os.getpid() != pid:  # a forked child: CUDA does not live there
        return
    try:
        locks.unpin(address)
    except (RuntimeError, HpstoreError) as error:
        _log.warning("%d bytes of memory stay page-locked: %s", nbytes, error)


class Lease:
    """A buffer on loan from a BufferPool: `array` is (nbytes,) uint8, page-aligned.

    It belongs to the holder until release(). One that an abandoned call may still use is released
    when that has answered, and its bytes stay charged until then (PROTOCOL 21): release_after().
    """

    __slots__ = ("_pool", "array", "keep", "nbytes")

    def __init__(self, pool: BufferPool, array: Bytes, nbytes: int, *, keep: bool) -> None:
        self._pool = pool
        self.keep = keep
        self.array = array
        self.nbytes = nbytes

    def release(self) -> None:
        """Give the buffer back. Idempotent."""
        pool, self._pool = self._pool, None  # type: ignore[assignment]  # marks it as returned
        if pool is not None:
            pool._take_back(self)


def release_after(lease: Lease, calls: Iterable[Future[Any]]) -> None:
    """Release a lease when the last call has answered that reads into it or writes out of it
    (PROTOCOL 21)."""
    late = [call for call in calls if not call.done()]
    if not late:
        lease.release()
    arrivals = itertools.count(1)  # next() is atomic

    def arrived(_: Future[None]) -> None:
        if next(arrivals) == len(late):
            lease.release()

    for call in late:
        call.add_done_callback(arrived)


class BufferPool:
    """Leases of aligned memory under one byte budget. Thread-safe."""

    def __init__(self, budget: ByteBudget) -> None:
        self.budget = budget
        self._free: defaultdict[int, list[Bytes]] = defaultdict(list)
        self._kept_bytes = 0
        self._lock = threading.Lock()  # guards _free and _kept_bytes

    @property
    def kept_bytes(self) -> int:
        """Of buffers that nobody has, kept for the next ones of their sizes."""
        return self._kept_bytes

    def lease(
        self,
        nbytes: int,
        timeout_seconds: float | None = None,
        *,
        keep: bool = True,
        spare: int = 0,
    ) -> Lease:
        """A buffer of at least `nbytes`; contents are undefined. Raises BudgetExceeded.

        Not `keep`: what is rare and of any size. Its memory goes with it, unless it was there.
        `spare` as of ByteBudget.acquire.
        """
        size = self._size_class(nbytes)
        self.budget.acquire(size, timeout_seconds, spare=spare)
        with self._lock:
            kept = self._free[size].pop() if self._free[size] else None
            if kept is not None:
                self._kept_bytes -= size
            elif self._kept_bytes + self.budget.used_bytes > self.budget.limit_bytes:
                self._free.clear()  # buffers of other sizes would break the budget
                self._kept_bytes = 0
        try:
            # pages come with the first use, by the thread that reads or encodes into them
            array = aligned_array(size) if kept is None else kept
        except BaseException:
            self.budget.release(size)
            raise
        return Lease(self, array, size, keep=keep or kept is not None)

    @staticmethod
    def _size_class(nbytes: int) -> int:
        """Few different sizes, so that buffers are reused: a power of two up to 1 MiB, then MiB."""
        if nbytes <= MIB:
            return max(mmap.PAGESIZE, 1 << (max(nbytes, 1) - 1).bit_length())
        return round_up(nbytes, MIB)

    def _take_back(self, lease: Lease) -> None:
        with self._lock:
            if lease.keep and self._kept_bytes + lease.nbytes <= self.budget.limit_bytes:
                self._free[lease.nbytes].append(lease.array)
                self._kept_bytes += lease.nbytes
        self.budget.release(lease.nbytes)

    def clear(self) -> None:
        """Drop kept buffers."""
        with self._lock:
            self._free.clear()
            self._kept_bytes = 0
