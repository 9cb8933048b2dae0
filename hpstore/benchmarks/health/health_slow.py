"""One device of eight turns slow (10 MB/s) while a loader or readers are at work: before and after.

Each run is a pool of its own: time while all is well, the onset, ten seconds in which the device
may be found, then the time that counts. The same with the monitor switched off. Nothing is read
from a page cache: reads are direct, through loop devices that read their images past it.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from typing import Any

from hpstore.benchmarks.harness.bench_verdicts import verdict
from hpstore.benchmarks.health.health_reads import KINDS, ForegroundReads, Objects
from hpstore.benchmarks.health.health_rig import DATA, Rig, interleaved, loads, middle
from hpstore.benchmarks.loader.loader_data import BATCH, Data
from hpstore.benchmarks.loader.loader_ours import NAME, share_on, write_data_set
from hpstore.health.snapshot import Round
from hpstore.loaders import DataLoader, Dataset, LoaderMemory
from hpstore.pool.pool import Pool
from hpstore.runtime.closing import Closing
from hpstore.units import MIB

POOL, SHARD_BYTES = "loader", 64 * MIB  # not few: the slow device has about an eighth of the data
WINDOW_BAR, GLOBAL_BAR, P99_BAR = 0.95, 0.6, 2.0
WINDOW_BYTES = 64 * MIB  # the loader's default
BARS = {"window": WINDOW_BAR, "global": GLOBAL_BAR}
ON, OFF = "monitor on", "monitor off"
OFF_REPEATS = 1  # it has no bar
LASTING_SECONDS = 2.0
COUNTERS = (
    "read_avoided_total",
    "read_hedged_total",
    "read_rerouted_total",
    "read_hedge_won_total",
    "read_hedge_refused_total",
    "read_hedge_without_memory_total",
    "read_degraded_total",
    "read_probe_total",
    "fill_without_memory_total",
    "scatter_without_memory_total",
    "column_read_error_total",
)
# Any: JSON
Found = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPhases:
    """Seconds of a run. Without a monitor nothing is found, so nothing is waited for."""

    warm: float = 1.0
    healthy: float = 4.0
    found: float = 10.0  # from the onset on
    found_off: float = 2.0
    counted: float = 4.0

    def waited(self, monitor: bool) -> float:
        """From the onset until what counts begins."""
        return self.found if monitor else self.found_off


QUICK = RunPhases(warm=0.5, healthy=1.5, found=8.0, found_off=1.0, counted=1.5)


class SlowScene:
    """The pool that all runs open: a dataset, and objects for single reads."""

    def __init__(self, rig: Rig, data: Data, objects: Objects, phases: RunPhases) -> None:
        self.rig, self.data, self.objects, self.phases = rig, data, objects, phases
        rig.create(POOL)
        with rig.open(POOL, monitor=False) as pool:
            write_data_set(pool, data, shard_bytes=SHARD_BYTES)
            objects.write(pool)
        rig.drop_cached()
        places = rig.directories(POOL)
        self.share = share_on(places, places[:1], DATA)
        self._seed = 0

    def facts(self) -> Found:
        """What was there, and what arithmetic leaves of random reads: k of them for each lost."""
        return {
            "samples": self.data.rows,
            "bytes": self.data.nbytes,
            "share_of_data_on_slow_device": round(self.share, 4),
            "global_limit_by_arithmetic": round(1 / (1 + (DATA - 1) * self.share), 3),
            "in_page_cache": round(self.rig.cached_share(POOL), 4),
        }

    def loader(self, dataset: Dataset, shuffle: str) -> DataLoader:
        """One that keeps nothing: of an epoch at most a quarter is in memory for its windows."""
        window = min(WINDOW_BYTES, self.data.nbytes // 16)
        memory = LoaderMemory(window_bytes=window)
        return DataLoader(dataset, BATCH, shuffle=shuffle, cache=0, seed=self.seed(), memory=memory)

    def seed(self) -> int:
        """Another one for each run."""
        self._seed += 1
        return self._seed


# --- loaders ----------------------------------------------------------------------------------


def loader_case(scene: SlowScene, shuffle: str, repeats: int, done: Callable[[str], None]) -> Found:
    """Throughput with one slow device to that without, with the monitor and without it."""
    runs = {
        ON: partial(_loader_run, scene, shuffle, monitor=True),
        OFF: partial(_loader_run, scene, shuffle, monitor=False),
    }
    rows: Found = {}
    for who, ones in _by_turns(runs, repeats, done).items():
        bar = BARS[shuffle] if who == ON else None
        rows[who] = {
            "to_healthy": verdict([one["ratio"] for one in ones], bar, least=True),
            **{
                f"{name}_samples_per_second": round(
                    middle([one[f"{name}_per_second"] for one in ones])
                )
                for name in ("healthy", "slow")
            },
            **{
                f"{name}_us_a_sample": middle([one[f"{name}_us"] for one in ones], 2)
                for name in ("healthy", "slow")
            },
            "seconds_until_bar": spoken([one["seconds_until_bar"] for one in ones]),
            **_common(ones),
        }
    return rows


def _loader_run(scene: SlowScene, shuffle: str, *, monitor: bool) -> Found:
    rig, phases, load = scene.rig, scene.phases, loads()
    arrivals: list[Arrival] = []
    with ExitStack() as stack:
        stack.enter_context(rig.relieved())
        pool = stack.enter_context(rig.open(POOL, monitor=monitor, read_only=True))
        dataset = stack.enter_context(closing(Dataset(pool, NAME)))
        loader = scene.loader(dataset, shuffle)
        stack.callback(loader.close)
        batches = stack.enter_context(SampleRows(loader))
        take(batches, phases.warm, arrivals)
        healthy, healthy_cost = costed(batches, phases.healthy, arrivals)
        watch = SlowWatch(pool, rig.first(pool))
        rig.slow()
        take(batches, phases.waited(monitor), arrivals)
        slow, slow_cost = costed(batches, phases.counted, arrivals)
        facts = watch.facts()
        rig.slow(0)  # what is under way ends
    return {
        "ratio": slow / healthy,
        "healthy_per_second": healthy,
        "slow_per_second": slow,
        "healthy_us": healthy_cost,
        "slow_us": slow_cost,
        "seconds_until_bar": seconds_until(arrivals, watch.onset, BARS[shuffle] * healthy),
        **facts,
        "load": load,
    }


class SampleRows(Closing):
    """Samples of each batch, epoch after epoch. Closing it waits until nothing is read for it."""

    def __init__(self, loader: DataLoader) -> None:
        self._loader, self._batches = loader, iter(loader)

    def __iter__(self) -> SampleRows:
        return self

    def __next__(self) -> int:
        while True:
            for batch in self._batches:
                return len(batch["label"])
            self._batches = iter(self._loader)

    def close(self) -> None:
        run = self._batches._run
        if run is not None:
            run.close()


Arrival = tuple[float, int]  # when, and how many samples were there in all then


def take(batches: Iterator[int], seconds: float, arrivals: list[Arrival]) -> float:
    """Take batches for `seconds`; return samples per second.

    They count from the last batch before to the last one.
    """
    before = arrivals[-1] if arrivals else (time.monotonic(), 0)
    until, total, now = time.monotonic() + seconds, before[1], before[0]
    while now < until:
        total += next(batches)
        now = time.monotonic()
        arrivals.append((now, total))
    return (total - before[1]) / (now - before[0])


def costed(batches: Iterator[int], seconds: float, arrivals: list[Arrival]) -> tuple[float, float]:
    """As take(), and microseconds of processor time a sample, of the whole process."""
    before, worked = arrivals[-1][1] if arrivals else 0, time.process_time()
    rate = take(batches, seconds, arrivals)
    return rate, (time.process_time() - worked) / (arrivals[-1][1] - before) * 1e6


def seconds_until(arrivals: list[Arrival], onset: float, bar: float) -> float | None:
    """Seconds after the onset from which on two seconds had `bar` samples each. Pure."""
    ends = [when for when, _ in arrivals]
    for at in range(bisect_left(ends, onset), len(arrivals)):
        later = bisect_left(ends, ends[at] + LASTING_SECONDS)
        if later == len(arrivals):
            return None
        rate = (arrivals[later][1] - arrivals[at][1]) / (ends[later] - ends[at])
        if rate >= bar:
            return max(0.0, ends[at] - onset)
    return None


class SlowWatch:
    """When this process found the slow device, and whether it blamed another. From the onset on."""

    def __init__(self, pool: Pool, slow: str) -> None:
        self._pool, self._slow = pool, slow
        self.onset = time.monotonic()
        self._first: dict[str, float] = {}  # device -> seconds until its first verdict
        self._before = {name: pool.metrics.value(name) for name in COUNTERS}
        pool.admin.health.listen(self._look)

    def _look(self, found: Round) -> None:
        """After a tick, by the monitor's thread."""
        for one in found.verdicts:
            self._first.setdefault(one.device, time.monotonic() - self.onset)

    def facts(self) -> Found:
        """What was found until now."""
        sight = self._pool.admin.health.snapshot().devices.get(self._slow)
        counted = {n: self._pool.metrics.value(n) - self._before[n] for n in COUNTERS}
        return {
            "seconds_until_found": self._first.get(self._slow),
            "others_found": len(self._first.keys() - {self._slow}),
            "state": "" if sight is None else str(sight.state),
            "counters": {name: count for name, count in counted.items() if count},
        }


