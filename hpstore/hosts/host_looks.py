"""A survey's look at several disks of this host by one request, where none holds another."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from hpstore.devices.horizon_guard import MARK
from hpstore.devices.local import LocalDevice
from hpstore.errors import DeviceError, DeviceTimeout, HpstoreError
from hpstore.format.disk_looks import DiskLook
from hpstore.format.records import POOL_FILE
from hpstore.hosts.exported_disk import ExportedDisk
from hpstore.runtime.deadline_wait import Patience
from hpstore.runtime.scheduler import Scheduler

WAIT_SECONDS = 0.1  # for disks that are asked together; a late one is asked by itself then
PATH_SECONDS = 0.002  # more for each directory that is to be listed
_WORKERS = 2  # of a disk
_QUEUE_DEPTH = 64
_STUCK_SECONDS = 5.0
_CLOSE_SECONDS = 1.0


class HostLooks:
    """Looks of all callers. Thread-safe; close() ends its threads.

    Every disk has workers of its own here. They are asked in turn by one of them where that is
    quicker, and a disk that stands still is left (call_tours.py).
    """

    def __init__(self, disks: Mapping[int, ExportedDisk]) -> None:
        self._disks = disks
        self._scheduler = Scheduler(
            workers_per_device=_WORKERS,
            queue_depth=_QUEUE_DEPTH,
            compute_threads=1,
            threads=True,
            stuck_seconds=_STUCK_SECONDS,
        )

    def look(
        self, wanted: Sequence[tuple[int, Sequence[str]]], *, usage: bool, seconds: float
    ) -> list[DiskLook]:
        """What each disk says, in the order of `wanted`. One that is asked alone has `seconds`;
        several have WAIT_SECONDS of them, and a while for each directory; those that have not
        answered by then are `late`."""
        calls = {
            str(number): partial(self._look, self._disks[number], paths, usage, seconds)
            for number, paths in wanted
            if number in self._disks
        }
        if len(calls) > 1:
            wait = WAIT_SECONDS + PATH_SECONDS * max(len(paths) for _, paths in wanted)
            patience = Patience(wait, _all_spare)
            found = self._scheduler.gather(calls, seconds, patience=patience, brief="look")
        else:  # it keeps no other from its answer, so no thread is woken for it
            found = {name: _made(call) for name, call in calls.items()}
        absent = DeviceError("this host has no such disk")
        return [_described(found.get(str(number), absent)) for number, _ in wanted]

    def _look(
        self, disk: ExportedDisk, paths: Sequence[str], usage: bool, seconds: float
    ) -> DiskLook:
        began = time.monotonic()
        with disk.call(seconds) as device:
            found = look_at(device, paths, usage=usage)
        return replace(found, seconds=time.monotonic() - began)

    def close(self) -> None:
        """Idempotent. A thread that hangs on its disk is left behind."""
        self._scheduler.close(_CLOSE_SECONDS)


def look_at(device: LocalDevice, paths: Sequence[str], *, usage: bool) -> DiskLook:
    """What a survey asks of a device; the stamp first, so that a wiped one does not look empty."""
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
    )


def _made(call: Callable[[], DiskLook]) -> DiskLook | Exception:
    try:
        return call()
    except Exception as error:  # noqa: BLE001 (the answer)
        return error


def _all_spare(_: set[str]) -> bool:
    return True


def _described(answer: DiskLook | Exception) -> DiskLook:
    if isinstance(answer, DiskLook):
        return answer
    if isinstance(answer, DeviceTimeout):
        return DiskLook(late=True)
    known = isinstance(answer, HpstoreError)
    name = type(answer).__name__ if known else DeviceError.__name__
    return DiskLook(error=(name, str(answer)))
