"""From single I/Os to ticks: histograms, recorders, and what load does not change."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from hpstore.health.detect import io_recorder as recorder_module
from hpstore.health.detect.histogram import BUCKETS, LOWEST_SECONDS, FloatArray, LogHistogram
from hpstore.health.detect.io_recorder import OPERATIONS, IoOutcome, IoRecorder, Operation
from hpstore.health.detect.telemetry import Sample, Telemetry, Tick, TickConfig, size_class
from hpstore.health.detect.tick_window import Gathering
from hpstore.units import KIB, MIB

READ, WRITE, SYNC, META = Operation.READ, Operation.WRITE, Operation.SYNC, Operation.META
DEVICES = tuple(f"d{i}" for i in range(6))

times = arrays(np.float64, st.integers(0, 50), elements=st.floats(0, 1e4))


def histogram(seconds: FloatArray) -> LogHistogram:
    found = LogHistogram()
    found.add(seconds)
    return found


@given(times, times)
def test_merged_histograms_count_what_both_counted(
    one: FloatArray,
    other: FloatArray,
) -> None:
    """And are of the same size, whatever came."""
    merged = histogram(one)
    merged.merge(histogram(other))
    both = histogram(np.concatenate([one, other]))
    assert np.array_equal(merged.counts, both.counts)
    assert merged.sum_seconds == pytest.approx(both.sum_seconds)
    assert merged.total == len(one) + len(other)
    assert len(merged.counts) == BUCKETS


@given(times, st.floats(0, 1))
def test_a_quantile_is_at_most_a_bucket_above_the_true_one(
    seconds: FloatArray,
    share: float,
) -> None:
    """A quarter of an octave, 19 %, within the span of the histogram."""
    seconds = np.clip(seconds, LOWEST_SECONDS, 400)
    found = histogram(seconds).quantile(share)
    if not len(seconds):
        assert found == 0
        return
    true = float(np.quantile(seconds, share, method="inverted_cdf"))
    assert true * (1 - 1e-9) <= found <= true * 2**0.25 * (1 + 1e-9)


def test_rows_come_back_as_they_were_recorded() -> None:
    """Once; the second drain is empty."""
    recorder = IoRecorder()
    recorder.record(READ, 4096, 2, 0.5, IoOutcome.OK)
    recorder.record(SYNC, 0, 1, 0.25, IoOutcome.ERROR)
    rows = recorder.drain()
    assert rows.operation.tolist() == [READ, SYNC]
    assert rows.outcome.tolist() == [IoOutcome.OK, IoOutcome.ERROR]
    assert rows.nbytes.tolist() == [4096, 0]
    assert rows.in_flight.tolist() == [2, 1]
    assert rows.seconds.tolist() == [0.5, 0.25]
    assert len(recorder.drain().seconds) == 0


def test_nothing_is_lost_between_many_threads_and_a_drain() -> None:
    """Eight threads record while another drains all the time: each I/O comes out once."""
    recorder, count, taken = IoRecorder(), 3000, []
    done = threading.Event()

    def work(thread: int) -> None:
        for number in range(count):
            ticket = recorder.begin(0.0)
            recorder.end(ticket, READ, thread * count + number, 1.0)

    def drain() -> None:
        while not done.is_set():
            taken.append(recorder.drain().nbytes)

    drainer = threading.Thread(target=drain)
    workers = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in (drainer, *workers):
        thread.start()
    for thread in workers:
        thread.join()
    done.set()
    drainer.join()
    taken.append(recorder.drain().nbytes)
    assert sorted(np.concatenate(taken).tolist()) == list(range(8 * count))
    assert recorder.oldest_seconds(5.0) == 0


def test_rows_beyond_the_limit_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is bounded when nobody drains."""
    monkeypatch.setattr(recorder_module, "ROWS_MOST", 16)
    telemetry = Telemetry()
    recorder = telemetry.recorder("d0")
    for _ in range(25):
        recorder.record(READ, 4096, 1, 1e-3)
    assert recorder.dropped == 9
    sample = telemetry.tick(2.0).samples["d0"]
    assert (sample.ios, sample.dropped) == (16, 9)


