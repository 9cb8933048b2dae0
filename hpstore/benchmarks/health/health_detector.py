"""The slow detector on made-up times: how soon a slow device is found, how often a well one is.

A device is *found* at its first verdict, suspect: from there on reads are planned round it. Bars
are those of issue 6. Everything is seeded; only the cost of telemetry depends on the machine.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from hpstore.benchmarks.health.health_peers import DetectionRule, HpstoreDetector
from hpstore.benchmarks.health.health_traces import (
    BARRED,
    DEVICES,
    HEALTHY,
    ONSET,
    ROUGH_SIGMA,
    SHAPES,
    SIGMAS,
    TICK_SECONDS,
    USUAL_SECONDS,
    HealthTrace,
    SlowShape,
    healthy_trace,
    slow_trace,
)
from hpstore.health import Signs, SlowDetector
from hpstore.health.detect.io_recorder import IoRecorder, Operation
from hpstore.health.detect.telemetry import Telemetry

LOAD_TICKS = 300
_READ_BYTES = 12 * 1024

Row = dict[str, object]


def first_found(
    rule: DetectionRule, trace: HealthTrace
) -> tuple[list[int | None], list[int | None]]:
    """The tick of each device's first verdict, and of the first that it should sit out."""
    found: list[int | None] = [None] * DEVICES
    out: list[int | None] = [None] * DEVICES
    for number in range(len(trace.means)):
        for which, devices in zip(
            (found, out), rule.tick(number * TICK_SECONDS, trace.tick(number)), strict=True
        ):
            for device in devices:
                index = int(device[1:])
                which[index] = number if which[index] is None else which[index]
    return found, out


def slow_devices(runs: int, rules: Mapping[str, Callable[..., DetectionRule]]) -> dict[str, object]:
    """Recall and delay in ticks, by shape, noise and rule."""
    rows: dict[str, object] = {}
    for name, shape in SHAPES.items():
        for sigma in (*SIGMAS, ROUGH_SIGMA):
            traces = [slow_trace(shape, sigma, seed) for seed in range(runs)]
            bar = shape.within if sigma in SIGMAS else None
            rows[f"{name}, sigma {sigma}"] = {
                rule: _delays(
                    [first_found(make({}), trace) for trace in traces],
                    shape,
                    bar if rule == "hpstore" else None,
                )
                for rule, make in rules.items()
            }
    return rows


def _delays(
    found: Sequence[tuple[list[int | None], list[int | None]]], shape: SlowShape, bar: int | None
) -> Row:
    """Ticks from the onset to the first verdict on the slow device, the tick itself counted."""
    delays = [_since_onset(first[0]) for first, _ in found]
    sitouts = [_since_onset(out[0]) for _, out in found]
    known = sorted(delay for delay in delays if delay is not None)
    row: Row = {
        "runs": len(found),
        "recall": round(len(known) / len(found), 3),
        "ticks_median": statistics.median(known) if known else None,
        "ticks_most": known[-1] if len(known) == len(found) else None,
        "sitout_recall": round(sum(d is not None for d in sitouts) / len(found), 3),
        "others_found": sum(tick is not None for first, _ in found for tick in first[1:]),
    }
    if shape.within is not None:
        row["recall_in_time"] = round(sum(d <= shape.within for d in known) / len(found), 3)
    if bar is not None:
        row |= {"bar": f"recall 1.0 within {bar} ticks", "met": row["recall_in_time"] == 1.0}
    return row


def _since_onset(tick: int | None) -> int | None:
    """None for no verdict; one before the onset is a false alarm that counts as found at once."""
    return None if tick is None else max(1, tick - ONSET + 1)


def healthy_devices(
    hours: int, rules: Mapping[str, Callable[..., DetectionRule]], ticks: int
) -> dict[str, object]:
    """Devices that were found though all were well, by case, noise and rule."""
    rows: dict[str, object] = {}
    for name in HEALTHY:
        for sigma in (*SIGMAS, ROUGH_SIGMA):
            traces = [healthy_trace(name, sigma, seed, ticks) for seed in range(hours)]
            rows[f"{name}, sigma {sigma}"] = {
                rule: _alarms(
                    make,
                    traces,
                    barred=rule == "hpstore" and name in BARRED and sigma in SIGMAS,
                )
                for rule, make in rules.items()
            }
    return rows


