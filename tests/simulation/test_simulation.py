"""The simulator: it repeats itself exactly, what it found stays fixed, and it finds nothing new."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpstore.devices.horizon_guard import HorizonGuard
from hpstore.testing.simulation import Schedule, draw, installed, run
from hpstore.testing.simulation.mutations import MUTATIONS, describe, mutated
from hpstore.testing.simulation.oracle import ABSENT, OPEN, KeyHistory, Write, linearizable
from hpstore.testing.simulation.schedule import Fault, Setup, Turn
from hpstore.testing.simulation.shrink import shrink
from tests.thorough import LONG

KEPT = sorted((Path(__file__).parent / "kept").glob("*.json"))
SEEDS = 300 if LONG else 50


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The simulator's command, in processes of its own: it exchanges names in modules."""
    line = [sys.executable, "-m", "hpstore.testing.simulation", *arguments]
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    return subprocess.run(line, env=environment, capture_output=True, text=True, timeout=280)


def test_a_seed_replays_exactly() -> None:
    """The same seed gives the same schedule and the same trace, event for event."""
    with installed():
        for seed in range(12 if LONG else 6):
            first, second = run(draw(seed)), run(draw(seed))
            assert first.schedule == second.schedule
            assert first.trace == second.trace
            assert len(first.trace) > 3


def test_a_schedule_is_text_and_back() -> None:
    """What to_json() writes is the same schedule again."""
    for seed in range(50):
        schedule = draw(seed)
        assert Schedule.from_json(schedule.to_json()) == schedule


def test_what_was_found_stays_fixed() -> None:
    """Every minimal schedule that once failed runs without a finding."""
    done = command("--replay", *map(str, KEPT))
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("no finding") == len(KEPT)


BROKEN = {
    "rolls-back": "rolled-back-after-a-rebuild",
    "no-horizon": "suspended-past-the-horizon",
    "sweeps-without-raising": "swept-by-a-clock-ahead",
    "no-mark": "torn-by-a-clock-ahead",
    "own-clock-only": "torn-before-a-clock-behind",
    "stops-at-gone-steps": "step-gone-before-it-is-read",
}


@pytest.mark.parametrize("mutation", BROKEN)
def test_without_its_rule_what_was_found_is_found_again(mutation: str) -> None:
    """Each kept schedule fails once the rule that it is about is taken out of the code."""
    path = Path(__file__).parent / "kept" / f"{BROKEN[mutation]}.json"
    done = command("--mutation", mutation, "--replay", str(path))
    assert done.returncode == 1, done.stdout[-4000:]
    assert "wrong version" in done.stdout or "not restored" in done.stdout


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_leaves_nothing_behind(name: str) -> None:
    """What a mutation exchanges is as it was after it."""
    with mutated(name):
        pass
    assert HorizonGuard.check.__qualname__ == "HorizonGuard.check"
    assert dict(describe())[name]


def test_some_hundred_seeds_find_nothing() -> None:
    """A few hundred schedules, the same in each run: no finding."""
    done = command("--seeds", str(SEEDS), "--json", "--no-shrink")
    assert done.stdout, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["findings"] == []
    assert found["seeds"] == SEEDS
    assert {action for action, _, _ in found["pairs"]} >= {"put", "get", "delete", "evict"}


def test_a_put_that_loses_its_columns_is_found_and_made_small() -> None:
    """Two devices more than parity are emptied behind the oracle's back: the value is missed, and
    the schedule shrinks to what that needs. Guards against a simulator that finds nothing."""
    setup = Setup(data=1, parity=1, devices=3)
    turns = [
        Turn(number=n, process=n % 2, action=action, key="k0", size=100)
        for n, action in enumerate(("get", "put", "stat", "get", "settle", "get"))
    ]
    faults = (Fault(kind="pause", where="open", until=4),)
    turns[3] = Turn(number=3, process=1, action="get", key="k0", faults=faults)
    schedule = Schedule(seed=1, setup=setup, turns=tuple(turns))

    def fails(tried: Schedule) -> bool:
        return "put" in [turn.action for turn in tried.turns]

    small = shrink(schedule, fails)
    assert [turn.action for turn in small.turns] == ["put"]
    assert not any(turn.faults for turn in small.turns)


def test_the_oracle_knows_what_must_not_be_read() -> None:
    """Older than acknowledged, deleted, never put: each is told; what may be is not."""
    history = KeyHistory("k")
    history.writes.append(Write(1, 10, ended=20, acknowledged=20))
    history.writes.append(Write(2, 30, ended=40))  # failed
    assert history.judge(1, 50, 51) is None
    assert history.judge(2, 50, 51) is None  # rolled forward
    assert history.judge(ABSENT, 50, 51) is not None
    assert history.judge(3, 50, 51) is not None
    history.writes.append(Write(4, 60, ended=70, acknowledged=70))
    assert history.judge(4, 80, 81) is None
    assert history.judge(2, 80, 81) is not None
    assert history.judge(1, 80, 81) is not None
    history.writes.append(Write(ABSENT, 90, ended=95, acknowledged=95))
    assert history.judge(4, 100, 101) is not None
    assert history.judge(ABSENT, 100, 101) is None


def test_conditional_puts_that_both_win_are_not_linearizable() -> None:
    """Two on one predecessor: no order; one after the other, or one unacknowledged: there is."""
    one = Write(1, 1, ended=5, acknowledged=5, expected=ABSENT)
    other = Write(2, 2, ended=6, acknowledged=6, expected=ABSENT)
    assert not linearizable([one, other], 1)
    assert linearizable([one, Write(2, 2, ended=6, expected=ABSENT)], 1)
    assert linearizable([one, Write(2, 2, ended=6, acknowledged=6, expected=1)], 2)
    assert not linearizable([one, Write(2, 6, ended=9, acknowledged=9, expected=1)], 1)
    assert OPEN > 6
