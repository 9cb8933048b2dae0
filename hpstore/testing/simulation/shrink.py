"""Leave out of a schedule what a finding does not need: turns, faults, processes, bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from hpstore.testing.simulation.schedule import Fault, Schedule, Turn

Fails = Callable[[Schedule], bool]
MOST_RUNS = 600  # of one shrinking


def shrink(schedule: Schedule, fails: Fails, most_runs: int = MOST_RUNS) -> Schedule:
    """A smaller schedule for which `fails` holds still. `fails(schedule)` holds."""
    runs = 0

    def holds(smaller: Schedule) -> bool:
        nonlocal runs
        runs += 1
        return runs <= most_runs and fails(smaller)

    best, better = schedule, True
    while better and runs < most_runs:
        better = False
        for step in (_fewer_turns, _fewer_faults, _simpler_setups, _simpler_turns):
            for smaller in step(best):
                if smaller != best and holds(smaller):
                    best, better = smaller, True
                    break
            if better:
                break
    return best


def _fewer_turns(schedule: Schedule) -> Iterator[Schedule]:
    """Halves, quarters, ... and at last single turns left out."""
    count = len(schedule.turns)
    size = count // 2
    while size >= 1:
        for start in range(count - size, -1, -size):
            yield schedule.without(set(range(start, start + size)))
        size //= 2


def _fewer_faults(schedule: Schedule) -> Iterator[Schedule]:
    for at, turn in enumerate(schedule.turns):
        for left_out in range(len(turn.faults)):
            faults = tuple(f for i, f in enumerate(turn.faults) if i != left_out)
            yield _with_turn(schedule, at, replace(turn, faults=faults))


def _simpler_setups(schedule: Schedule) -> Iterator[Schedule]:
    setup = schedule.setup
    used = 1 + max((turn.process for turn in schedule.turns), default=0)
    for other in (
        replace(setup, processes=max(1, used)),
        replace(setup, drifts=(0.0,) * 4),
        replace(setup, offsets_ms=(0,) * 4),
        replace(setup, own_places=False),
        replace(setup, domains=0),
    ):
        yield replace(schedule, setup=other)


def _simpler_turns(schedule: Schedule) -> Iterator[Schedule]:
    for at, turn in enumerate(schedule.turns):
        for simpler in (
            replace(turn, order=0),
            replace(turn, process=min(turn.process, 0)),
            replace(turn, size=min(turn.size, 100)),
        ):
            yield _with_turn(schedule, at, simpler)
        for number, fault in enumerate(turn.faults):
            for other in _simpler_faults(fault):
                faults = (*turn.faults[:number], other, *turn.faults[number + 1 :])
                yield _with_turn(schedule, at, replace(turn, faults=faults))


def _simpler_faults(fault: Fault) -> Iterator[Fault]:
    yield replace(fault, steps=0)
    yield replace(fault, seconds=0.0)
    yield replace(fault, firm=False)
    yield replace(fault, times=1)
    yield replace(fault, after=False)
    if fault.error:
        yield replace(fault, error="EIO")


def _with_turn(schedule: Schedule, at: int, turn: Turn) -> Schedule:
    return replace(schedule, turns=(*schedule.turns[:at], turn, *schedule.turns[at + 1 :]))
