"""Health on real files: batches are noted and go round devices; threads, forks, history."""

from __future__ import annotations

import gc
import logging
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpstore.codec.galois import Bytes
from hpstore.devices.io_uring import LATE, UNTRIED, RingBatch, read_batch
from hpstore.health import monitor as monitor_module
from hpstore.health.decision_log import history_path
from hpstore.health.detect.io_recorder import IoOutcome, Operation
from hpstore.objects.read import metered_batch
from hpstore.objects.read.batch_timing import BatchMeter
from hpstore.objects.read.pooled_reader import PooledReader
from hpstore.objects.read.record_batch_read import Scatter, Scattered
from hpstore.pool.pool import Pool
from hpstore.units import KIB
from tests.fault.common import Bench, exit_status, forked, payload, poll, rings

LIMIT = 20.0
UNIT, DATA = 64 * KIB, 3
SIZE = 8 * UNIT * DATA
BODY = payload("x", SIZE)
RECORD = 12 * KIB
STARTS = np.arange(0, SIZE - RECORD, UNIT // 2, dtype=np.int64)
STARTS = STARTS[STARTS % UNIT + RECORD <= UNIT]

with_rings = pytest.mark.skipif(not rings(), reason="no io_uring here")


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    """3+2 over six directories, with an object; no thread ticks."""
    bench = Bench(tmp_path)
    with bench.create(6, data=DATA, parity=2) as made:
        made.admin.health.pause()
        made.put("x", BODY, unit_bytes=UNIT)
        yield made


def read(reader: PooledReader) -> Scattered:
    """All records at once; whatever is good has the right bytes."""
    targets = [np.zeros(RECORD, np.uint8) for _ in STARTS]

    def right(number: int, found: Bytes) -> bool:
        start = int(STARTS[number])
        return found.tobytes() == BODY[start : start + RECORD]

    scatter = Scatter(targets, right)
    reader.add_to(scatter, STARTS, np.arange(len(STARTS)))
    return reader.run_scatter(scatter)


@with_rings
def test_a_batch_is_noted_by_device_in_one_row(pool: Pool) -> None:
    """How many reads, of which size, how deep; the next batch right after it is not timed."""
    with pool.open("x") as reader:
        held = [r.device_id for r in reader._reader.columns.values()]
        recorders = {device: pool.admin.health.telemetry.recorder(device) for device in held}
        for recorder in recorders.values():
            recorder.drain()
        pool._store.routing.timed = lambda: True
        assert read(reader).good.all()
        total = 0
        for recorder in recorders.values():
            rows = recorder.drain()
            assert rows.operation.tolist() == [Operation.READ]
            assert rows.outcome.tolist() == [IoOutcome.OK]
            assert rows.seconds[0] > 0
            assert RECORD <= rows.nbytes[0] <= RECORD + 4 * KIB
            assert rows.in_flight[0] == len(STARTS)
            total += int(rows.count[0])
            assert recorder.oldest_seconds(1e12) == 0
        assert total == len(STARTS)
        pool._store.routing.timed = lambda: False
        assert read(reader).good.all()
        assert all(len(recorder.drain().count) == 0 for recorder in recorders.values())


@with_rings
def test_batches_go_round_a_device_that_reads_keep_off(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of its file's bytes is asked for; every record is right; later it is asked again."""
    asked: set[int] = set()
    plain = read_batch

    def spy(files: Any, *arguments: Any, **more: Any) -> Any:  # Any: passed on
        asked.update(files.tolist())
        return plain(files, *arguments, **more)

    monkeypatch.setattr(metered_batch, "read_batch", spy)
    with pool.open("x") as reader:
        held = reader._reader.columns[1]
        routing = pool._store.routing
        routing.probe = lambda _: False
        routing.set_avoided({held.device_id: 0.0})
        assert read(reader).good.all()
        assert held.descriptor not in asked
        assert pool.metrics.value("read_degraded_total") > 0
        routing.set_avoided({})
        asked.clear()
        assert read(reader).good.all()
        assert held.descriptor in asked


@with_rings
def test_a_batch_probes_the_device_that_it_keeps_off(pool: Pool) -> None:
    """One record's bytes, on the device's lane: noted, and given to nobody."""
    with pool.open("x") as reader:
        device = reader._reader.columns[0].device_id
        recorder = pool.admin.health.telemetry.recorder(device)
        pool._store.routing.set_avoided({device: 0.0})
        recorder.drain()
        assert read(reader).good.all()
        poll(LIMIT, lambda: pool.admin.health._probes[device] == 1)
        rows = recorder.drain()
        reads = rows.operation == Operation.READ
        assert sorted(rows.nbytes[reads].tolist())[-1] >= RECORD
        assert pool._store.buffers.budget.used_bytes == 0
        assert read(reader).good.all()
        assert pool.metrics.value("read_probe_total") == 1  # not so soon again


def batch(results: list[int], late: Future[None] | None = None) -> RingBatch:
    times = np.where(np.array(results) == LATE, 1e9, 0.25)
    return RingBatch(np.array(results), late, times)


def test_late_and_failed_reads_of_a_batch_are_noted(pool: Pool) -> None:
    """A late device's call stays in flight until it ends, and is timed then; errors count."""
    store = pool._store
    late, failing, well = list(store.view.devices)[:3]
    recorders = {d: pool.admin.health.telemetry.recorder(d) for d in (late, failing, well)}
    for recorder in recorders.values():
        recorder.drain()
    meter = BatchMeter(store, {late: 2, failing: 3, well: 1})
    assert all(r.oldest_seconds(1e12) > 0 for r in recorders.values())
    ended: Future[None] = Future()
    meter.end(batch([4096, LATE, 4096, -5, 4096, 4096], ended), np.full(6, 4096))
    assert recorders[well].drain().seconds.tolist() == [0.25]
    rows = recorders[failing].drain()
    assert (rows.outcome.tolist(), rows.count.tolist()) == ([IoOutcome.ERROR], [1])
    assert [r.oldest_seconds(1e12) > 0 for r in recorders.values()] == [True, False, False]
    ended.set_result(None)
    assert recorders[late].oldest_seconds(1e12) == 0
    assert len(recorders[late].drain().seconds) == 1


def test_what_was_never_sent_is_no_evidence_against_a_device(pool: Pool) -> None:
    """hang_in_large_batch: only devices with reads in flight are late; the others get no times."""
    store = pool._store
    hung, untried, well = list(store.view.devices)[:3]
    recorders = {d: pool.admin.health.telemetry.recorder(d) for d in (hung, untried, well)}
    for recorder in recorders.values():
        recorder.drain()
    meter = BatchMeter(store, {hung: 2, untried: 2, well: 1})
    results = np.array([LATE, UNTRIED, 4096, UNTRIED, 4096])
    assert meter.late_devices(results) == [hung]
    ended: Future[None] = Future()
    meter.end(batch(results.tolist(), ended), np.full(5, 4096))
    assert [r.oldest_seconds(1e12) > 0 for r in recorders.values()] == [True, False, False]
    assert recorders[well].drain().seconds.tolist() == [0.25]
    assert len(recorders[untried].drain().seconds) == 0
    ended.set_result(None)


def test_a_batch_is_given_up_only_for_devices_that_parity_makes_up_for(pool: Pool) -> None:
    """Two may be silent or failing, whoever they are, or owe an answer to somebody else; a third is
    needed, and is waited for. It need not be slow for the monitor: a hung one cost a deadline."""
    store = pool._store
    devices = list(store.view.devices)
    meter = BatchMeter(store, dict.fromkeys(devices[:4], 1))

    def hopeless(*late: int, failed: Sequence[int] = ()) -> bool:
        results = np.full(4, 4096)
        results[list(late)], results[list(failed)] = LATE, -5
        return meter.hopeless(results)

    assert hopeless(0)
    assert hopeless(0, 3)
    assert hopeless(0, failed=[3])
    assert not hopeless(0, 1, 2)
    assert not hopeless(0, failed=[1, 2])
    owed: Future[None] = Future()
    store.scheduler.note_unanswered(devices[4], owed)
    assert hopeless(0)
    assert not hopeless(0, 1)
    owed.set_result(None)
    assert hopeless(0, 1)
    meter.end(None, np.full(4, 4096))
    assert all(pool.admin.health.telemetry.recorder(d).oldest_seconds(1e12) == 0 for d in devices)


def test_a_forked_child_judges_for_itself(pool: Pool) -> None:
    """PROTOCOL 22: its own thread, no device kept off, the parent's calls forgotten."""
    device = next(iter(pool._store.view.devices))
    pool._store.routing.set_avoided({device: 0.0})
    recorder = pool.admin.health.telemetry.recorder(device)
    recorder.begin(0.0)
    pool.admin.health._automatic = True
    pool.admin.health.start()
    assert pool.admin.health._thread is not None

    def child() -> None:
        assert pool.admin.health._thread is None
        assert not pool._store.routing.avoided
        assert recorder.oldest_seconds(1e12) == 0
        assert pool.get("x") == BODY
        assert pool.admin.health._thread is not None
        assert pool.admin.health._thread.is_alive()
        pool.admin.health.tick_now()
        assert pool.admin.health.snapshot().ticks >= 1

    with forked(child) as pid:
        assert exit_status(pid, LIMIT) == 0
    pool.admin.health.pause()
    assert pool._store.routing.avoided == {device: 0.0}


def health_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "hpstore-health"}


@pytest.mark.parametrize("closed", [True, False])
def test_the_thread_starts_with_the_first_call_and_ends_with_the_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed: bool
) -> None:
    """Also of a pool that nobody closes."""
    monkeypatch.setattr(monitor_module, "TICK_SECONDS", 0.01)
    others = health_threads()  # of pools that other tests have left
    bench = Bench(tmp_path)
    bench.create(5, data=DATA, parity=2).close()
    poll(LIMIT, lambda: health_threads() <= others)
    opened = bench.open()
    metrics = opened.metrics
    poll(LIMIT, lambda: metrics.value("health_tick_total") > 1)
    if closed:
        opened.close()
    alive = weakref.ref(opened.admin.health)
    del opened
    gc.collect()
    poll(LIMIT, lambda: health_threads() <= others)
    gc.collect()
    assert alive() is None


