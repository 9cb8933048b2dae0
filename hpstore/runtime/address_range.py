"""Addresses in which files and memory of this process lie side by side, as one array."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

import numpy as np

from hpstore.codec.galois import Bytes
from hpstore.units import round_up

HUGE_BYTES = 2 << 20
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000  # not in Python's mmap module
_PROT_NONE = 0
_POPULATE_READ, _POPULATE_WRITE = 22, 23  # MADV_*, Linux 5.14
_COLLAPSE = 25  # MADV_COLLAPSE, Linux 6.1
_FAILED = ctypes.c_void_p(-1).value
# by address, and without the GIL: pages are cleared or looked up in it
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class AddressRange:
    """`array` (nbytes,) uint8 over reserved addresses, a multiple of 2 MiB. None of it can be used
    before it is mapped. They are given back with the last view of the array.

    Raises OSError where a process may not have so many addresses (`ulimit -v`).
    """

    def __init__(self, nbytes: int) -> None:
        length = round_up(max(nbytes, 1), HUGE_BYTES) + HUGE_BYTES
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        found = _mapped(None, length, _PROT_NONE, flags, -1, 0)
        start = round_up(found, HUGE_BYTES)
        view = memoryview((ctypes.c_uint8 * nbytes).from_address(start)).cast("B")
        array = np.frombuffer(view, np.uint8)
        end = weakref.finalize(array, _libc.munmap, found, length)
        end.atexit = False  # the process takes them along
        self.array: Bytes = array

    def map_file(
        self, at: int, nbytes: int, descriptor: int, offset: int, *, writable: bool = False
    ) -> None:
        """Let a part (from `at`, whole pages) be that of a file (from `offset`), for reading unless
        it is `writable`."""
        flags = mmap.MAP_SHARED | _MAP_FIXED
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        _mapped(self._address(at, nbytes), nbytes, access, flags, descriptor, offset)

    def map_memory(self, at: int, nbytes: int) -> None:
        """Let a part be memory of this process, huge pages where they are given."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
        both = mmap.PROT_READ | mmap.PROT_WRITE
        address = _mapped(self._address(at, nbytes), nbytes, both, flags, -1, 0)
        _libc.madvise(address, nbytes, mmap.MADV_HUGEPAGE)  # a kernel without them: 4 KiB ones

    def _address(self, at: int, nbytes: int) -> int:
        if at % mmap.PAGESIZE or not 0 <= at <= at + nbytes <= len(self.array):
            raise ValueError(f"{nbytes} bytes from {at} are not within {len(self.array)}")
        return int(self.array.ctypes.data) + at


def populate(array: Bytes, *, write: bool) -> None:
    """Look up the pages of a mapped file now, in one call; what is in them stays.

    An older kernel does nothing: the pages are looked up one by one when they are used.
    """
    if len(array):
        start = array.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
        end = round_up(array.ctypes.data + len(array), mmap.PAGESIZE)
        _libc.madvise(start, end - start, _POPULATE_WRITE if write else _POPULATE_READ)


def make_huge(array: Bytes) -> None:
    """Let a part of a shared file, mapped for writing, have huge pages where there are none yet.

    What is in it is lost, what is beside it in the same 2 MiB stays, also while others write it.
    The kernel gives huge pages to no empty part: so one byte is written first. An older kernel
    does nothing.
    """
    start, end = array.ctypes.data, array.ctypes.data + len(array)
    for block in range(start // HUGE_BYTES * HUGE_BYTES, end, HUGE_BYTES):
        array[max(start, block) - start] = 0
        _libc.madvise(block, HUGE_BYTES, _COLLAPSE)


def _mapped(
    address: int | None, nbytes: int, protection: int, flags: int, descriptor: int, offset: int
) -> int:
    found = _libc.mmap(address, nbytes, protection, flags, descriptor, offset)
    if found is None or found == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"{nbytes} bytes cannot be mapped: {os.strerror(code)}")
    return int(found)
