"""What one batch of reads tells of its devices: a few calls a batch, none a read."""

from __future__ import annotations

from collections.abc import Container, Mapping
from concurrent.futures import Future
from functools import partial

import numpy as np
import numpy.typing as npt

from hpstore.devices.io_uring import ENTRIES, LATE, UNTRIED, RingBatch
from hpstore.objects.context import PoolContext

Int64s = npt.NDArray[np.int64]
Float64s = npt.NDArray[np.float64]
_FEWEST = 3  # devices whose median one of them cannot move alone


class BatchMeter:
    """One batch whose reads are sorted by device: begun here, noted by `end`.

    `counts`: reads by device, all above 0. `most`: of them in flight at once. `timed`: the batch is
    to be timed; not each one is, as waiting for a part of a batch costs a system call.
    """

    def __init__(self, store: PoolContext, counts: Mapping[str, int], most: int = ENTRIES) -> None:
        self._store, self._devices, self._most = store, list(counts), min(most, ENTRIES)
        self._counts = np.fromiter(counts.values(), np.int64, len(counts))
        self._starts = np.cumsum(self._counts) - self._counts
        self._began = store.clock.monotonic()
        found = {device: store.routing.meter(device) for device in counts}
        known = {device: meter for device, meter in found.items() if meter is not None}
        self._meters = known if len(known) == len(found) else {}  # of a pool all, or none
        self._tickets = {device: m.begin(self._began) for device, m in self._meters.items()}
        self.timed = bool(self._meters) and store.routing.timed()

    def late_devices(self, results: Int64s) -> list[str]:
        """Devices with reads that were sent and have not ended."""
        return self._with_some(results == LATE)

    def _with_some(self, which: npt.NDArray[np.bool_]) -> list[str]:
        """Devices with at least one of these reads."""
        found = np.add.reduceat(which, self._starts, dtype=np.int64)
        return [
            device for device, count in zip(self._devices, found.tolist(), strict=True) if count
        ]

    def hopeless(self, results: Int64s) -> bool:
        """Whether what is not there can be had sooner in another way. Asked after a second in which
        no read has ended: the devices that are silent, those that failed and those that owe
        an answer to somebody else can all be done without."""
        late = self.late_devices(results)
        failing = self._with_some((results < 0) & (results > UNTRIED))
        store = self._store
        refused = [d for d in store.view.devices if not store.scheduler.answers(d)]
        return store.shows_without({*late, *failing, *refused, *store.owing()})

    def end(self, batch: RingBatch | None, sizes: Int64s) -> None:
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
            untried = self._with_some(batch.results == UNTRIED)
            self._note_times(batch.seconds, sizes, {*late, *failing, *untried})

    def _note_errors(self, results: Int64s) -> list[str]:
        """Devices with reads that failed."""
        failed = np.add.reduceat((results < 0) & (results > UNTRIED), self._starts, dtype=np.int64)
        counts = dict(zip(self._devices, failed.tolist(), strict=True))
        failing = [device for device, count in counts.items() if count]
        for device in failing:
            self._meters[device].note_errors(counts[device])
        return failing

    def _note_times(self, seconds: Float64s, sizes: Int64s, left_out: Container[str]) -> None:
        nbytes = np.add.reduceat(sizes, self._starts)
        means = np.add.reduceat(seconds, self._starts) / self._counts
        compared = np.array([device not in left_out for device in self._devices])
        usual = _usual(means, self._counts, nbytes, compared)
        rows = zip(
            self._devices,
            self._counts.tolist(),
            (nbytes / self._counts).tolist(),
            means.tolist(),
            usual.tolist(),
            strict=True,
        )
        for device, count, mean_bytes, mean_seconds, usual_seconds in rows:
            if device not in left_out:
                self._meters[device].note_batch(
                    count=count,
                    nbytes=mean_bytes,
                    in_flight=min(len(sizes), self._most),
                    seconds=mean_seconds,
                    usual=usual_seconds,
                )

    def _leave(self, devices: list[str]) -> None:
        for device in devices:
            self._meters[device].leave(self._tickets[device])

    def _landed(self, devices: list[str], _: Future[None]) -> None:
        """Late reads are over: they took at least as long as the last of them."""
        seconds = self._store.clock.monotonic() - self._began
        for device in devices:
            self._meters[device].note_batch(count=1, nbytes=0, in_flight=1, seconds=seconds)
        self._leave(devices)


def _usual(
    means: Float64s, counts: Int64s, nbytes: Int64s, compared: npt.NDArray[np.bool_]
) -> Float64s:
    """Mean seconds, by device, that its reads take on a usual one of the compared; 0 where these
    are too few.

    Where the batch's one thread or a shared disk is what takes time, a device with few reads takes
    as long as one with many; where each device works for itself, as much longer as it has reads, or
    bytes. Which of these holds is unknown: the longest counts (docs/decisions/0051).
    """
    if compared.sum() < _FEWEST:
        return np.zeros(len(means))
    ways = [(works, means / works) for works in (np.ones(len(means)), counts, nbytes)]
    usual = [works * np.sort(rates[compared])[(compared.sum() - 1) // 2] for works, rates in ways]
    longest: Float64s = np.max(usual, axis=0)
    return longest
