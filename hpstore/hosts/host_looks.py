"""A survey's look at several disks of this host by one request, where none holds another."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial

from hpstore.devices.horizon_guard import MARK
from hpstore.devices.local import LocalDevice
from hpstore.errors import DeviceError, DeviceTimeout, HpstoreError
from hpstore.format.disk_looks import DiskLook
from hpstore.format.records import POOL_FILE
from hpstore.hosts.exported_disk import ExportedDisk
from hpstore.hosts.round_watch import RoundWatch
from hpstore.runtime.call_tours import Quicker, Tour
from hpstore.runtime.deadline_wait import Patience, wait_awake
from hpstore.runtime.scheduler import Scheduler, outcome

WAIT_SECONDS = 0.1  # for disks that are asked together; a late one is asked by itself then
PATH_SECONDS = 0.002  # more for each directory that is to be listed
_WORKERS = 2  # of a disk
_QUEUE_DEPTH = 64
_STUCK_SECONDS = 5.0
_CLOSE_SECONDS = 1.0
Wanted = Sequence[tuple[int, Sequence[str]]]  # disks, and directories on each
Answers = Mapping[str, DiskLook | Exception]


class AnsweredElsewhere(OSError):
    """A look stood still, and was answered by another thread: its connection ends."""


class HostLooks:
    """Looks of all callers. Thread-safe; close() ends its threads.

    Disks are asked in turn, by the thread of the connection (round_watch.py), where that is quicker
    than side by side on lanes of theirs. While a disk stands still it is asked on its lane alone.
    """

    def __init__(self, disks: Mapping[int, ExportedDisk]) -> None:
        self._disks = disks
        self._quicker = Quicker()
        self._owing: set[Future[DiskLook]] = set()  # looks of rounds that were left
        self._lock = threading.Lock()  # guards _quicker and _owing
        self._watch = RoundWatch()
        self._scheduler = Scheduler(
            workers_per_device=_WORKERS,
            queue_depth=_QUEUE_DEPTH,
            compute_threads=1,
            threads=True,
            stuck_seconds=_STUCK_SECONDS,
        )

    def look(
        self,
        wanted: Wanted,
        *,
        usage: bool,
        seconds: float,
        answer: Callable[[list[DiskLook]], None],
        end: Callable[[], None],
    ) -> list[DiskLook]:
        """What each disk says, in the order of `wanted`. One that is asked alone has `seconds`;
        several have WAIT_SECONDS of them, and a while for each directory; those that have not
        answered by then are `late`.

        Raises AnsweredElsewhere after another thread has passed this to `answer`, and has called
        `end`, also where no answer could be made: the caller asks again.
        """
        calls = {
            str(number): partial(self._look, self._disks[number], paths, usage, seconds)
            for number, paths in wanted
            if number in self._disks
        }
        if len(calls) < 2:  # it keeps no other from its answer
            return _in_order(wanted, {name: _made(call) for name, call in calls.items()})
        wait = WAIT_SECONDS + PATH_SECONDS * max(len(paths) for _, paths in wanted)
        with self._lock:
            in_turn = not self._owing and self._quicker.in_turn()
        began = time.monotonic()
        if not in_turn:
            patience = Patience(wait, _all_spare)
            found = self._scheduler.gather(calls, seconds, patience=patience)
        else:
            tour = Tour(calls)

            def leave(tour: Tour, began: float) -> None:
                try:
                    answer(_in_order(wanted, self._left(wait, tour, began)))
                finally:
                    end()

            if not self._watch.run(tour, leave):
                raise AnsweredElsewhere("a look stood still")
            found = tour.results()
        if not any(isinstance(look, DeviceTimeout) for look in found.values()):
            self._note(in_turn=in_turn, seconds=(time.monotonic() - began) / len(calls))
        return _in_order(wanted, found)

    def _note(self, *, in_turn: bool, seconds: float) -> None:
        with self._lock:
            self._quicker.note(in_turn=in_turn, seconds=seconds)

    def _left(self, wait: float, tour: Tour, began: float) -> Answers:
        """The rest of a look that stands still: the disks that it has not come to are asked side
        by side. By a thread of its own."""
        left = tour.leave()
        futures: dict[str, Future[DiskLook]] = left.answers
        for future in [future for future in futures.values() if not future.done()]:
            with self._lock:
                self._owing.add(future)
            future.add_done_callback(self._answered)
        futures |= self._scheduler.start(left.calls)
        wait_awake(futures.values(), wait)  # all of it: this process may have been stopped before
        self._note(in_turn=True, seconds=(time.monotonic() - began) / len(futures))
        found: dict[str, DiskLook | Exception] = {}
        for name, future in futures.items():
            look = outcome(future, name, wait)
            found[name] = look
        return found

    def _answered(self, future: Future[DiskLook]) -> None:
        with self._lock:
            self._owing.discard(future)

    def _look(
        self, disk: ExportedDisk, paths: Sequence[str], usage: bool, seconds: float
    ) -> DiskLook:
        began = time.monotonic()
        with disk.call(seconds) as device:
            return look_at(device, paths, usage=usage, began=began)

    def close(self) -> None:
        """Idempotent. A thread that hangs on its disk is left behind."""
        self._watch.close()
        self._scheduler.close(_CLOSE_SECONDS)


def look_at(device: LocalDevice, paths: Sequence[str], *, usage: bool, began: float) -> DiskLook:
    """What a survey asks of a device; the stamp first, so that a wiped one does not look empty.
    `began`: when its time began, by the monotonic clock."""
    stamp = device.stamp(POOL_FILE)
    listings = [list(map(tuple, device.entries(path))) for path in paths]
    space, mark = None, b""
    if usage:
        with contextlib.suppress(HpstoreError, OSError):  # its names are seen all the same
            mark, space = device.counter_sector(MARK), device.usage().numbers
    return DiskLook(
        stamp=stamp,
        listings=listings,  # type: ignore[arg-type]  # tuples of a name and a flag
        mark=mark,
        usage=space,
        seconds=time.monotonic() - began,
    )


def _made(call: Callable[[], DiskLook]) -> DiskLook | Exception:
    try:
        return call()
    except Exception as error:  # noqa: BLE001 (the answer)
        return error


def _all_spare(_: set[str]) -> bool:
    return True


def _in_order(wanted: Wanted, found: Answers) -> list[DiskLook]:
    absent = DeviceError("this host has no such disk")
    return [_described(found.get(str(number), absent)) for number, _ in wanted]


def _described(answer: DiskLook | Exception) -> DiskLook:
    if isinstance(answer, DiskLook):
        return answer
    if isinstance(answer, DeviceTimeout):
        return DiskLook(late=True)
    known = isinstance(answer, HpstoreError)
    name = type(answer).__name__ if known else DeviceError.__name__
    return DiskLook(error=(name, str(answer)))
