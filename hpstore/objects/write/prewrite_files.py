"""Files written ahead for new columns to overwrite (PROTOCOL 11).

A first write into new blocks takes about twice the time of overwriting written ones, so whoever
knows what will be put can have it done before. A spare file is made in tmp/ like any other, and
moved to recycle/ when all of it is written: killed before that, it is an orphan that sweep()
removes; after that, a file like those that retention leaves.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from hpstore.codec.galois import Bytes
from hpstore.devices.base import (
    RECYCLE,
    RECYCLE_MIN_BYTES,
    Device,
    Usage,
    WriteHandle,
    recycled_bytes,
    recycled_path,
)
from hpstore.devices.reserve import reserve_bytes
from hpstore.format.column_header import column_file_bytes
from hpstore.format.geometry import ALIGNMENT_BYTES, Code, plan_geometry
from hpstore.objects.context import PoolContext
from hpstore.runtime.buffers import aligned_array
from hpstore.runtime.deadline_wait import wait_awake
from hpstore.runtime.scheduler import outcome
from hpstore.units import MIB, div_ceil

_log = logging.getLogger(__name__)
CHUNK_BYTES = MIB
Proceed = Callable[[int], bool]  # told the bytes about to be written; waits as it likes; or stop


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What a device holds for overwriting, and its space."""

    sizes: tuple[int, ...]
    usage: Usage


def plan_files(wanted: Iterable[int], kept: Kept, limit_bytes: int) -> list[int]:
    """Sizes of the files to write on one device so that it keeps one for each of `wanted`.

    A kept file serves as one that is not larger. What would pass `limit_bytes` of kept files, or
    leave less new space than the reserve, is left out.
    """
    there, missing = sorted(kept.sizes, reverse=True), []
    for size in sorted(wanted, reverse=True):
        if there and there[0] >= size:
            there.pop(0)
        else:
            missing.append(size)
    room = min(
        kept.usage.free - kept.usage.kept - reserve_bytes(kept.usage),
        limit_bytes - sum(kept.sizes),
    )
    ends = itertools.accumulate(missing)
    return [size for size, end in zip(missing, ends, strict=True) if end <= room]


def column_sizes(store: PoolContext, sizes: Sequence[int], copies: int) -> list[int]:
    """File sizes that every candidate should keep for `copies` puts of each of the `sizes`."""
    record, usable = store.view.record, store.usable()
    if usable <= record.parity:
        return []
    found: list[int] = []
    for size in sizes:
        geometry = plan_geometry(
            size,
            data=record.data,
            parity=record.parity,
            unit_bytes=record.unit_bytes,
            usable=usable,
        )
        file_bytes = column_file_bytes(geometry)
        if geometry.code is not Code.COPIES and file_bytes >= RECYCLE_MIN_BYTES:
            found += [file_bytes] * div_ceil(copies * geometry.width, usable)
    return found


def prepare_space(store: PoolContext, sizes: Sequence[int], copies: int, proceed: Proceed) -> int:
    """Have files kept for `copies` puts of each of the `sizes`; returns how many were written.

    Best effort: a device that fails, hangs or is full is left out, logged and counted. `proceed`
    is asked before every round of chunks; False stops, and nothing half-written stays.
    """
    wanted = column_sizes(store, sizes, copies)
    if not wanted:
        return 0
    limit = store.settings.recycle_bytes
    candidates = [candidate.device for candidate in store.candidates()]
    devices = store.view.devices
    found = store.each(candidates, lambda _, device: _kept(device))
    todo = {
        device_id: plan_files(wanted, kept, limit)
        for device_id, kept in found.items()
        if not isinstance(kept, Exception)
    }
    if not any(todo.values()):
        return 0
    page, chunk = aligned_array(ALIGNMENT_BYTES), aligned_array(CHUNK_BYTES)
    # not zeros, which a thin device might not store; the header's page is blank (PROTOCOL 11)
    chunk[:] = np.random.default_rng(0).integers(1, 256, CHUNK_BYTES, np.uint8)
    written = 0
    for row in itertools.zip_longest(*todo.values()):
        spares = [
            _Spare(device_id, devices[device_id], size, page, chunk)
            for device_id, size in zip(todo, row, strict=True)
            if size is not None and store.view.devices.get(device_id) is devices[device_id]
        ]
        finished, stopped = _write_side_by_side(store, spares, proceed)
        written += finished
        if stopped:
            break
    store.metrics.count("space_prepared_files_total", written)
    return written


def _kept(device: Device) -> Kept:
    sizes = [recycled_bytes(entry.name) for entry in device.entries(RECYCLE)]
    return Kept(sizes=tuple(s for s in sizes if s is not None), usage=device.usage())


class _Spare:
    """One file on its way. `step` is called by one thread at a time, of the device's lane."""

    def __init__(
        self, device_id: str, device: Device, size: int, page: Bytes, chunk: Bytes
    ) -> None:
        self.device_id, self._device, self._size = device_id, device, size
        self._page, self._chunk = page, chunk
        self._handle: WriteHandle | None = None
        self._steps = self._write()

    def step(self) -> bool | None:
        """Write a chunk; True at the end of the file, None where files are not kept."""
        return next(self._steps)

    def _write(self) -> Iterator[bool | None]:
        self._handle = self._device.create_spare(self._size)
        if self._handle is None:
            yield None
            return
        for offset in range(0, self._size, CHUNK_BYTES):
            rows = [self._chunk[: min(CHUNK_BYTES, self._size - offset)]]
            if not offset:
                rows = [self._page, rows[0][ALIGNMENT_BYTES:]]
            self._handle.write(offset, rows)
            if offset + CHUNK_BYTES < self._size:
                yield False
        self._handle.sync()
        path = recycled_path(self._size)
        self._handle.publish(path)
        self._device.sync_directory(path)
        self._handle = None
        yield True

    def abort(self) -> None:
        """Remove the file; only when no step is running."""
        if self._handle is not None:
            self._handle.abort()


def _write_side_by_side(
    store: PoolContext, spares: Sequence[_Spare], proceed: Proceed
) -> tuple[int, bool]:
    """Write files of different devices; how many were finished, and whether `proceed` said no."""
    finished, deadline = 0, store.settings.device_deadline_seconds
    writing = list(spares)
    try:
        while writing:
            if not proceed(len(writing) * CHUNK_BYTES):
                return finished, True
            futures = {s: store.scheduler.submit(s.device_id, s.step) for s in writing}
            wait_awake(futures.values(), deadline)
            for spare, future in futures.items():
                answer = outcome(future, spare.device_id, deadline)
                if answer is not False:
                    writing.remove(spare)
                finished += answer is True
                if isinstance(answer, Exception):
                    _give_up(store, spare, future, answer)
        return finished, False
    finally:
        for spare in writing:
            spare.abort()


def _give_up(
    store: PoolContext, spare: _Spare, future: Future[bool | None], error: Exception
) -> None:
    """A device that fails here costs its later puts the time of new blocks, nothing else."""
    store.metrics.count("space_prepare_error_total")
    _log.warning("no space is prepared on device %s: %s", spare.device_id, error)
    future.cancel()
    future.add_done_callback(lambda _: spare.abort())  # a hung call still uses the descriptor
