"""Open columns of one or many objects, with one call on each device for all of them.

A device that hangs holds an open as it holds a read. Where its columns can be done without it is
given up after a second, as a batch of reads is (BatchMeter.hopeless), not after the deadline.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial

from hpstore.devices.base import Device
from hpstore.devices.host_disks import host_disk
from hpstore.errors import DeviceMissing
from hpstore.format.keys import ColumnName
from hpstore.objects.context import PoolContext
from hpstore.objects.read.column_reader import ColumnOpening, ColumnReader, open_column
from hpstore.objects.survey import ColumnFile
from hpstore.runtime.deadline_wait import Patience, wait_awake, wait_for_enough
from hpstore.runtime.scheduler import outcome
from hpstore.runtime.split_calls import Sent, SplitCall, Unfinished

SPARE_SECONDS = 1.0  # that a device is waited for whose columns can be done without
Opened = list[ColumnReader | Exception]
Wanted = Mapping[str, Sequence[tuple[str, ColumnName]]]  # by device: key and column


def member(store: PoolContext, device_id: str) -> Device:
    """A device of the pool as it is now. Raises DeviceMissing for one that has left since the
    caller saw it there."""
    found = store.view.devices.get(device_id)
    if found is None:
        raise DeviceMissing(f"device {device_id[:8]} has left the pool", device=device_id)
    return found


def open_together(
    store: PoolContext, wanted: Wanted, *, whole: bool, spare: Callable[[set[str]], bool] | None
) -> dict[str, Opened]:
    """What became of each column, in the order of `wanted`.

    `whole`: as open_column has it. `spare(devices)`: whether the columns on these can be done
    without; None waits the device deadline for all. A file that is opened late is closed.
    """
    began = time.monotonic()
    most = max(map(len, wanted.values()), default=0)
    found: dict[str, Opened] = {}
    calls: dict[str, Callable[[], Opened]] = {}
    for device, columns in wanted.items():
        try:
            calls[device] = _opening(store, device, columns, whole)
        except DeviceMissing as error:  # it was taken out of the pool meanwhile
            found[device] = [error for _ in columns]
    futures = store.scheduler.start(
        calls,
        brief=f"open {'whole ' if whole else ''}{most.bit_length()}",
    )
    deadline = store.settings.device_deadline_seconds
    if spare is None:
        wait_awake(futures.values(), deadline)
    else:
        wait_for_enough(futures, deadline, Patience(SPARE_SECONDS, spare), ())
        store.scheduler.note_late(futures, began)
    waited = min(deadline, time.monotonic() - began)
    for device, future in futures.items():
        answer = outcome(future, device, waited)
        if isinstance(answer, Exception):
            future.add_done_callback(_close)  # files that it opens late are closed
            answer = [answer for _ in wanted[device]]
        found[device] = answer
    return found


def open_files(
    store: PoolContext,
    key: str,
    files: Mapping[int, ColumnFile],
    *,
    whole: bool,
    spare: Callable[[set[str]], bool] | None,
) -> dict[int, ColumnReader | Exception]:
    """The same for columns of one object, by their numbers."""
    columns: dict[str, list[int]] = {}
    for column, found in files.items():
        columns.setdefault(found.device, []).append(column)
    wanted = {d: [(key, files[column].name) for column in mine] for d, mine in columns.items()}
    opened = open_together(store, wanted, whole=whole, spare=spare)
    return {
        column: result
        for device, results in opened.items()
        for column, result in zip(columns[device], results, strict=True)
    }


def _open_all(
    store: PoolContext,
    device_id: str,
    device: Device,
    columns: Sequence[tuple[str, ColumnName]],
    whole: bool,
) -> Opened:
    """In one call on the device."""
    found: Opened = []
    for key, name in columns:
        found += _one(partial(open_column, store, device_id, device, key, name, whole=whole))
    return found


def _opening(
    store: PoolContext, device_id: str, columns: Sequence[tuple[str, ColumnName]], whole: bool
) -> Callable[[], Opened]:
    """_open_all as a call, in two halves where it is one request. Raises DeviceMissing."""
    device = member(store, device_id)
    made = partial(_open_all, store, device_id, device, columns, whole)
    if len(columns) > 1 or host_disk(device) is None:
        return made
    key, name = columns[0]

    def begin() -> Sent[Opened] | None:
        sent = ColumnOpening(store, device_id, device, key, name, whole=whole).begin()
        if sent is None:
            return None

        def finish() -> Opened:
            try:
                return [sent.finish()]
            except Unfinished as error:
                raise Unfinished(error.rest and partial(_one, error.rest)) from error
            except Exception as error:  # noqa: BLE001 (of this column alone: noted by its reader)
                return [error]

        return sent.with_finish(finish)

    return SplitCall(begin, made)


def _one(opening: Callable[[], ColumnReader]) -> Opened:
    try:
        return [opening()]
    except Exception as error:  # noqa: BLE001 (of this column alone: noted by its reader)
        return [error]


def _close(future: Future[Opened]) -> None:
    if not future.cancelled() and future.exception() is None:
        for opened in future.result():
            if isinstance(opened, ColumnReader):
                opened.close()
