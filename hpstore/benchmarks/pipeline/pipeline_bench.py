"""Pipelines of real processes: how idle ranks are, and what checkpoints, data and hooks cost.

    hpstore bench pipeline [--json FILE] [--plots DIR] [--repeats N] [--quick]

Ranks are processes of this machine, so there must be as many free cores as stages: machine and load
are printed with the figures.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from hpstore.benchmarks.harness.measure import Options
from hpstore.benchmarks.harness.rank_processes import launch
from hpstore.benchmarks.pipeline.pipeline_bars import Row, bars, cost_rows, idle_rows, told
from hpstore.benchmarks.pipeline.pipeline_rank import (
    Case,
    cost_rank,
    idle_rank,
    make_pool,
    picture_rank,
)
from hpstore.checkpoint.save.copy_gate import CopyGate
from hpstore.trainers.pipelining.events import EventRecorder
from hpstore.trainers.pipelining.idle_time import IdleTally
from hpstore.trainers.pipelining.stages import watched
from hpstore.trainers.pipelining.step_record import StepRecord

ROUNDS = 5
LEAST_ROUNDS = 3  # of figures that have a bar
EVENTS, HOOK_STEPS = 48, 400  # of a step of 16 micro-batches; steps of a round


def idle_table(
    directory: Path,
    microbatches: Sequence[int] = (4, 8, 16),
    *,
    stages: int = 2,
    forward_seconds: float = 0.06,
    rounds: int = ROUNDS,
    steps: int = 3,
    schedule: str = "gpipe",
) -> dict[str, Row]:
    """Idle share of a step against (K - 1) / (M + K - 1), by number of micro-batches M."""
    cases = [
        Case(schedule=schedule, stages=stages, microbatches=count, forward_seconds=forward_seconds)
        for count in microbatches
    ]
    make_pool(directory)
    return idle_rows(launch(stages, directory, idle_rank, cases, rounds, steps), stages)


def cost_table(
    directory: Path,
    *,
    stages: int = 2,
    forward_seconds: float = 0.02,
    rounds: int = ROUNDS,
    steps: int = 10,
    every: int = 5,
) -> dict[str, Row]:
    """Step time by way of saving, and the share of it that ranks wait for data from the pool.

    `steps` of a round: a multiple of `every`.
    """
    if steps % every:
        raise ValueError(f"{steps} steps a round, saved every {every}: rounds would differ")
    make_pool(directory)
    case = Case(stages=stages, forward_seconds=forward_seconds, every=every)
    return cost_rows(launch(stages, directory, cost_rank, case, rounds, steps))


class _Bare:
    """A stage's compute method without compute."""

    stage_index = 0

    def forward_one_chunk(self, *_: object, **__: object) -> None:
        return


def hook_us(rounds: int = ROUNDS) -> list[float]:
    """Microseconds that hooks add to one compute call, round by round: the call through the
    subclass, the gate, the event, its place in the record and in the tally of the report."""
    recorder, tally = EventRecorder(CopyGate(blocks=True)), IdleTally()
    hooked: Any = watched(_Bare, recorder)()  # type: ignore[type-var]  # Any: as a stage
    found = []
    for _ in range(rounds):
        began = time.perf_counter()
        for _ in range(HOOK_STEPS):
            _calls(_Bare())
        plain = time.perf_counter() - began
        began = time.perf_counter()
        for _ in range(HOOK_STEPS):
            recorder.begin_step()
            _calls(hooked)
            tally.add(_record(recorder))
        taken = time.perf_counter() - began - plain
        found.append(1e6 * taken / (HOOK_STEPS * EVENTS))
    return found


def _calls(stage: Any) -> None:
    for number in range(EVENTS):
        stage.forward_one_chunk(number, (), {})


def _record(recorder: EventRecorder) -> StepRecord:
    return StepRecord(
        step=0,
        losses=(),
        events=recorder.end_step(),
        microbatches=EVENTS,
        schedule_seconds=0.0,
        data_wait_seconds=0.0,
        late_microbatches=0,
        copy_wait_seconds=0.0,
        save_seconds=0.0,
        hook_seconds=recorder.hook_seconds,
        idle_bytes=0,
        busy_bytes=0,
        saved=None,
    )


def events_of(directory: Path, cases: Sequence[Case]) -> list[list[Row]]:
    """Events of one step of each case, by rank: what the picture is drawn from."""
    make_pool(directory)
    by_rank = launch(cases[0].stages, directory, picture_rank, cases)
    return [[rank[n] for rank in by_rank] for n in range(len(cases))]


PICTURES = tuple(
    Case(
        schedule=schedule,
        stages=4,
        microbatches=8,
        forward_seconds=0.02,
        rows=2,
        asleep=True,
        state_bytes=144_000_000,
        every=1,
        snapshot="bubbles",
    )
    for schedule in ("gpipe", "1f1b")
)


def tables(
    *, rounds: int = ROUNDS, quick: bool = False, directory: Path | None = None
) -> dict[str, Any]:
    """All figures, with the load before and after, and the bars. `quick`: a short run, to show that
    everything works; its bars mean nothing. `directory`: where pools are made."""
    loads = [os.getloadavg()[0]]
    few: Mapping[str, Any] = {"forward_seconds": 0.01, "steps": 1, "rounds": 1} if quick else {}
    short: Mapping[str, Any] = {"rounds": 1, "steps": 5} if quick else {}
    events = hook_us(1 if quick else rounds)
    with tempfile.TemporaryDirectory(prefix="hpstore-bench-", dir=directory) as name:
        idle = idle_table(Path(name), **{"rounds": rounds, **few})
    loads.append(os.getloadavg()[0])
    with tempfile.TemporaryDirectory(prefix="hpstore-bench-", dir=directory) as name:
        cost = cost_table(Path(name), **{"rounds": rounds, **short})
    loads.append(os.getloadavg()[0])
    return {
        "cores": len(os.sched_getaffinity(0)),
        "load": [round(load, 2) for load in loads],
        "rounds": 1 if quick else rounds,
        "idle": idle,
        "checkpoints": cost,
        "bars": bars(idle, cost, events),
    }


def picture(directory: Path) -> Path:
    """pipeline.png, drawn from events of real processes. Needs matplotlib."""
    from hpstore.benchmarks.pipeline.pipeline_picture import draw

    import_module("matplotlib")  # before processes are started for it
    with tempfile.TemporaryDirectory(prefix="hpstore-bench-") as name:
        return draw(events_of(Path(name), PICTURES), directory)


def bench_pipeline(options: Options) -> dict[str, object]:
    """All tables in at least three rounds, a line for each bar, and the picture where `plots` names
    a directory for it (made where it is not there)."""
    found = tables(
        rounds=max(LEAST_ROUNDS, options.repeats), quick=options.quick, directory=options.directory
    )
    if options.plots is not None:
        options.plots.mkdir(parents=True, exist_ok=True)
        try:
            found["picture"] = str(picture(options.plots))
        except ImportError as error:
            found["picture"] = f"none: {error}; pip install 'hpstore[bench]'"
    sys.stderr.write("\n".join(told(found["bars"])) + "\n")
    return found