def test_calls_in_flight_are_counted_and_the_oldest_is_known() -> None:
    """At submit, this one included; those of before a fork do not end here."""
    recorder = IoRecorder()
    first, second = recorder.begin(1.0), recorder.begin(2.0)
    assert recorder.oldest_seconds(4.0) == 3.0
    recorder.end(second, READ, 10, 4.0)
    recorder.end(first, READ, 20, 5.0)
    assert recorder.oldest_seconds(9.0) == 0
    rows = recorder.drain()
    assert rows.in_flight.tolist() == [2, 1]
    assert rows.seconds.tolist() == [2.0, 4.0]
    ticket = recorder.begin(1.0)
    recorder.reset()
    recorder.end(ticket + 100, READ, 10, 4.0)
    assert len(recorder.drain().seconds) == 0


def test_syncs_are_an_operation_of_their_own() -> None:
    """By the names that device wrappers give."""
    assert [
        OPERATIONS.get(name, META)
        for name in ("read", "write", "sync", "sync_directory", "publish")
    ] == [READ, WRITE, SYNC, SYNC, META]


class Load:
    """Six devices that take 100 us and 1 ms a MiB, times their factor."""

    def __init__(self, **config: float) -> None:
        self.telemetry = Telemetry(TickConfig(**config))  # type: ignore[arg-type]
        self.now = 0.0

    def ios(
        self,
        device: str,
        count: int,
        *,
        operation: Operation = READ,
        nbytes: int = 64 * KIB,
        depth: int = 1,
        factor: float = 1.0,
        outcome: IoOutcome = IoOutcome.OK,
    ) -> None:
        """Calls of one device; those of a deep queue wait for each other."""
        usual = {READ: 1e-4, WRITE: 3e-4, SYNC: 1e-2, META: 5e-3}[operation]
        seconds = factor * depth * (usual + 1e-3 * nbytes / MIB)
        for _ in range(count):
            self.telemetry.recorder(device).record(operation, nbytes, depth, seconds, outcome)

    def tick(self) -> Tick:
        """Two seconds later."""
        self.now += 2.0
        return self.telemetry.tick(self.now)


def ratios(tick: Tick) -> dict[str, float]:
    """Normalised means to their median."""
    means = tick.means()
    middle = float(np.median(list(means.values())))
    return {device: mean / middle for device, mean in means.items()}


def test_a_slow_device_shows_by_its_factor() -> None:
    """And the mean of the others is what their calls take."""
    load = Load()
    for device in DEVICES:
        load.ios(device, 20, factor=3.0 if device == "d0" else 1.0)
    tick = load.tick()
    assert ratios(tick) == pytest.approx({d: 3.0 if d == "d0" else 1.0 for d in DEVICES})
    assert tick.means()["d1"] == pytest.approx(1e-4 + 1e-3 / 16)
    assert tick.samples["d0"].seconds_mean == pytest.approx(3 * (1e-4 + 1e-3 / 16))


def test_sizes_and_operations_do_not_make_a_device_slow() -> None:
    """One reads MiBs, one syncs, one writes; they know each other's usual times."""
    load = Load()
    for _ in range(3):
        for device in DEVICES:
            for operation in (READ, WRITE, SYNC):
                load.ios(device, 20, operation=operation)
            load.ios(device, 20, nbytes=4 * MIB)
        load.tick()
    load.ios("d0", 20, nbytes=4 * MIB)
    load.ios("d1", 20, operation=SYNC)
    load.ios("d2", 20, operation=WRITE)
    for device in DEVICES[3:]:
        load.ios(device, 20)
    assert ratios(load.tick()) == pytest.approx(dict.fromkeys(DEVICES, 1.0))


@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_four_times_the_load_is_no_slowness_and_hides_none(factor: float) -> None:
    """Calls that wait for each other take longer; per call in flight they do not."""
    load = Load()
    for device in DEVICES:
        load.ios(
            device, 20, depth=8 if device == "d0" else 2, factor=factor if device == "d0" else 1.0
        )
    assert ratios(load.tick())["d0"] == pytest.approx(factor)


def test_a_device_with_less_load_is_compared_with_busier_peers() -> None:
    """Generously: their time at more load, as it is."""
    load = Load()
    for device in DEVICES:
        load.ios(
            device, 20, depth=2 if device == "d0" else 8, factor=20.0 if device == "d0" else 1.0
        )
    assert ratios(load.tick())["d0"] == pytest.approx(5.0)


def test_reads_through_the_page_cache_are_not_judged() -> None:
    """They are in the histogram; writes are judged."""
    load = Load()
    load.telemetry.recorder("d0", judge_reads=False)
    load.ios("d0", 50)
    load.ios("d0", 20, operation=WRITE)
    sample = load.tick().samples["d0"]
    assert dict(sample.counts) == {WRITE: 20}
    assert load.telemetry.histogram("d0", READ).total == 50
    assert load.telemetry.histogram("nobody", READ).total == 0