def _alarms(
    make: Callable[..., DetectionRule], traces: Sequence[HealthTrace], *, barred: bool
) -> Row:
    """False alarms: each time a device enters the set of suspects."""
    alarms = out = 0
    for trace in traces:
        rule, before, before_out = make(trace.traits), set[str](), set[str]()
        for number in range(len(trace.means)):
            found, sits = rule.tick(number * TICK_SECONDS, trace.tick(number))
            alarms += len(found - before)
            out += len(sits - before_out)
            before, before_out = found, sits
    days = sum(trace.means.size for trace in traces) * TICK_SECONDS / 86400
    row: Row = {
        "device_hours": round(24 * days, 1),
        "alarms": alarms,
        "alarms_a_device_day": round(alarms / days, 3),
        "sitouts": out,
    }
    if barred:
        row |= {"bar": "no alarm", "met": alarms == 0}
    return row


def load(runs: int, ticks: int) -> dict[str, object]:
    """One device has four times the calls in flight, each of which takes four times as long.

    Through recorders and ticks; `plain means` is what the detector would say without them.
    """
    rows: dict[str, object] = {}
    for name, factor, bar in (("4 x the load, well", 1.0, None), ("4 x the load, x3 slow", 3.0, 6)):
        normal, plain = [], []
        for seed in range(runs):
            trace, raw = _loaded(seed, ticks, factor)
            normal.append(first_found(HpstoreDetector({}), trace)[0])
            plain.append(first_found(HpstoreDetector({}), raw)[0])
        for how, found in (("hpstore", normal), ("plain means", plain)):
            delays = [_since_onset(first[0]) for first in found]
            known = [delay for delay in delays if delay is not None]
            row: Row = {
                "runs": runs,
                "found": len(known),
                "ticks_most": max(known, default=None),
                "others_found": sum(t is not None for first in found for t in first[1:]),
            }
            if how == "hpstore":
                in_time = [delay for delay in known if bar is None or delay <= bar]
                good = len(in_time) == runs if bar is not None else not known
                row |= {"bar": f"all within {bar} ticks" if bar else "none", "met": good}
            rows[f"{name}, {how}"] = row
    return rows


def _loaded(seed: int, ticks: int, factor: float) -> tuple[HealthTrace, HealthTrace]:
    """Normalised and plain means of such a pool; the first device is slow from ONSET on."""
    rng = np.random.default_rng([2000 + seed])
    telemetry, normal, plain = Telemetry(), [], []
    recorders = [telemetry.recorder(f"d{i}") for i in range(DEVICES)]
    telemetry.tick(0.0)
    for number in range(ticks):
        means = []
        for index, recorder in enumerate(recorders):
            depth = 8 if index == 0 else 2
            usual = USUAL_SECONDS * depth / 2 * (factor if index == 0 and number >= ONSET else 1)
            times = usual * rng.lognormal(-0.18, 0.6, 16)
            for seconds in times:
                recorder.record(Operation.READ, _READ_BYTES, depth, float(seconds))
            means.append(float(times.mean()))
        found = telemetry.tick(TICK_SECONDS * (number + 1)).means()
        normal.append([found[f"d{i}"] for i in range(DEVICES)])
        plain.append(means)
    return HealthTrace(means=np.array(normal)), HealthTrace(means=np.array(plain))


def hang() -> dict[str, object]:
    """A call that does not return, seen each tick: seconds until each verdict."""
    detector = SlowDetector()
    began: dict[str, float] = {}
    usual = {f"d{i}": USUAL_SECONDS for i in range(1, DEVICES)}
    for number in range(30):
        age = TICK_SECONDS * number
        for verdict in detector.tick(age, usual, {"d0": Signs(oldest_seconds=age)}):
            began.setdefault(str(verdict.state), age)
    return {"seconds_until": began}


def telemetry(repeats: int, count: int) -> dict[str, object]:
    """Nanoseconds an I/O, the best of the repeats: on its thread, and in the tick.

    What that is of a loader's throughput: health_cost.py.
    """
    on_thread, in_tick = [], []
    for _ in range(repeats):
        recorder, telemetry = IoRecorder(), Telemetry()
        began = time.perf_counter()
        for _ in range(count):
            recorder.end(recorder.begin(1.0), Operation.READ, _READ_BYTES, 1.001)
        on_thread.append(time.perf_counter() - began)
        shared = telemetry.recorder("d0")
        for _ in range(count):
            shared.record(Operation.READ, _READ_BYTES, 2, 1e-3)
        began = time.perf_counter()
        telemetry.tick(1.0)
        in_tick.append(time.perf_counter() - began)
    return {
        "begin_and_end_ns": round(min(on_thread) / count * 1e9),
        "tick_ns_an_io": round(min(in_tick) / count * 1e9),
    }