def test_a_tick_that_fails_is_counted_and_told_once(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And the next ones are made."""
    monkeypatch.setattr(monitor_module, "TICK_SECONDS", 0.01)
    plain, bad = pool.admin.health.telemetry.tick, iter([True, True])

    def tick(now_seconds: float) -> Any:  # Any: passed on
        if next(bad, False):
            raise ZeroDivisionError("a bad tick")
        return plain(now_seconds)

    monkeypatch.setattr(pool.admin.health.telemetry, "tick", tick)
    pool.admin.health._automatic = True
    with caplog.at_level(logging.ERROR):
        pool.admin.health.start()
        poll(LIMIT, lambda: pool.metrics.value("health_tick_total") > 0)
        pool.admin.health.pause()
    assert pool.metrics.value("health_tick_error_total") == 2
    assert sum("a tick of the health monitor failed" in r.message for r in caplog.records) == 1


def test_a_history_that_cannot_be_written_stops_nothing(
    pool: Pool, caplog: pytest.LogCaptureFixture
) -> None:
    """Counted, told; the decision stands."""
    store = pool._store
    path = history_path(store.settings, store.view.record.pool_id)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir()
    device = next(iter(store.view.devices))
    recorder = pool.admin.health.telemetry.recorder(device)
    for _ in range(10):
        recorder.record(Operation.META, 0, 1, 0.0, IoOutcome.ERROR)
    pool.admin.health.tick_now()
    assert pool.admin.health.snapshot().devices[device].state.value == "faulted"
    assert pool.metrics.value("health_history_error_total") > 0
    assert "cannot be used" in caplog.text
    assert pool.get("x") == BODY
    os.rmdir(path)


def test_listeners_hear_each_tick_until_they_stop(pool: Pool) -> None:
    """What an agent judges by."""
    heard: list[float] = []
    stop = pool.admin.health.listen(lambda found: heard.append(found.at_seconds))
    pool.admin.health.tick_now()
    pool.admin.health.tick_now()
    stop()
    stop()
    pool.admin.health.tick_now()
    assert len(heard) == 2
    assert pool.admin.health.snapshot().ticks == 3


@with_rings
def test_a_batch_that_is_interrupted_leaves_no_call_in_flight(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in a notebook: the devices would look as if they hung from then on."""

    def interrupt(*_: Any, **__: Any) -> None:  # Any: ignored
        raise KeyboardInterrupt

    monkeypatch.setattr(metered_batch, "read_batch", interrupt)
    with pool.open("x") as reader:
        with pytest.raises(KeyboardInterrupt):
            read(reader)
        held = [r.device_id for r in reader._reader.columns.values()]
    recorders = [pool.admin.health.telemetry.recorder(device) for device in held]
    assert [recorder.oldest_seconds(1e12) for recorder in recorders] == [0.0] * len(held)


def test_a_device_that_has_left_accuses_nobody_and_excuses_nobody(pool: Pool) -> None:
    """Its hanging calls count no more among those that make a hang everybody's."""
    device, url = next(iter(pool.admin.devices.places.items()))
    recorder = pool.admin.health.telemetry.recorder(device)
    recorder.begin(pool._store.clock.monotonic() - 1000.0)
    assert pool.admin.health.tick_now().tick.signs[device].oldest_seconds > 900
    assert device in {verdict.device for verdict in pool.admin.health.tick_now().verdicts}
    pool.evict(url)
    found = pool.admin.health.tick_now()
    assert device not in found.tick.signs
    assert device not in {verdict.device for verdict in found.verdicts}


def test_who_takes_a_device_back_stands_in_the_log(pool: Pool) -> None:
    """An operator, unless somebody else says why: the agent does (PROTOCOL 16)."""
    device, url = next(iter(pool.admin.devices.places.items()))
    pool.admin.health.tick_now()
    pool.readmit(url)
    pool.readmit(url, reason="it is back")
    pool.admin.health.forgive(device, "its columns are reconciled")
    said = [decision.reason for decision in pool.admin.health.snapshot().decisions]
    assert said == ["by an operator: readmit", "it is back", "its columns are reconciled"]
