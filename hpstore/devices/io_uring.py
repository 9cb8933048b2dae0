"""Many reads in one system call: io_uring, driven from Python through its shared memory.

A thread that reads with preadv pays, for each read, for two switches and the GIL:
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
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hpstore.errors import ThreadsExhausted
from hpstore.runtime.threads import start_thread

_log = logging.getLogger(__name__)
Int64s = npt.NDArray[np.int64]
Float64s = npt.NDArray[np.float64]
Landed = Callable[[Int64s, Int64s], None]  # (numbers of reads, results of all)
ENTRIES = 256  # reads that one thread has in flight
LATE = -(1 << 40)
UNTRIED = LATE + 1  # the batch was given up before the kernel took this read: no device was asked
_SETUP, _ENTER = 425, 426  # system calls, the same number on all machines
_SQES_OFFSET = 0x10000000
_GETEVENTS, _WITH_TIMEOUT, _OP_READ = 1, 8, 22
_FEATURES_WORD, _FEATURE_TIMEOUT = 5, 1 << 8
_PAUSE_SECONDS, _PATIENCE_SECONDS = 0.001, 0.05
_KEPT_FOR_GOOD: list[object] = []  # memory that the kernel may still write to
_SILENT_SECONDS = 1.0  # without an end of any read, until somebody is asked whether to go on
_LOOKS = 16  # a timed batch's end is looked at in steps down to so small a part of it
_PARAMS_WORDS, _SQ_WORDS, _CQ_WORDS = 30, slice(10, 20), slice(20, 30)  # struct io_uring_params
_SQE = np.dtype(
    [
        ("opcode", "u1"),
        ("flags", "u1"),
        ("ioprio", "<u2"),
        ("fd", "<i4"),
        ("offset", "<u8"),
        ("address", "<u8"),
        ("length", "<u4"),
        ("rw_flags", "<u4"),
        ("user_data", "<u8"),
        ("unused", "<u8", (3,)),
    ]
)
_CQE = np.dtype([("user_data", "<u8"), ("result", "<i4"), ("flags", "<u4")])


@dataclass(frozen=True, slots=True)
class RingBatch:
    """Bytes that were read, or minus the error's number, by read; LATE for those in flight.

    UNTRIED for reads that were never sent: no evidence about any device.

    `late` is done when none is any more. `seconds`: from submission to the first look after the
    end of each read, where that was asked for; half of what is left is waited for at each look.
    """

    results: Int64s
    late: Future[None] | None
    seconds: Float64s | None = None


class Ring:
    """One pair of rings, for one thread of one process."""

    def __init__(self, entries: int = ENTRIES) -> None:
        """Raises OSError where the kernel has none, or does not allow it."""
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
            if not int(parameters[_FEATURES_WORD]) & _FEATURE_TIMEOUT:
                raise OSError(errno.ENOSYS, "Linux before 5.11 has no time-out for it")
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
        self._seconds = np.zeros(2, np.int64)  # struct __kernel_timespec
        self._waiting = np.array([0, 0, self._seconds.ctypes.data], np.uint64)  # ..._getevents_arg
        self.entries = entries

    def _map(self, size: int, offset: int) -> mmap.mmap:
        return mmap.mmap(
            self._fd,
            size,
            mmap.MAP_SHARED | mmap.MAP_POPULATE,
            mmap.PROT_READ | mmap.PROT_WRITE,
            offset=offset,
        )

    def _call(self, number: int, *arguments: Any) -> int:
        found: int = self._libc.syscall(ctypes.c_long(number), *arguments)
        if found < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return found

    def read(
        self,
        files: Int64s,
        offsets: Int64s,
        addresses: Int64s,
        lengths: Int64s,
        *,
        seconds: float,
        keep: object,
        timed: bool = False,
        hopeless: Callable[[Int64s], bool] | None = None,
        most: int = ENTRIES,
        landed: Landed | None = None,
    ) -> RingBatch:
        """Read lengths[i] bytes at offsets[i] of descriptor files[i] to addresses[i], all int64.

        Gives up when none has ended for `seconds`, when `hopeless(results)`, asked after each
        silent second, says so, or when the kernel refuses; the ring is then of no further use.
        `keep` is what keeps the memory and the files alive: it is held until nothing is in flight
        any more, whatever happens here. `most`: in flight at once. `landed(numbers, results)`: what
        has ended lately, each once; called while others are in flight.
        """
        total = len(files)
        results = np.full(total, UNTRIED, np.int64)
        asked = np.zeros(total, _SQE)
        asked["opcode"], asked["fd"], asked["offset"] = _OP_READ, files, offsets
        asked["address"], asked["length"] = addresses, lengths
        asked["user_data"] = np.arange(total)
        times = np.zeros(total) if timed else None
        rounds = self._rounds(
            asked,
            results,
            times,
            seconds=seconds,
            hopeless=hopeless,
            most=min(most, self.entries),
            told=landed is not None,
        )
        try:
            for fresh in rounds:
                if landed is not None:
                    landed(fresh, results)
        except BaseException:
            self._abandon(keep)
            raise
        late = self._abandon(keep) if (results <= UNTRIED).any() else None
        return RingBatch(results, late, times)

    def _rounds(
        self,
        asked: npt.NDArray[np.void],
        results: Int64s,
        times: Float64s | None,
        *,
        seconds: float,
        hopeless: Callable[[Int64s], bool] | None,
        most: int,
        told: bool,
    ) -> Iterator[Int64s]:
        """Make the reads and yield those that have just ended, each once.

        `told`: the caller works on these while others are in flight. Ends early, with results that
        are LATE or UNTRIED, where read() gives up.
        """
        total, begun, ended = len(asked), 0, 0
        fresh = np.empty(0, np.int64)
        try:
            while ended < total:
                count = min(total - begun, most - (begun - ended))
                self._queue(asked[begun : begun + count])
                if times is not None:
                    times[begun : begun + count] = time.monotonic()
                results[begun : begun + count] = LATE
                begun += count
                flying = begun - ended
                if told and len(fresh):
                    self._enter(self._unsubmitted(), 0, seconds)
                    landed, fresh = fresh, fresh[:0]
                    yield landed
                # half of them at a time, so that the devices never run dry
                least = flying if begun == total and not told else (flying + 1) // 2
                if times is not None and flying > total // _LOOKS:
                    least = (flying + 1) // 2
                self._enter_patiently(least, seconds, hopeless, results)
                fresh = self._collect(results, times)
                ended += len(fresh)
        except OSError as error:
            if not isinstance(error, TimeoutError):
                _give_up(error)
            fresh = np.concatenate([fresh, self._collect(results, times)])
            results[begun - self._unsubmitted() : begun] = UNTRIED  # queued, and never taken
        yield fresh

    def _enter_patiently(
        self,
        least: int,
        seconds: float,
        hopeless: Callable[[Int64s], bool] | None,
        results: Int64s,
    ) -> None:
        """As _enter, in steps of silence, until a read has ended. Raises TimeoutError.

        Of each step no more than its length counts: the process may have been stopped. A signal
        that wakes this thread begins no new patience.
        """
        silent, asked = 0.0, _SILENT_SECONDS
        while True:
            step, began = min(seconds - silent, _SILENT_SECONDS), time.monotonic()
            with contextlib.suppress(TimeoutError):
                self._enter(self._unsubmitted(), least, step)
            if self._head_done[0] != self._tail_done[0]:
                return
            silent += min(step, time.monotonic() - began)
            if silent >= seconds:
                raise TimeoutError
            if hopeless is not None and silent >= asked:
                asked += _SILENT_SECONDS
                if hopeless(results):
                    raise TimeoutError

    def _unsubmitted(self) -> int:
        """Reads in the queue that the kernel has not taken."""
        return (int(self._tail[0]) - int(self._head[0])) & 0xFFFFFFFF

    def _queue(self, asked: npt.NDArray[np.void]) -> None:
        tail = int(self._tail[0])
        at = tail % self.entries
        first = min(len(asked), self.entries - at)
        self._sqes[at : at + first] = asked[:first]
        self._sqes[: len(asked) - first] = asked[first:]
        self._tail[0] = (tail + len(asked)) & 0xFFFFFFFF

    def _enter(self, submit: int, least: int, seconds: float) -> None:
        """Submit what is queued, and wait until at least so many are done. Raises TimeoutError.

        Ends early for a signal, or when some are done and the kernel takes no more.
        """
        self._seconds[:] = int(seconds), int(seconds % 1 * 1e9)
        until = time.monotonic() + seconds
        while True:
            try:
                taken = self._call(
                    _ENTER,
                    ctypes.c_int(self._fd),
                    ctypes.c_uint(submit),
                    ctypes.c_uint(least),
                    ctypes.c_uint(_GETEVENTS | _WITH_TIMEOUT),
                    ctypes.c_void_p(self._waiting.ctypes.data),
                    ctypes.c_size_t(self._waiting.nbytes),
                )
            except OSError as error:
                if error.errno not in (errno.ETIME, errno.EINTR, errno.EAGAIN, errno.EBUSY):
                    raise
                ended = bool(self._head_done[0] != self._tail_done[0])
                if error.errno in (errno.EAGAIN, errno.EBUSY):  # the kernel is short of memory
                    if ended:
                        return
                    time.sleep(_PAUSE_SECONDS)
                if not ended and (error.errno == errno.ETIME or time.monotonic() >= until):
                    raise TimeoutError from error
                submit, taken = self._unsubmitted(), 0
            submit -= taken
            if submit <= 0:
                return

    def _collect(self, results: Int64s, times: Float64s | None = None) -> Int64s:
        """Take the results of what has ended; what `times` has of it becomes a duration. Which."""
        head, tail = int(self._head_done[0]), int(self._tail_done[0])
        count = (tail - head) & 0xFFFFFFFF
        done = self._cqes[np.arange(head, head + count) % len(self._cqes)]
        numbers: Int64s = done["user_data"].astype(np.int64)
        results[numbers] = done["result"]
        if times is not None:
            times[numbers] = time.monotonic() - times[numbers]
        self._head_done[0] = tail
        return numbers

    def _in_flight(self) -> int:
        """What the kernel has taken and not ended."""
        return (int(self._head[0]) - int(self._tail_done[0])) & 0xFFFFFFFF

    def _abandon(self, keep: object) -> Future[None]:
        """Done when nothing is in flight. Until then a thread holds on to `keep`."""
        ended: Future[None] = Future()
        if not self._in_flight():
            ended.set_result(None)
            return ended

        def wait(kept: object) -> None:
            while self._in_flight():
                time.sleep(_PATIENCE_SECONDS)
            ended.set_result(None)

        thread = threading.Thread(target=wait, args=(keep,), name="hpstore-late", daemon=True)
        try:
            start_thread(thread)
        except ThreadsExhausted:  # the kernel may still write there: never use it again
            _KEPT_FOR_GOOD.append((self, keep))
        return ended

    def close(self) -> None:
        """Give it back. Nothing is in flight. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)

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
    """Return why batches of reads are not one call here; "" if they are or were not tried yet."""
    return _problem[0] if _problem else ""


def read_batch(
    files: Int64s,
    offsets: Int64s,
    addresses: Int64s,
    lengths: Int64s,
    *,
    seconds: float,
    keep: object,
    timed: bool = False,
    hopeless: Callable[[Int64s], bool] | None = None,
    most: int = ENTRIES,
    landed: Landed | None = None,
) -> RingBatch | None:
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
    ring, _own.ring = _own.ring, None  # back when it has ended well
    found = ring.read(
        files,
        offsets,
        addresses,
        lengths,
        seconds=seconds,
        keep=keep,
        timed=timed,
        hopeless=hopeless,
        most=most,
        landed=landed,
    )
    if found.late is None:
        _own.ring = ring
    return found


def _give_up(error: OSError) -> None:
    _problem.append(f"io_uring: {error.strerror}")
    _log.warning("many reads are made one by one, not in one call: %s", _problem[0])
