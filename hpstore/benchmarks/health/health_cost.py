"""What the monitor costs a loader: samples per second with it and without it, by turns.

A turn is a pool and a loader of its own, so that nothing of one runs beside the other. A B, B A,
A B ...; the ratio is of neighbours. Processor time per sample, of the whole process, is beside it:
it is steadier than the clock.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import Any

from hpstore.benchmarks.harness.bench_verdicts import pairs, verdict
from hpstore.benchmarks.health.health_rig import loads, middle
from hpstore.benchmarks.health.health_slow import POOL, Arrival, SampleRows, SlowScene, costed, take
from hpstore.benchmarks.loader.loader_ours import NAME
from hpstore.loaders import Dataset

COST_BAR = 0.99
MODES = ("global", "window")
# Any: JSON
Found = dict[str, Any]


def cost_case(scene: SlowScene, turns: int, seconds: float, done: Callable[[str], None]) -> Found:
    """Throughput with the monitor to that without it, for loaders that keep nothing in memory."""
    found: Found = {"turns": turns, "seconds_a_turn": seconds, "load": loads()}
    for shuffle in MODES:
        rates: dict[bool, list[float]] = {True: [], False: []}
        costs: dict[bool, list[float]] = {True: [], False: []}
        for number in range(turns):
            for monitor in (True, False) if number % 2 else (False, True):
                rate, cost = _turn(scene, shuffle, seconds, monitor=monitor)
                rates[monitor].append(rate)
                costs[monitor].append(cost)
            done(shuffle)
        found[shuffle] = {
            "on_to_off": verdict(pairs(rates[True], rates[False]), COST_BAR, least=True),
            "processor_time_on_to_off": verdict(
                pairs(costs[True], costs[False]), None, least=False
            ),
            "on_samples_per_second": round(middle(rates[True])),
            "off_samples_per_second": round(middle(rates[False])),
            "on_us_a_sample": middle(costs[True], 2),
            "off_us_a_sample": middle(costs[False], 2),
        }
    return found


def _turn(scene: SlowScene, shuffle: str, seconds: float, *, monitor: bool) -> tuple[float, float]:
    """Return samples per second, and microseconds of processor time per sample."""
    arrivals: list[Arrival] = []
    with ExitStack() as stack:
        pool = stack.enter_context(scene.rig.open(POOL, monitor=monitor, read_only=True))
        dataset = stack.enter_context(closing(Dataset(pool, NAME)))
        loader = scene.loader(dataset, shuffle)
        stack.callback(loader.close)
        batches = stack.enter_context(SampleRows(loader))
        take(batches, scene.phases.warm, arrivals)
        return costed(batches, seconds, arrivals)
