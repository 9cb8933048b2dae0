"""Many reads in one system call: io_uring, driven from Python through its shared memory.

A thread that reads with preadv pays, for each read, for two switches and the interpreter's lock:
15 to 60 us of processor time for 12 KiB. Here a whole batch is queued as one numpy array and one
call waits for all of it. Layout and protocol of the rings: io_uring_setup(2), io_uring_enter(2).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import platform
import threading
import time
from typing import Any

import numpy as np
import numpy.typing as npt

_log = logging.getLogger(__name__)
Int64s = npt.NDArray[np.int64]
ENTRIES = 128  # reads that one thread has in flight
_SETUP, _ENTER = 425, 426  # system calls, the same number on all machines
_SQES_OFFSET = 0x10000000
_GETEVENTS, _OP_READ = 1, 22
_PAUSE_SECONDS = 0.001
_PARAMS_WORDS, _SQ_WORDS, _CQ_WORDS = 30, slice(10, 20), slice(20, 30)  # struct io_uring_params
_SQE = np.dtype(
    [("opcode", "u1"), ("flags", "u1"), ("ioprio", "<u2"), ("fd", "<i4"), ("offset", "<u8"),
     ("address", "<u8"), ("length", "<u4"), ("rw_flags", "<u4"), ("user_data", "<u8"),
     ("unused", "<u8", (3,))]
)  # fmt: skip
_CQE = np.dtype([("user_data", "<u8"), ("result", "<i4"), ("flags", "<u4")])


class Ring:
    """One pair of rings, for one thread of one process."""

    def __init__(self, entries: int = ENTRIES) -> None:
        """Raises OSError where the kernel has none, or nobody may use it."""
        self._pid, self._libc = os.getpid(), ctypes.CDLL(None, use_errno=True)
        self._libc.syscall.restype = ctypes.c_long
        parameters = np.zeros(_PARAMS_WORDS, np.uint32)
        self._fd = self._call(
            _SETUP, ctypes.c_uint(entries), ctypes.c_void_p(parameters.ctypes.data)
        )
        entries, completions = int(parameters[0]), int(parameters[1])
        sq, cq = parameters[_SQ_WORDS].tolist(), parameters[_CQ_WORDS].tolist()
        size = max(sq[6] + 4 * entries, cq[5] + _CQE.itemsize * completions)
        try:
            shared = self._map(size, 0)
            self._sqes = np.frombuffer(self._map(_SQE.itemsize * entries, _SQES_OFFSET), _SQE)
        except OSError:
            os.close(self._fd)
            raise
        words = np.frombuffer(shared, np.uint32, size // 4)
        self._head, self._tail, self._head_done, self._tail_done = (
            words[offset // 4 : offset // 4 + 1] for offset in (*sq[:2], *cq[:2])
        )
        words[sq[6] // 4 :][:entries] = np.arange(entries, dtype=np.uint32)
        self._cqes = np.frombuffer(shared, _CQE, completions, cq[5])
        self._sqes["opcode"] = _OP_READ
        self.entries = entries

    def _map(self, size: int, offset: int) -> mmap.mmap:
        return mmap.mmap(
            self._fd, size, mmap.MAP_SHARED | mmap.MAP_POPULATE,
            mmap.PROT_READ | mmap.PROT_WRITE, offset=offset,
        )  # fmt: skip

    def _call(self, number: int, *arguments: Any) -> int:
        found: int = self._libc.syscall(ctypes.c_long(number), *arguments)
        if found < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return found

    def read(self, files: Int64s, offsets: Int64s, addresses: Int64s, lengths: Int64s) -> Int64s:
        """Read lengths[i] bytes at offsets[i] of descriptor files[i] to addresses[i], all int64.

        Returns the bytes that were read, or minus the error's number, for each. The memory belongs
        to the kernel until this returns. Raises OSError when the ring is of no use any more;
        nothing is in flight then.
        """
        total, begun, ended = len(files), 0, 0
        results = np.zeros(total, np.int64)
        while ended < total:
            count = min(total - begun, self.entries - (begun - ended))
            if count:
                self._queue(begun, begun + count, files, offsets, addresses, lengths)
                begun += count
            # half of them at a time, so that the devices never run dry
            least = begun - ended if begun == total else (begun - ended + 1) // 2
            self._enter(count, least)
            ended += self._collect(results)
        return results

    def _queue(
        self, first: int, last: int, files: Int64s, offsets: Int64s, addresses: Int64s,
        lengths: Int64s,
    ) -> None:  # fmt: skip
        tail = int(self._tail[0])
        at = np.arange(tail, tail + last - first) % self.entries
        self._sqes["fd"][at] = files[first:last]
        self._sqes["offset"][at] = offsets[first:last]
        self._sqes["address"][at] = addresses[first:last]
        self._sqes["length"][at] = lengths[first:last]
        self._sqes["user_data"][at] = np.arange(first, last)
        self._tail[0] = (tail + last - first) & 0xFFFFFFFF

    def _enter(self, submit: int, least: int) -> None:
        """Submit what is queued, and wait until at least so many are done."""
        while True:
            try:
                taken = self._call(
                    _ENTER, ctypes.c_int(self._fd), ctypes.c_uint(submit), ctypes.c_uint(least),
                    ctypes.c_uint(_GETEVENTS), None, ctypes.c_size_t(0),
                )  # fmt: skip
            except OSError as error:
                if error.errno == errno.EINTR:
                    continue
                time.sleep(_PAUSE_SECONDS)
                if error.errno in (errno.EAGAIN, errno.EBUSY):  # the kernel is short of memory
                    continue
                while self._head[0] != self._tail_done[0]:  # what it has taken is still coming
                    time.sleep(_PAUSE_SECONDS)
                raise
            submit -= taken
            if submit <= 0:
                return

    def _collect(self, results: Int64s) -> int:
        head, tail = int(self._head_done[0]), int(self._tail_done[0])
        count = (tail - head) & 0xFFFFFFFF
        done = self._cqes[np.arange(head, head + count) % len(self._cqes)]
        results[done["user_data"].astype(np.int64)] = done["result"]
        self._head_done[0] = tail
        return count

    def close(self) -> None:
        """Give it back. Nothing is in flight."""
        with contextlib.suppress(OSError):
            os.close(self._fd)

    def __del__(self) -> None:
        if getattr(self, "_pid", None) == os.getpid() and hasattr(self, "entries"):
            self.close()


class _Own(threading.local):
    """The ring of one thread."""

    ring: Ring | None = None
    pid = 0


_own = _Own()
_problem: list[str] = []  # why there are no rings, once known


def problem() -> str:
    """Why batches of reads are not one call here; "" where they are, or nobody has tried."""
    return _problem[0] if _problem else ""


def read_batch(files: Int64s, offsets: Int64s, addresses: Int64s, lengths: Int64s) -> Int64s | None:
    """As Ring.read, with the ring of the calling thread; None where there are none.

    Why is logged once and stands in problem().
    """
    if _problem:
        return None
    if _own.ring is None or _own.pid != os.getpid():
        try:
            if platform.machine() != "x86_64":
                raise OSError(errno.ENOSYS, "not tried on this processor")
            _own.ring, _own.pid = Ring(), os.getpid()
        except OSError as error:
            _give_up(error)
            return None
    try:
        return _own.ring.read(files, offsets, addresses, lengths)
    except OSError as error:
        _own.ring = None
        _give_up(error)
        return None


def _give_up(error: OSError) -> None:
    _problem.append(f"io_uring: {error.strerror}")
    _log.warning("small reads are made one by one: %s", _problem[0])


__all__ = ["ENTRIES", "Ring", "problem", "read_batch"]
