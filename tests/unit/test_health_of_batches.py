"""What a batch of reads tells of its devices, made up: who has few reads, who is slow."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpstore.devices.io_uring import RingBatch
from hpstore.health.detect.io_recorder import Operation
from hpstore.health.detect.metered_device import DeviceMeter
from hpstore.health.detect.telemetry import Telemetry
from hpstore.objects.read.batch_timing import BatchMeter
from hpstore.units import KIB, MIB

DEVICES = [f"d{index}" for index in range(6)]
READS = dict(zip(DEVICES, (9, 8, 10, 7, 9, 3), strict=True))  # who has few is seldom in a batch


class Batches:
    """Batches of reads that took made-up times, and what telemetry makes of them."""

    def __init__(self) -> None:
        self.telemetry = Telemetry()
        meters = {
            d: DeviceMeter(self.telemetry.recorder(d), lambda: 0.0, lambda: None) for d in DEVICES
        }
        routing = SimpleNamespace(meter=meters.get, timed=lambda: True)
        clock = SimpleNamespace(monotonic=lambda: 0.0)
        self._store: Any = SimpleNamespace(routing=routing, clock=clock)

    def read(
        self,
        reads: Mapping[str, int],
        seconds: Mapping[str, float],
        *,
        nbytes: int = MIB,
        results: Mapping[str, int] | None = None,
        most: int = 96,
    ) -> None:
        """A batch whose reads took so long, by device."""
        counts = list(reads.values())
        meter = BatchMeter(self._store, reads, most)
        sizes = np.full(sum(counts), nbytes)
        found = np.repeat([(results or {}).get(device, nbytes) for device in reads], counts)
        times = np.repeat([float(seconds[device]) for device in reads], counts)
        meter.end(RingBatch(found, None, times), sizes)

    def calls(self, seconds: float, *, in_flight: int, nbytes: int = MIB, count: int = 20) -> None:
        """Calls of each device that were made one by one."""
        for device in DEVICES:
            recorder = self.telemetry.recorder(device)
            for _ in range(count):
                recorder.record(Operation.READ, nbytes, in_flight, seconds)

    def means(self) -> dict[str, float]:
        return self.telemetry.tick(2.0).means()


def ratios(means: Mapping[str, float]) -> dict[str, float]:
    middle = float(np.median(list(means.values())))
    return {device: mean / middle for device, mean in means.items()}


def test_a_device_with_few_reads_of_a_batch_is_no_slower_than_the_batch() -> None:
    """All were seen to have ended at once. Its three are no three calls of an idle device, which
    take a tenth: the benchmark's data set of two shards had a device sit out by that."""
    batches = Batches()
    batches.calls(5e-3, in_flight=3)
    for _ in range(20):
        batches.read(READS, dict.fromkeys(DEVICES, 50e-3))
    found = ratios(batches.means())
    assert max(found.values()) < 1.2
    assert min(found.values()) > 0.7


def test_calls_of_their_own_are_not_measured_by_batches() -> None:
    """In the size and depth of a batch's reads: a slow device's calls still stand out."""
    batches = Batches()
    batches.calls(5e-3, in_flight=30)
    for _ in range(20):
        batches.read(READS, dict.fromkeys(DEVICES, 50e-3))
    batches.telemetry.tick(2.0)
    batches.calls(5e-3, in_flight=30)
    batches.telemetry.recorder("d1").record(Operation.READ, MIB, 30, 40e-3, count=20)
    means = batches.telemetry.tick(4.0).means()
    assert ratios(means)["d1"] == pytest.approx((20 * 1 + 20 * 8) / 40, rel=0.1)


def test_what_an_ordinary_read_takes_is_that_of_batches_too() -> None:
    """Thresholds are in seconds, also where there is nothing but batches."""
    batches = Batches()
    batches.read(dict.fromkeys(DEVICES, 8), dict.fromkeys(DEVICES, 50e-3))
    tick = batches.telemetry.tick(2.0)
    assert tick.reference_seconds == pytest.approx(50e-3)
    assert tick.means() == pytest.approx(dict.fromkeys(DEVICES, 50e-3))


