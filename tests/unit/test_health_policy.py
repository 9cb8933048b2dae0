"""Every transition of the health policy, by rounds of verdicts and facts. No clock, no device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpstore.errors import ConfigError
from hpstore.format.records import DeviceState
from hpstore.health import HealthState
from hpstore.health.policy.states import ActionKind, ForecastOutlook, PolicyConfig, Role
from tests.unit.health_rounds import PROCESS, WELL, Policy

S = HealthState
AGENT = PolicyConfig(role=Role.AGENT)


def test_a_suspect_is_let_go_after_five_seconds_without_a_verdict() -> None:
    """A verdict in between begins them again."""
    policy = Policy().round(suspect=["d0"])
    assert policy.states() == {"d0": S.SUSPECT}
    assert policy.decisions[0].reason == "d0 is suspect"
    policy.round().round(after=3).round(suspect=["d0"]).round().round(after=4)
    assert policy.states() == {"d0": S.SUSPECT}
    assert policy.round(after=1).states() == {}
    assert policy.decisions[0].becomes is S.ONLINE


def test_a_device_that_returns_to_suspicion_is_let_go_later_each_time() -> None:
    """5, 10, 20 seconds, up to a minute: it does not flap."""
    policy, waited = Policy(replace(PROCESS, changes_per_hour=99)), []
    for _ in range(6):
        policy.round(suspect=["d0"]).round(after=1)
        quiet = 0
        while policy.states():
            policy.round(after=1)
            quiet += 1
        waited.append(quiet)
    assert waited == [5, 10, 20, 40, 60, 60]


@pytest.mark.parametrize(
    ("low", "probes", "ratio", "goes"),
    [(True, 8, 1.0, True), (True, 7, 1.0, False), (True, 8, 1.3, False), (False, 63, 1.0, False)],
)
def test_a_first_sit_out_ends_at_once_while_load_is_low(
    low: bool, probes: int, ratio: float, goes: bool
) -> None:
    """Eight good probes are enough when a return that fails costs little; after a relapse, the time
    must be over."""
    policy = Policy().sit_out()
    policy.fact("d0", probes=probes, probe_ratio=ratio, load_low=low)
    assert (policy.round().states()["d0"] is S.PROBATION) == goes
    if goes:
        policy.round(suspect=["d0"])
        assert policy.round().states() == {"d0": S.SITOUT}


def test_a_suspect_that_gets_worse_sits_out_for_ten_minutes() -> None:
    """Reads go elsewhere, new columns too; a suspect keeps its reads."""
    policy = Policy().round(slow=["d0"])
    shares = policy.config.probation_shares
    assert policy.states() == {"d0": S.SUSPECT}
    assert (policy.health().read_share(shares), policy.health().takes_columns) == (1.0, False)
    policy.round(slow=["d0"])
    assert policy.states() == {"d0": S.SITOUT}
    assert (policy.health().read_share(shares), policy.health().takes_columns) == (0.0, False)
    assert policy.health().until_seconds == policy.now + 600
    assert policy.health("d1").takes_columns


@pytest.mark.parametrize(
    ("probes", "ratio", "goes"), [(64, 1.29, True), (63, 1.0, False), (100, 1.3, False)]
)
def test_a_sit_out_ends_by_time_and_probes(probes: int, ratio: float, goes: bool) -> None:
    """64 of them, below 1.3 x their peers; the detector starts anew."""
    policy = Policy().sit_out()
    policy.fact("d0", probes=probes, probe_ratio=ratio)
    assert policy.round(after=599).states() == {"d0": S.SITOUT}
    policy.round(after=1)
    assert policy.states() == {"d0": S.PROBATION if goes else S.SITOUT}
    assert policy.asked() == ([(ActionKind.FORGIVE, "d0")] if goes else [])


def test_probation_gives_reads_back_in_three_steps() -> None:
    """5, 25, 100 per cent, two minutes each; then online."""
    policy = Policy().probation()
    shares = []
    for _ in range(36):
        shares.append(policy.health().read_share(policy.config.probation_shares))
        policy.round()
    assert shares == [0.05] * 12 + [0.25] * 12 + [1.0] * 12
    assert policy.states() == {}


def test_a_relapse_doubles_the_sit_out_up_to_four_hours() -> None:
    """10, 20, 40 minutes ...; no other device is kept from sitting out by it."""
    policy, minutes = (
        Policy(
            replace(PROCESS, strikes=99, changes_per_hour=99, sat_out_most_seconds=1e9)
        ).probation(),
        [],
    )
    for _ in range(6):
        policy.round(suspect=["d0"])
        assert policy.states() == {"d0": S.SITOUT}
        minutes.append((policy.health().until_seconds - policy.now) / 60)
        policy.round(after=minutes[-1] * 60)
        assert policy.states() == {"d0": S.PROBATION}
    assert minutes == [20, 40, 80, 160, 240, 240]
    for _ in range(4):
        policy.round(after=120)
    assert policy.states() == {}
    policy.round(after=86400).sit_out()
    assert (policy.health().until_seconds - policy.now) / 60 == 240
    assert policy.health().level == 5


def relapse(policy: Policy) -> Policy:
    """Three sit-outs within a day."""
    policy.probation()
    for _ in range(2):
        policy.round(suspect=["d0"])
        policy.round(after=policy.health().until_seconds - policy.now)
    return policy


def test_three_strikes_in_a_day_drain_a_device() -> None:
    """Asked for again until the pool does it, then evicted once it is empty and may go."""
    policy = relapse(Policy(replace(AGENT, sat_out_most_seconds=1e9)))
    assert policy.states() == {"d0": S.DRAINING}
    assert "3 sit-outs within a day" in policy.decisions[-1].reason
    assert policy.asked() == [(ActionKind.DRAIN, "d0")]
    policy = Policy(replace(AGENT, sat_out_most_seconds=1e9)).probation()
    policy.round(suspect=["d0"]).round(after=1200).round(suspect=["d0"])
    assert policy.round().asked() == [(ActionKind.DRAIN, "d0")]
    assert policy.round().asked() == []
    assert policy.round(after=600).asked() == [(ActionKind.DRAIN, "d0")]
    policy.fact("d0", pool_state=DeviceState.DRAINING)
    assert policy.round(after=600).asked() == []
    policy.fact("d0", empty=True, evictable=False)
    assert policy.round().asked() == []
    assert "would lose its last columns" in policy.decisions[0].reason
    policy.fact("d0", evictable=True)
    assert policy.round().asked() == [(ActionKind.EVICT, "d0")]
    assert policy.round().asked() == []
    policy.fact("d0", pool_state=DeviceState.EVICTED)
    assert policy.round().states() == {"d0": S.EVICTED}


def test_a_process_reports_where_the_agent_drains_rule_16() -> None:
    """PROTOCOL 16: it decides on its own reads alone."""
    policy = Policy(replace(PROCESS, sat_out_most_seconds=1e9)).probation()
    policy.round(suspect=["d0"]).round(after=1200).round(suspect=["d0"])
    assert policy.round().asked() == [(ActionKind.REPORT, "d0")]
    assert policy.states() == {"d0": S.SITOUT}
    assert policy.round().asked() == []


def test_an_hour_sat_out_or_slow_writes_drain_a_device() -> None:
    """Without three strikes."""
    policy = Policy(AGENT).sit_out().round(after=3600)
    assert policy.states() == {"d0": S.SITOUT}
    assert policy.round(after=1).states() == {"d0": S.DRAINING}
    policy = Policy(AGENT).sit_out()
    policy.fact("d0", writes_slow=True)
    assert policy.round().states() == {"d0": S.DRAINING}


def test_strikes_are_forgotten_after_a_day() -> None:
    """Two yesterday and one today are one."""
    policy = Policy(AGENT).probation().round(suspect=["d0"])
    policy.round(after=1200)
    for _ in range(4):
        policy.round(after=120)
    assert policy.states() == {}
    policy.round(after=86400).sit_out()
    assert policy.round().states() == {"d0": S.SITOUT}
    assert len(policy.health().sitouts) == 1
    assert policy.health().level == 0


def test_a_device_that_is_drained_by_somebody_drains() -> None:
    """The record of the pool is the truth; when it is drained no longer, it is tried again."""
    policy = Policy()
    policy.fact("d0", pool_state=DeviceState.DRAINING)
    assert policy.round().states() == {"d0": S.DRAINING}
    policy.round()
    policy.fact("d0", pool_state=DeviceState.ONLINE)
    assert policy.round().states() == {"d0": S.PROBATION}
    assert policy.asked() == [(ActionKind.FORGIVE, "d0")]


@pytest.mark.parametrize("before", ["online", "suspect", "sitout", "probation", "draining"])
def test_a_fault_is_a_fault_whatever_the_state(before: str) -> None:
    """Also while guards forbid everything else."""
    policy = Policy(AGENT)
    if before == "suspect":
        policy.round(suspect=["d0"])
    elif before == "sitout":
        policy.sit_out()
    elif before == "probation":
        policy.probation()
    elif before == "draining":
        policy.fact("d0", pool_state=DeviceState.DRAINING)
        policy.round()
    assert policy.health().state == before
    policy.facts = replace(policy.facts, busy="a rebuild")
    assert policy.round(faulted=["d0"]).states() == {"d0": S.FAULTED}
    assert policy.decisions[0].reason == "d0 is faulted"


def test_a_faulted_device_is_tried_again_when_it_has_been_quiet() -> None:
    """After ten minutes it is reconciled, then on probation: never straight back to reads."""
    policy = Policy(replace(AGENT, grace_seconds=1e9)).round(faulted=["d0"])
    policy.round().round(after=599)
    assert policy.states() == {"d0": S.FAULTED}
    assert policy.round(after=1).states() == {"d0": S.REBUILDING}
    assert policy.health().read_share(policy.config.probation_shares) == 0
    assert policy.asked() == [(ActionKind.RECONCILE, "d0")]
    policy.fact("d0", reconciled=True)
    assert policy.round().states() == {"d0": S.PROBATION}


def test_an_absence_of_less_than_15_seconds_is_none() -> None:
    """A cable, a remount."""
    policy = Policy()
    policy.fact("d0", present=False)
    policy.round().round(after=14)
    assert policy.states() == {}
    policy.fact("d0", present=True)
    assert policy.round().states() == {}
    policy.fact("d0", present=False)
    assert policy.round().round(after=15).states() == {"d0": S.REMOVED}


def test_a_device_that_returns_is_reconciled_before_it_serves_rule_12() -> None:
    """PROTOCOL 12: what it holds is judged first."""
    policy = Policy()
    policy.fact("d0", present=False)
    policy.round().round(after=15)
    policy.fact("d0", present=True)
    assert policy.round().states() == {"d0": S.REBUILDING}
    assert policy.asked() == [(ActionKind.FORGIVE, "d0"), (ActionKind.RECONCILE, "d0")]
    assert policy.round(after=60).states() == {"d0": S.REBUILDING}
    policy.fact("d0", reconciled=True)
    assert policy.round().states() == {"d0": S.PROBATION}
    policy.fact("d0", present=False)
    assert policy.round().round(after=15).states() == {"d0": S.REMOVED}


def test_healing_waits_15_minutes_rule_17() -> None:
    """PROTOCOL 17: for a return. Then it is asked for, and again while the debt lasts."""
    policy = Policy(AGENT)
    policy.fact("d0", present=False)
    policy.facts = replace(policy.facts, busy="maintenance")
    policy.round().round(after=15)
    assert policy.round(after=899).asked() == []
    assert policy.round(after=1).asked() == [(ActionKind.HEAL, "d0")]
    assert policy.round().asked() == []
    assert policy.round(after=600).asked() == [(ActionKind.HEAL, "d0")]


@pytest.mark.parametrize("known", [True, False])
def test_healing_does_not_wait_when_no_parity_is_left_rule_17(known: bool) -> None:
    """PROTOCOL 17: known from the objects, or by counting devices. Never gated."""
    policy = Policy(AGENT, parity=2)
    policy.facts = replace(policy.facts, losses_tolerated=1 if known else None)
    policy.round(faulted=["d0"])
    assert policy.asked() == []
    policy.facts = replace(policy.facts, losses_tolerated=0 if known else None)
    policy.round(faulted=["d0", "d1"])
    assert (ActionKind.HEAL, "d0") in policy.asked()
    policy.fact("d0", pool_state=DeviceState.EVICTED)
    policy.round()
    why = [d.reason for d in policy.decisions if d.becomes is S.EVICTED]
    assert why == ["the pool has evicted it: no parity is left"]


def test_a_host_is_waited_for_by_what_its_agent_says_and_by_no_clock_rule_17() -> None:
    """Neither the grace of a device nor a want of parity ends the wait; its end does, at once."""
    policy = Policy(AGENT, parity=2)
    policy.fact("d0", present=False, waited_for=True)
    policy.facts = replace(policy.facts, losses_tolerated=0)
    policy.round().round(after=15)
    assert policy.round(after=86_400).asked() == []
    policy.fact("d0", present=False, waited_for=False, host_gone=True)
    policy.facts = replace(policy.facts, losses_tolerated=2)
    assert policy.round(after=1).asked() == [(ActionKind.HEAL, "d0")]


def test_nothing_is_evicted_while_too_much_is_away_rule_17() -> None:
    """Not a host that was waited for, nor a device after its grace; the reason is logged once."""
    policy = Policy(AGENT, parity=2)
    policy.fact("d0", present=False, host_gone=True)
    policy.fact("d1", present=False)
    policy.facts = replace(policy.facts, too_much_away="4 columns are away")
    policy.round().round(after=15)
    assert policy.round(after=3600).asked() == []
    policy.round(after=3600)
    assert policy.asked() == []
    assert sum("4 columns are away" in d.reason for d in policy.decisions) <= 2
    policy.facts = replace(policy.facts, too_much_away="")
    assert (ActionKind.HEAL, "d1") in policy.round(after=1).asked()


@pytest.mark.parametrize("seen", ["at once", "a round later"])
def test_an_eviction_that_was_cut_short_is_taken_back_until_that_is_done_rule_17(seen: str) -> None:
    """A device comes back that a kill left closed between the two records of its eviction. It was
    healed in the round of its return, which forgot why it was closed: then it was drained."""
    policy = Policy(AGENT, parity=2)
    policy.fact("d0", present=False)
    policy.round().round(after=15).round(after=900)
    assert policy.asked() == [(ActionKind.HEAL, "d0")]
    policy.fact("d0", present=True)
    if seen == "a round later":
        policy.fact("d0", leaving=True)  # the job that evicts it has not closed it yet
        policy.round()
    policy.fact("d0", pool_state=DeviceState.DRAINING, leaving=False)
    assert policy.round(after=700).asked() == [(ActionKind.READMIT, "d0")]
    for _ in range(3):
        policy.round()
        assert policy.states() == {"d0": S.REMOVED}
    assert policy.round(after=700).asked() == [(ActionKind.READMIT, "d0")]
    policy.fact("d0", pool_state=DeviceState.ONLINE)
    assert policy.round().states() == {"d0": S.REBUILDING}


def test_a_device_that_was_taken_back_and_goes_again_has_its_grace_rule_17() -> None:
    """An agent that was killed as it took a device back remembers it as evicted. The next one
    evicted it at once when it was away again, as what was to be made up for, and for good."""
    policy = Policy(AGENT, parity=2)
    policy.fact("d0", pool_state=DeviceState.EVICTED)
    policy.round(after=700)
    policy.fact("d0", pool_state=DeviceState.ONLINE, present=False)
    asked = []
    for after in (700.0, 15.0, 400.0, 400.0):
        asked += policy.round(after=after).asked()
    assert asked == []
    assert policy.states() == {"d0": S.REMOVED}
    policy.round(after=200)
    assert policy.asked() == [(ActionKind.HEAL, "d0")]
    assert policy.health().lapsed  # it is taken back by itself


def test_a_device_that_is_being_reconciled_does_not_cost_another_its_grace_rule_17() -> None:
    """PROTOCOL 17: before the walk over the objects has ended, devices are counted. One that is
    back counted as lost, so that the next absence was healed at once."""
    policy = Policy(AGENT, parity=2)
    policy.fact("d0", present=False)
    policy.round().round(after=15)
    policy.fact("d0", present=True)
    assert policy.round().states() == {"d0": S.REBUILDING}
    policy.fact("d1", present=False)
    policy.round().round(after=15)
    assert policy.states() == {"d0": S.REBUILDING, "d1": S.REMOVED}
    assert (ActionKind.HEAL, "d1") not in policy.asked()
    policy.fact("d0", present=False)
    policy.round()
    assert (ActionKind.HEAL, "d1") in policy.asked()


def test_a_process_heals_nothing_and_an_eviction_is_healed_at_once() -> None:
    """PROTOCOL 16, 17."""
    for config, asked in ((PROCESS, []), (AGENT, [(ActionKind.HEAL, "d0")])):
        policy = Policy(config)
        policy.fact("d0", pool_state=DeviceState.EVICTED)
        assert policy.round().asked() == asked
        policy.fact("d0", pool_state=DeviceState.ONLINE)
        assert policy.round().states() == {"d0": S.REBUILDING}


def test_a_forecast_warns_and_drains_only_if_that_is_wanted() -> None:
    """Once a day. Two of one failure domain are not drained together, nor without room."""
    policy = Policy(AGENT)
    policy.fact("d0", forecast=ForecastOutlook.ALARM)
    assert policy.round().asked() == [(ActionKind.WARN, "d0")]
    assert policy.round().asked() == []
    assert policy.round(after=86400).asked() == [(ActionKind.WARN, "d0")]
    assert policy.states() == {}
    policy = Policy(
        replace(
            AGENT,
            forecast_drains=True,
            removal_seconds=1,
            bad_ratio_most=1.0,
            removals_per_hour_ratio=1.0,
        )
    )
    policy.fact("d0", forecast=ForecastOutlook.FATAL, domain="h")
    policy.fact("d1", forecast=ForecastOutlook.ALARM, domain="h")
    policy.fact("d2", forecast=ForecastOutlook.ALARM)
    policy.facts = replace(policy.facts, spare_capacity=False)
    assert policy.round().states() == {}
    assert "there is no room for it" in policy.decisions[0].reason
    policy.facts = replace(policy.facts, spare_capacity=True)
    assert policy.round().round().states() == {"d0": S.DRAINING, "d2": S.DRAINING}


def test_a_device_that_flaps_is_pinned() -> None:
    """After six changes within the hour it stays off, with an alarm, until a person says so."""
    policy = Policy(replace(PROCESS, release_seconds=1.0))
    for _ in range(3):
        policy.round(suspect=["d0"]).round().round()
    assert policy.states() == {}
    policy.round(suspect=["d0"])
    assert policy.states() == {"d0": S.SITOUT}
    assert policy.health().pinned
    assert policy.asked() == [(ActionKind.ALARM, "d0")]
    policy.fact("d0", **WELL)
    assert policy.round(after=86400).states() == {"d0": S.SITOUT}


def test_the_worst_of_several_verdicts_counts() -> None:
    """Two detectors may speak of one device: reads and writes."""
    policy = Policy().round(suspect=["d0"])
    policy.round(suspect=["d0"], slow=["d0"])
    assert policy.states() == {"d0": S.SITOUT}


def test_devices_that_left_are_forgotten() -> None:
    """The state does not grow for ever."""
    policy = Policy().round(suspect=["d0"])
    devices = {d: fact for d, fact in policy.facts.devices.items() if d != "d0"}
    policy.facts = replace(policy.facts, devices=devices)
    assert "d0" not in policy.round().state.devices


def test_a_clock_that_goes_back_stands_still() -> None:
    """No sit-out grows longer, none ends early."""
    policy = Policy().sit_out()
    until = policy.health().until_seconds
    policy.fact("d0", **WELL)
    before = policy.now
    policy.round(after=-1800)
    assert policy.state.now_seconds == before
    policy.round(after=1800 + 600)
    assert policy.now >= until
    assert policy.states() == {"d0": S.PROBATION}


def test_a_clock_that_was_a_year_ahead_freezes_nothing_when_it_is_right_again() -> None:
    """A machine that came up with a dead battery's date: what lasts ten minutes lasts ten."""
    policy = Policy()
    policy.round(after=3e7)
    policy.sit_out()
    policy.fact("d0", **WELL)
    left = policy.health().until_seconds - policy.state.now_seconds
    policy.round(after=-3e7)
    assert policy.states() == {"d0": S.SITOUT}
    assert policy.health().until_seconds - policy.state.now_seconds == pytest.approx(left)
    policy.round(after=left)
    assert policy.states() == {"d0": S.PROBATION}


@pytest.mark.parametrize(
    "wrong",
    [
        {"sitout_seconds": 0.0},
        {"reserve": 0},
        {"probation_shares": (0.5, 0.1, 1.0)},
        {"probation_shares": (0.5,)},
        {"probation_shares": ()},
    ],
)
def test_limits_that_make_no_sense_are_refused(wrong: dict[str, object]) -> None:
    """At once."""
    with pytest.raises(ConfigError):
        PolicyConfig(**wrong)  # type: ignore[arg-type]