def test_names_are_not_judged_and_errors_tell_nothing_of_speed() -> None:
    """A call that fails at once is no fast one. Errors are signs."""
    load = Load()
    load.ios("d0", 20, operation=META)
    load.ios("d0", 20, factor=1e-3, outcome=IoOutcome.ERROR)
    load.ios("d0", 3, outcome=IoOutcome.CHECKSUM)
    tick = load.tick()
    assert "d0" not in tick.samples
    assert (tick.signs["d0"].io_errors, tick.signs["d0"].checksum_errors) == (20, 3)
    assert load.tick().signs["d0"].io_errors == 0


def test_a_device_waits_until_it_has_done_enough() -> None:
    """16 calls, or 8 large ones, at once; 4 after two seconds; fewer wait, and are forgotten."""
    load = Load(wait_seconds=3.0, forget_seconds=9.0)
    load.tick()
    load.ios("few", 15)
    load.ios("enough", 16)
    load.ios("large", 8, nbytes=MIB)
    load.ios("three", 3)
    assert load.tick().samples.keys() == {"enough", "large"}
    load.ios("few", 1)
    assert load.tick().samples.keys() == {"few"}
    load.ios("three", 1)
    assert load.tick().samples.keys() == {"three"}
    load.ios("three", 3)
    load.tick()
    load.now += 20
    load.ios("three", 3)
    assert load.tick().samples == {}


def test_means_can_be_of_some_operations() -> None:
    """Writes alone tell whether a device that reads slowly writes slowly, too."""
    load = Load()
    for device in DEVICES:
        load.ios(device, 20, factor=3.0 if device == "d0" else 1.0)
        load.ios(device, 20, operation=WRITE)
    tick = load.tick()
    writes = tick.means([WRITE])
    assert writes["d0"] == pytest.approx(writes["d1"])
    assert tick.means([READ])["d0"] == pytest.approx(3 * tick.means([READ])["d1"])
    assert tick.means([SYNC]) == {}


def test_calls_that_fail_are_no_fast_ones() -> None:
    """A device that fails all reads at once would show the best latency of all."""
    load = Load()
    load.ios("d0", 20)
    recorder = load.telemetry.recorder("d0")
    recorder.record(READ, 0, 1, 0.0, IoOutcome.ERROR, 1000)
    assert load.tick().signs["d0"].io_errors == 1000
    assert load.telemetry.histogram("d0", READ).total == 20


def test_what_is_usual_is_forgotten_slowly_and_devices_at_once() -> None:
    """Quantiles cover one to two spans."""
    load = Load(histogram_seconds=10.0)
    load.ios("d0", 20)
    for _ in range(5):
        load.tick()
    assert load.telemetry.histogram("d0", READ).total == 20
    for _ in range(14):
        load.tick()
    assert load.telemetry.histogram("d0", READ).total == 0
    load.telemetry.forget("d0")
    assert load.tick().signs == {}


def test_signs_tell_of_hangs_and_what_is_usual() -> None:
    """Age of the oldest call, and the device's own p99.9."""
    load = Load()
    load.ios("d0", 20)
    load.telemetry.recorder("d0").begin(1.5)
    sign = load.tick().signs["d0"]
    assert sign.oldest_seconds == 0.5
    assert sign.usual_seconds_p999 == pytest.approx(1e-4 + 1e-3 / 16, rel=0.2)
    load.telemetry.after_fork()
    assert load.tick().signs["d0"].oldest_seconds == 0


def test_a_row_of_many_counts_as_many() -> None:
    """A batch of 40 alike is noted once: same sample, same histogram, as 40 rows."""
    one, many = Telemetry(), Telemetry()
    for device in DEVICES:
        one.recorder(device).record(READ, 12 * KIB, 8, 1e-3, count=40)
        for _ in range(40):
            many.recorder(device).record(READ, 12 * KIB, 8, 1e-3)
    found, wanted = one.tick(2.0), many.tick(2.0)
    assert found.means() == pytest.approx(wanted.means())
    for device, sample in wanted.samples.items():
        same = found.samples[device]
        assert (same.ios, same.nbytes, same.counts) == (sample.ios, sample.nbytes, sample.counts)
    for device in DEVICES:
        counts = one.histogram(device, READ).counts
        assert np.array_equal(counts, many.histogram(device, READ).counts)
    assert one.deadlines(0.95, 3) == many.deadlines(0.95, 3)