def test_batches_of_an_hour_ago_are_forgotten() -> None:
    """As single calls are: half of them in ten minutes."""
    batches = Batches()
    batches.telemetry.tick(0.0)
    batches.read(dict.fromkeys(DEVICES, 8), dict.fromkeys(DEVICES, 50e-3))
    batches.telemetry.tick(2.0)
    batches.calls(5e-3, in_flight=1)
    assert batches.telemetry.tick(3602.0).reference_seconds == pytest.approx(5e-3, rel=0.1)


@pytest.mark.parametrize("slow", DEVICES)
@pytest.mark.parametrize("shared", [True, False])
def test_a_slow_device_of_a_batch_stands_out(slow: str, shared: bool) -> None:
    """However many reads it has, where all share a disk and where each works for itself."""
    batches = Batches()
    works = {device: 1.0 if shared else READS[device] / 8 for device in DEVICES}
    works[slow] *= 8.0
    for _ in range(20):
        batches.read(READS, {device: 10e-3 * work for device, work in works.items()})
    found = ratios(batches.means())
    assert max(found, key=lambda device: found[device]) == slow
    assert found[slow] >= 2.5


counts = st.lists(st.integers(1, 60), min_size=6, max_size=6)


@given(counts, st.sampled_from(["shared", "reads", "bytes"]))
def test_nobody_looks_slow_by_how_much_it_has_to_read(reads: list[int], way: str) -> None:
    """Whether devices share what takes the time, or each works through its reads or bytes."""
    batches, wanted = Batches(), dict(zip(DEVICES, reads, strict=True))
    seconds = {d: 1e-3 if way == "shared" else 1e-3 * n for d, n in wanted.items()}
    sizes = {device: 4 * KIB * (1 + index) for index, device in enumerate(DEVICES)}
    if way == "bytes":
        seconds = {d: 1e-9 * n * sizes[d] for d, n in wanted.items()}
    _read_sizes(batches, wanted, seconds, sizes)
    rows = [batches.telemetry.recorder(device).drain() for device in DEVICES]
    assert max(row.seconds[0] / row.usual[0] for row in rows) <= 1 + 1e-9


def _read_sizes(
    batches: Batches,
    reads: Mapping[str, int],
    seconds: Mapping[str, float],
    sizes: Mapping[str, int],
) -> None:
    """As `read`, with the size of each device's reads."""
    counts = list(reads.values())
    flat = np.repeat([sizes[device] for device in reads], counts)
    times = np.repeat([seconds[device] for device in reads], counts)
    BatchMeter(batches._store, reads).end(RingBatch(flat, None, times), flat)


def test_a_batch_of_two_devices_is_measured_as_calls_are() -> None:
    """Two tell nobody which of them is the slow one; all of the batch is in flight."""
    batches = Batches()
    batches.read({"d0": 4, "d1": 20}, {"d0": 10e-3, "d1": 30e-3}, most=16)
    rows = batches.telemetry.recorder("d0").drain()
    assert (rows.usual.tolist(), rows.in_flight.tolist()) == ([0.0], [16])


def test_who_failed_is_nobodys_measure() -> None:
    """Nor one whose reads did not end, which is left out likewise."""
    batches = Batches()
    reads = dict.fromkeys(DEVICES[:4], 2)
    seconds = {"d0": 1e-6, "d1": 10e-3, "d2": 20e-3, "d3": 30e-3}
    batches.read(reads, seconds, results={"d0": -5})
    found = {d: batches.telemetry.recorder(d).drain() for d in reads}
    assert [found[d].usual.tolist() for d in ("d1", "d2", "d3")] == [[20e-3]] * 3
    assert found["d0"].seconds.tolist() == [0.0]  # an error, which says nothing of time