# --- reads ------------------------------------------------------------------------------------


def reads_case(scene: SlowScene, repeats: int, done: Callable[[str], None]) -> Found:
    """p99 of reads with one slow device to that without, with the monitor and without it."""
    runs = {
        ON: partial(_reads_run, scene, monitor=True),
        OFF: partial(_reads_run, scene, monitor=False),
    }
    rows: Found = {}
    for who, ones in _by_turns(runs, repeats, done).items():
        rows[who] = {
            **{
                f"p99_of_{kind}_to_healthy": verdict(
                    [one["ratio"][kind] for one in ones],
                    P99_BAR if who == ON else None,
                    least=False,
                )
                for kind in KINDS
            },
            **{
                f"{name}_of_{kind}_ms": middle([one[name][kind] for one in ones], 2)
                for kind in KINDS
                for name in ("healthy_p99", "slow_p99")
            },
            **_common(ones),
        }
    return rows


def _reads_run(scene: SlowScene, *, monitor: bool) -> Found:
    rig, phases, load = scene.rig, scene.phases, loads()
    with rig.relieved(), rig.open(POOL, monitor=monitor, read_only=True) as pool:
        with ForegroundReads(pool, scene.objects, seed=scene.seed()) as reads:
            time.sleep(phases.warm)
            began = time.monotonic()
            time.sleep(phases.healthy)
            watch = SlowWatch(pool, rig.first(pool))
            rig.slow()
            time.sleep(phases.waited(monitor))
            after = time.monotonic()
            time.sleep(phases.counted)
            until, facts = time.monotonic(), watch.facts()
            rig.slow(0)
        healthy, slow = reads.p99(began, watch.onset), reads.p99(after, until)
    return {
        "healthy_p99": healthy,
        "slow_p99": slow,
        "ratio": {kind: slow[kind] / healthy[kind] for kind in KINDS},
        **facts,
        "load": load,
    }


# --- both -------------------------------------------------------------------------------------


def _by_turns(
    runs: Mapping[str, Callable[[], Found]], repeats: int, done: Callable[[str], None]
) -> dict[str, list[Found]]:
    """What the runs found, one after the other; without the monitor once."""
    found: dict[str, list[Found]] = {who: [] for who in runs}
    for who, one in interleaved(runs, {ON: repeats, OFF: OFF_REPEATS}):
        found[who].append(one)
        done(who)
    return found


def _common(ones: Sequence[Found]) -> Found:
    """What every run says of itself."""
    known = [one["seconds_until_found"] for one in ones]
    return {
        "seconds_until_found": spoken(known),
        "state": ", ".join(one["state"] for one in ones),
        "others_found": sum(one["others_found"] for one in ones),
        "counters_of_the_last": ones[-1]["counters"],
        "loads": [one["load"] for one in ones],
    }


def spoken(values: Sequence[float | None]) -> list[float | str]:
    """Seconds, in words where there are none."""
    return ["never" if value is None else round(value, 1) for value in values]
