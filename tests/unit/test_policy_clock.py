"""Durations of the policy are those that were observed, whatever a wall clock does (rule 17)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hpstore.health import HealthState
from hpstore.health.policy.policy_clock import PolicyClock
from hpstore.health.policy.states import DeviceHealth, PolicyState
from tests.unit.tended import Tended

S = HealthState
HOUR_MS = 3_600_000


@pytest.mark.parametrize("step_ms", [HOUR_MS, 30 * 86_400_000])
def test_a_wall_clock_that_jumps_forward_evicts_nothing_rule_17(
    tended: Tended, step_ms: int
) -> None:
    """A disk was away for 20 s when the clock was set forward, and was evicted at once. It leaves
    after its 15 minutes."""
    tended.rounds(10)
    tended.harness.lose(["memory://d3"])
    tended.rounds(40)
    assert tended.states() == {3: S.REMOVED}
    tended.clock.now_ms += step_ms
    tended.rounds(600, step=20)
    assert 3 in tended.members()
    tended.rounds(400, step=20)
    assert 3 not in tended.members()
    tended.harness.bring_back()
    tended.rounds(700, step=20)
    assert tended.states() == {}
    assert len(tended.members()) == 7


def test_a_wall_clock_that_jumps_back_does_not_stop_the_policy_rule_17(tended: Tended) -> None:
    """Set back by 50 minutes it stood still for 50 minutes: nothing was healed meanwhile."""
    tended.rounds(10)
    tended.harness.lose(["memory://d3"])
    tended.rounds(40)
    tended.clock.now_ms -= 50 * 60_000
    tended.rounds(900, step=20)
    assert 3 not in tended.members()
    assert tended.whole()


def test_an_agent_that_was_stopped_for_an_hour_has_not_seen_an_hour_rule_17(
    tended: Tended,
) -> None:
    """By SIGSTOP, or in a host that was suspended."""
    tended.rounds(10)
    tended.harness.lose(["memory://d3"])
    tended.rounds(40)
    tended.clock.advance(3600.0)
    tended.rounds(600, step=20)
    assert 3 in tended.members()
    tended.rounds(400, step=20)
    assert 3 not in tended.members()


def test_over_a_restart_the_wall_clock_counts(tended: Tended) -> None:
    """No other clock lasts: `hpstore agent --once` from cron is a restart at each round."""
    tended.rounds(10)
    tended.harness.lose(["memory://d3"])
    tended.rounds(40)
    tended.stop()
    tended.clock.advance(900.0)
    tended.start()
    tended.rounds(40)
    assert 3 not in tended.members()


def test_times_move_with_the_clock_and_never_stays_never() -> None:
    """All of them, by the same step; less than a second is no step."""
    health = DeviceHealth(
        state=S.SITOUT,
        since_seconds=1000.0,
        until_seconds=1600.0,
        sitouts=(1000.0,),
        sat_out=(7.0,),
    )
    state = PolicyState(now_seconds=1200.0, devices={"d": health}, removals=(1000.0,))
    clock = PolicyClock()
    assert clock.follow(state, monotonic_seconds=5.0, wall_seconds=1200.0) is state
    assert clock.follow(state, monotonic_seconds=6.0, wall_seconds=1201.5) is state
    moved = clock.follow(state, monotonic_seconds=7.0, wall_seconds=1302.5)
    assert moved == PolicyState(
        now_seconds=1300.0,
        devices={
            "d": replace(health, since_seconds=1100.0, until_seconds=1700.0, sitouts=(1100.0,))
        },
        removals=(1100.0,),
    )


def test_a_process_judges_by_what_it_observed_too(tmp_path: Path) -> None:
    """A suspect is let go after its seconds without a verdict, not by a step of the clock; and set
    back, the clock does not keep it a suspect for an hour."""
    tended = Tended(tmp_path)
    monitor = tended.pool.admin.health
    device = tended.device(0)
    monitor.tick_now()
    since = tended.clock.wall_ms() / 1000
    suspect = DeviceHealth(state=S.SUSPECT, since_seconds=since, quiet_since_seconds=since)
    monitor._policy = replace(monitor._policy, devices={**monitor._policy.devices, device: suspect})
    tended.clock.now_ms += HOUR_MS
    tended.clock.advance(1.0)
    monitor.tick_now()
    assert monitor._policy.health(device).state is S.SUSPECT
    tended.clock.now_ms -= HOUR_MS // 2
    for _ in range(6):
        tended.clock.advance(1.0)
        monitor.tick_now()
    assert monitor._policy.health(device).state is S.ONLINE
    tended.stop()
