"""Many small ranges of one object, each straight into the caller's memory, without block checks.

The pool's blocks are 64 KiB: to verify a 12 KiB record by them costs five times its bytes. Who has
a checksum of each range reads them here, checks them on the thread that read them, and reads what
did not match again through ObjectReader, which verifies, decodes and repairs.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from hpstore.buffers import aligned_array
from hpstore.codec.galois import Bytes
from hpstore.errors import HpstoreError
from hpstore.geometry import ALIGNMENT_BYTES, Geometry
from hpstore.objects.columns import ColumnReader
from hpstore.objects.read import ObjectReader
from hpstore.objects.store import Store
from hpstore.units import MIB, round_down, round_up

Int64s = npt.NDArray[np.int64]
Check = Callable[[int, Bytes], bool]  # (number of the range, its bytes): are they right?


@dataclass(frozen=True, slots=True)
class Scattered:
    """What became of the ranges. `late`: reads that still write into the caller's memory."""

    good: npt.NDArray[np.bool_]
    late: tuple[Future[None], ...]


Read = Callable[[], None]


class Scatter:
    """Ranges of several objects, to be read at once: add() for each object, then run().

    `targets[i]` is filled with range number i, where `check` says that its bytes are right. Their
    memory belongs to run() until it returns, and longer while `late` is not empty (PROTOCOL 21).
    """

    def __init__(self, targets: Sequence[Bytes], check: Check) -> None:
        self._targets, self._check = targets, check
        self._reads: dict[str, list[Read]] = {}  # by device
        self._good = np.zeros(len(targets), bool)

    def add(self, store: Store, reader: ObjectReader, starts: Int64s, numbers: Int64s) -> None:
        """Ranges of an open object: range numbers[i] begins at byte starts[i] of it.

        Ranges that cross a unit, lie in the shrunk last stripe, or for which too few columns are
        open are left to the caller. With columns lost a range is decoded from the same bytes of k
        others.
        """
        geometry = reader.header.geometry
        unit = geometry.unit_bytes
        lengths = np.array([len(self._targets[n]) for n in numbers.tolist()], np.int64)
        inside = starts % unit
        whole = geometry.full_stripe_count * geometry.stripe_bytes
        fits = (inside + lengths <= unit) & (starts < whole) & (lengths > 0)
        column = (starts % geometry.stripe_bytes // unit).tolist()
        offset = (starts // geometry.stripe_bytes * unit + inside).tolist()
        sources = dict(sorted(reader.columns.items())[: geometry.data])
        for i in np.flatnonzero(fits).tolist():
            held, number = reader.columns.get(column[i]), int(numbers[i])
            if held is not None:
                read = partial(self._plain, held, offset[i], number)
                self._reads.setdefault(held.device_id, []).append(read)
            elif len(sources) == geometry.data:
                read = partial(
                    self._decoded, store, geometry, sources, column[i], offset[i], number
                )
                first = sources[min(sources, key=lambda c: (c + number) % geometry.width)]
                self._reads.setdefault(first.device_id, []).append(read)

    def run(self, store: Store) -> Scattered:
        """Read all. What is not good is to be read in another way."""
        futures: list[Future[None]] = []
        for device, reads in self._reads.items():
            for worker in range(min(store.settings.workers_per_device, len(reads))):
                part = reads[worker :: store.settings.workers_per_device]
                futures.append(store.scheduler.submit(device, partial(_each, part)))
        wait(futures, timeout=store.settings.device_deadline_seconds)
        return Scattered(self._good, tuple(future for future in futures if not future.done()))

    def _plain(self, held: ColumnReader, offset: int, number: int) -> None:
        target = self._targets[number]
        length = len(target)
        if (offset | length | target.ctypes.data) % ALIGNMENT_BYTES == 0:
            held.read_raw(offset, target)
        else:
            low, size = _widened(offset, length)
            scratch = _scratch(size)
            held.read_raw(low, scratch)
            target[:] = scratch[offset - low : offset - low + length]
        self._good[number] = self._check(number, target)

    def _decoded(
        self, store: Store, geometry: Geometry, sources: dict[int, ColumnReader],
        lost: int, offset: int, number: int,
    ) -> None:  # fmt: skip
        """A range of a lost column; one thread reads one source after the other."""
        store.metrics.count("read_degraded_total")
        target = self._targets[number]
        low, size = _widened(offset, len(target))
        memory = _scratch((len(sources) + 1) * size)
        *rows, out = [memory[at : at + size] for at in range(0, len(memory), size)]
        for row, source in zip(rows, sources.values(), strict=True):
            source.read_raw(low, row)
        store.code.reconstruct(
            geometry.code, geometry.data, geometry.parity, tuple(sources), (lost,), rows, [out]
        )
        target[:] = out[offset - low : offset - low + len(target)]
        self._good[number] = self._check(number, target)


class _Own(threading.local):
    """Memory of one thread of a device, kept for its next range."""

    memory: Bytes = aligned_array(0)


_own = _Own()


def _scratch(size: int) -> Bytes:
    """Aligned memory of this thread, good until its next call."""
    if len(_own.memory) < size:
        _own.memory = aligned_array(round_up(size, MIB))
    return _own.memory[:size]


def _widened(offset: int, length: int) -> tuple[int, int]:
    """Start and size of the aligned run around a range."""
    low = round_down(offset, ALIGNMENT_BYTES)
    return low, round_up(offset + length, ALIGNMENT_BYTES) - low


def _each(reads: Sequence[Read]) -> None:
    for read in reads:
        with contextlib.suppress(HpstoreError, OSError):  # it stays not good
            read()


__all__ = ["Check", "Scatter", "Scattered"]
