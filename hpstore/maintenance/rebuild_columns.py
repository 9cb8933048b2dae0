"""Make columns of one object again on other devices, run by run, from those that are there."""

from __future__ import annotations

from collections.abc import Mapping

from hpstore.format.geometry import BLOCK_BYTES
from hpstore.objects.context import PoolContext
from hpstore.objects.read.object_reader import ObjectReader
from hpstore.objects.read.read_plan import background_run_bytes
from hpstore.objects.read.window_reads import RebuiltRun
from hpstore.objects.write.column_writer import ColumnSet
from hpstore.objects.write.put import write_failed
from hpstore.objects.write.put_plan import PutContent, make_header
from hpstore.objects.write.stripe_writer import Throttle
from hpstore.runtime.threads import WorkerThreads


def rebuild_columns(
    store: PoolContext,
    reader: ObjectReader,
    targets: dict[str, int],
    throttle: Throttle,
    horizons: Mapping[str, int],
) -> None:
    """Make columns again on other devices. `targets`: device id -> column. `horizons`: of the
    devices, before the survey that the reader was opened by.

    Durable on return. Raises WriteFailed when a target failed, HorizonPassed when a sweep was
    there first; what was there is unchanged.
    """
    header = reader.header
    geometry = header.geometry
    content = PutContent(
        key=header.key,
        version=header.version,
        kind=header.kind,
        created_ms=header.created_ms,
        metadata=header.metadata,
    )
    devices = list(header.devices)
    for device, column in targets.items():
        devices[column] = device
    headers = {
        device: make_header(store, content, geometry, devices, column)
        for device, column in targets.items()
    }
    columns = ColumnSet(
        store,
        headers,
        floor=len(targets),
        generation=store.view.record.generation,
        horizons=horizons,
    )
    done = False
    try:
        columns.create()
        if not columns.failures():
            _rebuild_runs(store, reader, columns, throttle)
            columns.finish()
        if len(columns.published()) == len(targets):
            columns.check_generations()
        done = len(columns.published()) == len(targets)
    finally:
        columns.abandon(take_back=False)
    if not done:
        raise write_failed(
            f"repair of {header.key!r} could not write", header.key, columns.failures()
        )


def _rebuild_runs(
    store: PoolContext, reader: ObjectReader, columns: ColumnSet, throttle: Throttle
) -> None:
    """Run by run: the next one is read and decoded while one is written."""
    wanted, size = tuple(columns.columns), reader.header.geometry.column_bytes
    step = background_run_bytes(reader.header.geometry.width, store.buffers.budget.limit_bytes)

    def made(low: int) -> RebuiltRun:
        high = min(low + step, size)
        throttle((high - low) * len(wanted))
        return reader.rebuild_run(low, high, wanted)

    with WorkerThreads(1, "hpstore-rebuild") as ahead:
        coming = ahead.submit(made, 0) if size else None
        low = 0
        try:
            while coming is not None:
                run, coming = coming.result(), None
                try:
                    if low + step < size:
                        coming = ahead.submit(made, low + step)
                    _write_run(columns, low, run)
                finally:
                    run.release()
                if columns.failures():
                    return
                low += step
        finally:
            if coming is not None and coming.exception() is None:
                coming.result().release()


def _write_run(columns: ColumnSet, low: int, run: RebuiltRun) -> None:
    for number, writer in columns.columns.items():
        row = run.rows[number]
        first, count = low // BLOCK_BYTES, -(-len(row) // BLOCK_BYTES)
        writer.checks.digests(first, row.data, writer.table[first : first + count])
    columns.settle(columns.submit(lambda c: lambda: c.write(low, [run.rows[c.header.column]])))
