"""Device health: the detector on made-up times, and pools on devices of which one turns slow or
is lost, against the bars of issues 6 and 39.

`hpstore bench health --json FILE` is one command for all of them; each part says what it measures:

slow, healthy, load, hang, telemetry   made-up service times (health_detector.py)
few, many, pauses, nvme                the same of pools of 2 to 24 devices (health_groups.py)
small                                  64 KiB reads beside a device at x20, or that freezes
                                       (health_small_reads.py)
window, global, reads                  one of eight devices at 10 MB/s (health_slow.py)
saves                                  checkpoints meanwhile (health_saves.py)
overhead                               what the monitor costs a loader (health_cost.py)
rebuild                                bandwidth, and p99 of a foreground (health_rebuild.py)
forecast                               failures, on files of the user's (health_forecast.py)
durability                             formulae against simulations (health_durability.py)
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.progress import Progress

from hpstore.benchmarks.harness.measure import Options, unmet
from hpstore.benchmarks.harness.raw_devices import workspace
from hpstore.benchmarks.harness.sessions import progress
from hpstore.benchmarks.health import health_detector as detector
from hpstore.benchmarks.health import health_groups as groups
from hpstore.benchmarks.health.health_cost import MODES, cost_case
from hpstore.benchmarks.health.health_durability import durability_case
from hpstore.benchmarks.health.health_forecast import forecast_case
from hpstore.benchmarks.health.health_peers import RULES, DetectionRule, HpstoreDetector
from hpstore.benchmarks.health.health_reads import Objects
from hpstore.benchmarks.health.health_rebuild import QUICK as QUICK_PLAN
from hpstore.benchmarks.health.health_rebuild import Rebuild, RebuildPlan
from hpstore.benchmarks.health.health_rig import (
    DATA,
    DEVICES,
    PARITY,
    SLOW_BYTES_PER_SECOND,
    Rig,
    loads,
)
from hpstore.benchmarks.health.health_saves import OTHER_REPEATS, Pattern, Saves
from hpstore.benchmarks.health.health_saves import QUICK as QUICK_PATTERN
from hpstore.benchmarks.health.health_slow import (
    OFF_REPEATS,
    RunPhases,
    SlowScene,
    loader_case,
    reads_case,
)
from hpstore.benchmarks.health.health_slow import POOL as SCENE_POOL
from hpstore.benchmarks.health.health_slow import QUICK as QUICK_PHASES
from hpstore.benchmarks.health.health_small_reads import small_reads
from hpstore.benchmarks.health.health_traces import HOUR_TICKS, TICK_SECONDS
from hpstore.benchmarks.loader.loader_data import Data
from hpstore.errors import ConfigError
from hpstore.units import GIB, MIB

_log = logging.getLogger(__name__)
MADE_UP = ("slow", "healthy", "few", "many", "pauses", "nvme", "load", "hang", "telemetry")
ON_DEVICES = ("window", "global", "reads", "saves", "overhead", "rebuild")
CASES = (*MADE_UP, "small", *ON_DEVICES, "forecast", "durability")
RUNS_A_REPEAT = 4
MOST_REPEATS = 3  # of saves and rebuilds: half a minute each
LAID_ANEW = 1
# Any: JSON
Found = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthScale:
    """How much is stored, and for how long things are watched."""

    data_bytes: int = 1200 * MIB
    device_bytes: int = GIB
    objects: Objects = field(default_factory=Objects)
    phases: RunPhases = field(default_factory=RunPhases)
    pattern: Pattern = field(default_factory=Pattern)
    plan: RebuildPlan = field(default_factory=RebuildPlan)
    turns: int = 12
    turn_seconds: float = 2.0
    hour_ticks: int = HOUR_TICKS
    small_seconds: float = 15.0


QUICK = HealthScale(
    data_bytes=150 * MIB,
    device_bytes=256 * MIB,
    objects=Objects(count=4),
    phases=QUICK_PHASES,
    pattern=QUICK_PATTERN,
    plan=QUICK_PLAN,
    turns=2,
    turn_seconds=0.5,
    hour_ticks=200,
    small_seconds=3.0,
)


def bench_health(options: Options) -> dict[str, object]:
    """Figures by case, with verdicts; `not_met` and `not_run` name those that are not good.

    `options.cases`: all unless given. `repeats`: of everything that has a bar, and the number of
    seeds of what is made up. `quick`: one repeat of little, which shows that all works; its figures
    mean nothing.
    """
    run = _Run(options)
    with progress(run.steps()) as bar, workspace(options) as root:
        run.bar = bar
        run.made_up()
        if "small" in run.chosen:
            run.small(root)
        if any(case in ON_DEVICES for case in run.chosen):
            with Rig(root, device_bytes=run.scale.device_bytes) as rig:
                run.results["devices"] = _devices(rig)
                run.on_devices(rig)
        if "forecast" in run.chosen:
            run.keep("forecast", forecast_case(options.drive_stats))
        if "durability" in run.chosen:
            run.keep("durability", durability_case())
    return run.results


def _devices(rig: Rig) -> Found:
    return {
        "kind": rig.kind,
        "why_not_real": rig.problem,
        "devices": DEVICES,
        "geometry": f"{DATA}+{PARITY}",
        "slow_bytes_per_second": SLOW_BYTES_PER_SECOND,
        "cores": os.cpu_count(),
    }


def cases_named(names: str) -> list[str]:
    """Cases of a comma-separated list in their order; all when it is empty. Raises ConfigError."""
    wanted = [name.strip() for name in names.split(",") if name.strip()] or list(CASES)
    for name in wanted:
        if name not in CASES:
            raise ConfigError(f"no case of health is called {name!r}; there are {list(CASES)}")
    return [case for case in CASES if case in wanted]


class _Run:
    """One call: what is measured, how much of it, and what was found so far."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self.chosen = cases_named(options.cases)
        self.scale = QUICK if options.quick else HealthScale()
        self._repeats = 1 if options.quick else options.repeats
        self._few = min(self._repeats, MOST_REPEATS)
        self.results: dict[str, object] = {
            "configuration": {
                "repeats": self._repeats,
                "quick": options.quick,
                "load_at_start": loads(),
            },
        }
        self.bar: Progress | None = None

    def steps(self) -> int:
        """Of the progress bar: one for each run of seconds."""
        both, few = self._repeats + OFF_REPEATS, self._few
        each = {
            "window": both,
            "global": both,
            "reads": both,
            "small": 2 * (few + 2),
            "saves": few + 2 * OTHER_REPEATS,
            "overhead": len(MODES) * self.scale.turns,
            "rebuild": few + LAID_ANEW,
        }
        return sum(each.get(case, 1) for case in self.chosen)

    def step(self, case: str, part: str = "") -> None:
        """A step is done."""
        if self.bar is not None:
            task = self.bar.task_ids[0]
            self.bar.update(task, description=f"{case} {part}".strip())
            self.bar.advance(task)

    def keep(self, case: str, found: Found) -> None:
        """A case is done."""
        self.results[case] = found
        self.results["not_met"] = unmet(self.results)
        self.results["not_run"] = {
            name: row["skipped"]
            for name, row in self.results.items()
            if isinstance(row, Mapping) and "skipped" in row
        }
        self._options.keep(self.results)
        _log.info("bench health: %s done", case)

    def made_up(self) -> None:
        """The detector's cases."""
        repeats, ticks = self._repeats, self.scale.hour_ticks
        rules: dict[str, Callable[..., DetectionRule]] = {"hpstore": HpstoreDetector}
        if self._options.peers:
            rules = dict(RULES)
        runs: dict[str, Callable[[], Found]] = {
            "slow": lambda: detector.slow_devices(RUNS_A_REPEAT * repeats, rules),
            "healthy": lambda: detector.healthy_devices(repeats, rules, ticks),
            "few": lambda: groups.few_devices(RUNS_A_REPEAT * repeats),
            "many": lambda: groups.many_devices(RUNS_A_REPEAT * repeats),
            "pauses": lambda: groups.pauses(self._few, TICK_SECONDS * ticks),
            "nvme": lambda: groups.nvme_devices(RUNS_A_REPEAT * repeats),
            "load": lambda: detector.load(repeats, detector.LOAD_TICKS),
            "hang": detector.hang,
            "telemetry": lambda: detector.telemetry(10 * repeats, 2_000),
        }
        for case in self.chosen:
            if case in runs:
                self.keep(case, runs[case]())
                self.step(case)

    def small(self, root: Path) -> None:
        """The case of delayed directories."""
        done = partial(self.step, "small")
        self.keep(
            "small",
            small_reads(root, self._few, self.scale.small_seconds, self.scale.phases.found, done),
        )

    def on_devices(self, rig: Rig) -> None:
        """The cases of real pools. What one of them has stored is removed before the next."""
        scale, repeats = self.scale, self._repeats
        done = {case: partial(self.step, case) for case in ON_DEVICES}
        of_scene: dict[str, Callable[[SlowScene], Found]] = {
            "window": lambda scene: loader_case(scene, "window", repeats, done["window"]),
            "global": lambda scene: loader_case(scene, "global", repeats, done["global"]),
            "reads": lambda scene: reads_case(scene, repeats, done["reads"]),
            "overhead": lambda scene: cost_case(
                scene, scale.turns, scale.turn_seconds, done["overhead"]
            ),
        }
        chosen = [case for case in self.chosen if case in of_scene]
        if chosen:
            scene = SlowScene(rig, Data("A", scale.data_bytes), scale.objects, scale.phases)
            self.results["data"] = scene.facts()
            for case in chosen:
                self.keep(case, of_scene[case](scene))
            rig.drop(SCENE_POOL)
        if "saves" in self.chosen:
            self.keep("saves", Saves(rig, scale.pattern).case(self._few, done["saves"]))
            rig.drop("saves")
        if "rebuild" in self.chosen:
            healing = Rebuild(rig, scale.plan)
            self.keep("rebuild", healing.case(self._few, LAID_ANEW, done["rebuild"]))
