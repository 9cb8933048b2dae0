"""What one batch of reads tells of its devices: a few calls a batch, none a read."""

from __future__ import annotations

from collections.abc import Container, Mapping
from concurrent.futures import Future
from functools import partial

import numpy as np
import numpy.typing as npt

from hpstore.devices.ring import ENTRIES, LATE, Batch
from hpstore.objects.store import Store

Int64s = npt.NDArray[np.int64]
Float64s = npt.NDArray[np.float64]


class BatchMeter:
    """One batch whose reads are sorted by device: begun here, noted by `end`.

    `counts`: reads by device, all above 0. `timed`: the batch is to be timed; not each one is, as
    waiting for a part of a batch costs a system call.
    """

    def __init__(self, store: Store, counts: Mapping[str, int]) -> None:
        self._store, self._devices = store, list(counts)
        self._counts = np.fromiter(counts.values(), np.int64, len(counts))
        self._starts = np.cumsum(self._counts) - self._counts
        self._began = store.clock.monotonic()
        found = {device: store.routing.meter(device) for device in counts}
        known = {device: meter for device, meter in found.items() if meter is not None}
        self._meters = known if len(known) == len(found) else {}  # of a pool all, or none
        self._tickets = {device: m.begin(self._began) for device, m in self._meters.items()}
        self.timed = bool(self._meters) and store.routing.timed()

    def late_devices(self, results: Int64s) -> list[str]:
        """Devices with reads that have not ended."""
        late = np.add.reduceat(results == LATE, self._starts, dtype=np.int64)
        return [device for device, count in zip(self._devices, late.tolist(), strict=True) if count]

    def hopeless(self, results: Int64s) -> bool:
        """Whether what is not there can be had sooner in another way: all of it is on devices that
        reads keep off by now, parity makes up for them, and others have answered."""
        late = self.late_devices(results)
        away = self._store.kept_off()
        few = len(late) <= self._store.view.record.parity and len(late) < len(self._devices)
        return few and all(device in away for device in late)

    def end(self, batch: Batch | None, sizes: Int64s) -> None:
        """Note what has ended. `sizes`: bytes of the reads; None: no batch was made."""
        if not self._meters:
            return
        if batch is None:
            self._leave(self._devices)
            return
        late = self.late_devices(batch.results) if batch.late is not None else []
        self._leave([device for device in self._devices if device not in late])
        if batch.late is not None:
            batch.late.add_done_callback(partial(self._landed, late))
        failing = self._note_errors(batch.results) if batch.results.min() < 0 else []
        if batch.seconds is not None:
            self._note_times(batch.seconds, sizes, {*late, *failing})

    def _note_errors(self, results: Int64s) -> list[str]:
        """Devices with reads that failed."""
        failed = np.add.reduceat((results < 0) & (results != LATE), self._starts, dtype=np.int64)
        counts = dict(zip(self._devices, failed.tolist(), strict=True))
        failing = [device for device, count in counts.items() if count]
        for device in failing:
            self._meters[device].note_errors(counts[device])
        return failing

    def _note_times(self, seconds: Float64s, sizes: Int64s, left_out: Container[str]) -> None:
        shown = min(1.0, ENTRIES / len(sizes))  # the part of the reads that is in flight at once
        rows = zip(
            self._devices, self._counts.tolist(), np.add.reduceat(sizes, self._starts).tolist(),
            np.add.reduceat(seconds, self._starts).tolist(), strict=True,
        )  # fmt: skip
        for device, count, total_bytes, total_seconds in rows:
            if device not in left_out:
                self._meters[device].note_batch(
                    count=count, nbytes=total_bytes / count,
                    in_flight=max(1, round(count * shown)), seconds=total_seconds / count,
                )  # fmt: skip

    def _leave(self, devices: list[str]) -> None:
        for device in devices:
            self._meters[device].leave(self._tickets[device])

    def _landed(self, devices: list[str], _: Future[None]) -> None:
        """Late reads are over: they took at least as long as the last of them."""
        seconds = self._store.clock.monotonic() - self._began
        for device in devices:
            self._meters[device].note_batch(count=1, nbytes=0, in_flight=1, seconds=seconds)
        self._leave(devices)


__all__ = ["BatchMeter"]
