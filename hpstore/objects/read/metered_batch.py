"""One batch of reads by io_uring, made by the calling thread, of which health hears."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hpstore.devices.io_uring import ENTRIES, Landed, read_batch
from hpstore.format.column_header import HEADER_BYTES
from hpstore.objects.context import PoolContext
from hpstore.objects.read.batch_timing import BatchMeter

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BatchResults:
    """What became of the reads. `results`: bytes read, LATE, or what a ring says of an error.

    `late`: done when reads that were LATE have ended, which may write until then (PROTOCOL 21);
    None when all have.
    """

    results: Int64s
    late: Future[None] | None


def read_metered(
    store: PoolContext,
    counts: Mapping[str, int],
    files: Int64s,
    offsets: Int64s,
    addresses: Int64s,
    sizes: Int64s,
    *,
    keep: object,
    most: int = ENTRIES,
    landed: Landed | None = None,
) -> BatchResults | None:
    """Read from several columns at once; None where no batches are made.

    `counts`: reads of each device, by which the arrays are sorted. Of read n, `offsets[n]` counts
    from the first byte behind the column's header, and `sizes[n]` bytes go to `addresses[n]`.
    `keep` is held while reads may write; `most` and `landed` as read_batch has them. Devices that
    owe an answer are noted.
    """
    meter, batch = BatchMeter(store, counts, most), None
    try:
        batch = read_batch(
            files,
            offsets + HEADER_BYTES,
            addresses,
            sizes,
            seconds=store.settings.device_deadline_seconds,
            keep=keep,
            timed=meter.timed,
            hopeless=meter.hopeless,
            most=most,
            landed=landed,
        )
    finally:
        meter.end(batch, sizes)
    if batch is None:
        return None
    if batch.late is None or batch.late.done():
        return BatchResults(batch.results, None)
    for device in meter.late_devices(batch.results):
        store.scheduler.note_unanswered(device, batch.late)
    return BatchResults(batch.results, batch.late)
