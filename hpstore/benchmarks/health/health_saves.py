"""Checkpoints while one device of eight is slow (10 MB/s): time until a save is durable.

Saves every few seconds, beside readers of the same process (a trainer's data, by which a slow
device is found) and without any. Saves until ten seconds after the onset are reported, and do not
count; the ratio is of the median of three saves after them to that of three before the onset.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

from hpstore.benchmarks.checkpoint.checkpoint_ours import make_checkpointer
from hpstore.benchmarks.checkpoint.checkpoint_state import (
    State,
    TensorContents,
    empty_state,
    state_bytes,
)
from hpstore.benchmarks.harness.bench_verdicts import verdict
from hpstore.benchmarks.health.health_reads import ForegroundReads, Objects
from hpstore.benchmarks.health.health_rig import Rig, interleaved, loads, middle
from hpstore.benchmarks.health.health_slow import SlowWatch, spoken
from hpstore.checkpoint import Checkpointer
from hpstore.units import GIB, MIB

POOL, KEPT_STEPS, COUNTED = "saves", 2, 3
DURABLE_BAR = 1.3
READING, ALONE, OFF = "beside readers", "nothing else", "monitor off, beside readers"
OTHER_REPEATS = 1  # of those that only stand beside it
PREPARE_SECONDS = 60.0
# Any: JSON
Found = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """How much is saved, and when."""

    state_bytes: int = 256 * MIB
    every_seconds: float = 1.5
    found_seconds: float = 10.0  # from the onset on
    objects: Objects = field(default_factory=Objects)  # that readers read


QUICK = Pattern(
    state_bytes=24 * MIB, every_seconds=0.5, found_seconds=8.0, objects=Objects(count=4)
)


class Saves:
    """A pool, a state, and saves of it."""

    def __init__(self, rig: Rig, pattern: Pattern) -> None:
        self.rig, self.pattern = rig, pattern
        rig.create(POOL, recycle_bytes=2 * GIB)
        with rig.open(POOL, monitor=False) as pool:
            pattern.objects.write(pool)
        self.state: State = empty_state(pattern.state_bytes)
        self._content, self._steps = TensorContents(), count(1)

    def case(self, repeats: int, done: Callable[[str], None]) -> Found:
        """Ratios, with the monitor and without it, beside readers and alone."""
        runs = {
            READING: partial(self._run, monitor=True, readers=True),
            ALONE: partial(self._run, monitor=True, readers=False),
            OFF: partial(self._run, monitor=False, readers=True),
        }
        found: dict[str, list[Found]] = {who: [] for who in runs}
        for who, one in interleaved(
            runs, {READING: repeats, ALONE: OTHER_REPEATS, OFF: OTHER_REPEATS}
        ):
            found[who].append(one)
            done(who)
        rows: Found = {"state_bytes": state_bytes(self.state)}
        for who, ones in found.items():
            bar = None if who == OFF else DURABLE_BAR
            rows[who] = {
                "durable_to_healthy": verdict([one["ratio"] for one in ones], bar, least=False),
                "healthy_seconds": middle([one["healthy"] for one in ones]),
                "slow_seconds": middle([one["slow"] for one in ones]),
                "until_then_seconds": [one["until_then"] for one in ones],
                "seconds_until_found": spoken([one["seconds_until_found"] for one in ones]),
                "state": ", ".join(one["state"] for one in ones),
                "loads": [one["load"] for one in ones],
            }
        return rows

    def _run(self, *, monitor: bool, readers: bool) -> Found:
        load = loads()
        with ExitStack() as stack:
            stack.enter_context(self.rig.relieved())
            pool = stack.enter_context(self.rig.open(POOL, monitor=monitor))
            saver = make_checkpointer(pool, keep_last=KEPT_STEPS, example=self.state)
            stack.callback(saver.close)
            saver.saver.wait_prewritten(PREPARE_SECONDS)
            if readers:
                stack.enter_context(
                    ForegroundReads(pool, self.pattern.objects, seed=next(self._steps))
                )
            for _ in range(KEPT_STEPS):
                self._save(saver)  # from now on files are written over
            healthy = [self._save(saver) for _ in range(COUNTED)]
            watch = SlowWatch(pool, self.rig.first(pool))
            self.rig.slow()
            until_then = []
            while time.monotonic() < watch.onset + self.pattern.found_seconds:
                until_then.append(round(self._save(saver), 2))
            slow = [self._save(saver) for _ in range(COUNTED)]
            facts = watch.facts()
            self.rig.slow(0)
        usual, then = statistics.median(healthy), statistics.median(slow)
        return {
            "ratio": then / usual,
            "healthy": usual,
            "slow": then,
            "until_then": until_then,
            **facts,
            "load": load,
        }

    def _save(self, saver: Checkpointer) -> float:
        """Seconds until the next step is durable; then the time until the one after it."""
        step = next(self._steps)
        self._content.fill(self.state, step)
        began = time.monotonic()
        saver.save(step, self.state).result()
        taken = time.monotonic() - began
        time.sleep(max(0.0, self.pattern.every_seconds - taken))
        return taken