def test_deadlines_are_those_of_the_others_by_size() -> None:
    """A slow device does not set its own; a size that is hardly read has none."""
    telemetry = Telemetry()
    for device in DEVICES:
        seconds = 0.5 if device == "d0" else 1e-3
        for _ in range(10):
            telemetry.recorder(device).record(READ, 4 * MIB, 1, seconds)
        telemetry.recorder(device).record(READ, 64 * KIB, 1, seconds)
        telemetry.recorder(device).record(WRITE, 4 * MIB, 1, seconds, count=99)
    telemetry.tick(1.0)
    found = telemetry.deadlines(0.9, len(DEVICES))
    large = size_class(4 * MIB)
    assert 1e-3 <= found["d0"][large] <= 1e-3 * 2**0.25
    assert telemetry.deadlines(0.95, len(DEVICES))["d1"][large] >= 0.5
    assert telemetry.deadlines(0.95, len(DEVICES) - 2)["d1"][large] < 2e-3
    assert all(row[size] == 0 for row in found.values() for size in range(16) if size != large)


def test_reads_that_were_given_up_count_where_they_took_long() -> None:
    """A spare that is quicker must not hide the device; a read that is closed at once is no quick
    one, and none of them is learnt from."""
    telemetry = Telemetry()
    for device in DEVICES:
        for _ in range(40):
            telemetry.recorder(device).record(READ, 64 * KIB, 1, 1e-3)
    telemetry.tick(1.0)
    for device in DEVICES:
        seconds = 20e-3 if device == "d0" else 1e-4
        for _ in range(40):
            telemetry.recorder(device).record(READ, 64 * KIB, 1, seconds, IoOutcome.CUT)
    found = telemetry.tick(2.0)
    assert found.means() == {"d0": pytest.approx(20e-3)}
    assert telemetry.histogram("d0", READ).total == 40


def test_reads_of_a_page_cache_set_no_deadline() -> None:
    telemetry = Telemetry()
    for device in DEVICES:
        recorder = telemetry.recorder(device, judge_reads=False)
        recorder.record(READ, 4 * MIB, 1, 1e-6, count=100)
    telemetry.tick(1.0)
    assert not any(map(any, telemetry.deadlines(0.95, 3).values()))


@given(st.integers(1, 1 << 27))
def test_a_size_class_holds_what_its_cell_holds(nbytes: int) -> None:
    """Powers of two of 4 KiB; what is above 64 MiB is one."""
    found = size_class(nbytes)
    assert nbytes <= 4 * KIB * 2**found or found == 15
    assert found == 0 or nbytes > 4 * KIB * 2 ** (found - 1)


def sampled(now_seconds: float, **ios: int) -> Tick:
    """A tick in which these devices have samples of so many reads, that take 1 ms each."""
    samples = {
        device: Sample(
            ios=count,
            nbytes=count * KIB,
            errors=0,
            dropped=0,
            seconds_mean=1e-3,
            scores={READ: float(count)},
            counts={READ: count},
        )
        for device, count in ios.items()
    }
    return Tick(now_seconds=now_seconds, reference_seconds=1.0, samples=samples, signs={})


def test_samples_wait_for_those_of_peers_that_are_used_too() -> None:
    """Devices that are due in turn are judged together; a busy pool at every tick."""
    gathering = Gathering()
    both = gathering.add(sampled(1.0, a=20, b=20))
    assert both is not None
    assert both.means().keys() == {"a", "b"}
    assert gathering.add(sampled(2.0, a=10)) is None
    late = gathering.add(sampled(3.0, b=30, a=30))
    assert late is not None
    assert late.means() == {"a": pytest.approx((10 * 10 + 30 * 30) / 40), "b": 30.0}
    assert (late.samples["a"].ios, late.samples["a"].counts) == (40, {READ: 40})
    assert gathering.add(sampled(4.0)) is None


def test_samples_do_not_wait_for_ever_nor_for_a_device_that_is_idle() -> None:
    gathering = Gathering()
    assert gathering.add(sampled(1.0, a=20, b=20)) is not None
    assert gathering.add(sampled(2.0, a=20)) is None
    assert gathering.add(sampled(5.9)) is None
    assert gathering.add(sampled(6.0)) is not None
    assert gathering.add(sampled(12.0, a=20)) is not None
