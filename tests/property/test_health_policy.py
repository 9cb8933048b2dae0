"""The health policy under any verdicts and facts: parity, persistence, bounds (PROTOCOL 16, 17)."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpstore.errors import IntegrityError, MembershipError
from hpstore.format.records import DeviceState, seal, unseal
from hpstore.health import DeviceVerdict, HealthState
from hpstore.health.policy.health_policy import decide
from hpstore.health.policy.operator_commands import Command, command
from hpstore.health.policy.states import (
    ActionKind,
    DeviceFacts,
    ForecastOutlook,
    PolicyConfig,
    PolicyOutcome,
    PolicyState,
    PoolFacts,
    Role,
)

S = HealthState
LOST = (S.FAULTED, S.REMOVED, S.EVICTED, S.REBUILDING)
OFF = (S.SITOUT, S.PROBATION)

facts_of_a_device = st.builds(
    DeviceFacts,
    present=st.sampled_from([True] * 7 + [False]),
    domain=st.sampled_from(["a", "b"]),
    pool_state=st.sampled_from(
        [DeviceState.ONLINE] * 8 + [DeviceState.DRAINING, DeviceState.EVICTED]
    ),
    probes=st.sampled_from([0, 64]),
    writes_slow=st.booleans(),
    forecast=st.sampled_from(ForecastOutlook),
    empty=st.booleans(),
    evictable=st.booleans(),
    reconciled=st.booleans(),
)
configs = st.builds(
    PolicyConfig,
    role=st.sampled_from(Role),
    reserve=st.integers(1, 2),
    forecast_drains=st.booleans(),
    removal_seconds=st.sampled_from([0.1, 600.0]),
    removals_per_hour_ratio=st.sampled_from([0.1, 1.0]),
    bad_ratio_most=st.sampled_from([0.25, 1.0]),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What is told to the policy in one round."""

    after: float
    verdicts: list[DeviceVerdict]
    facts: PoolFacts
    word: tuple[Command, str] | None


@st.composite
def stories(draw: st.DrawFn) -> list[Round]:
    """Rounds in the life of one pool."""
    names = [f"d{i}" for i in range(draw(st.integers(1, 9)))]
    parity = draw(st.integers(1, 4))
    verdict = st.builds(
        DeviceVerdict,
        device=st.sampled_from(names),
        score=st.floats(0, 40),
        reason=st.just("because"),
        state=st.sampled_from([S.SUSPECT, S.SITOUT, S.SITOUT, S.FAULTED]),
    )
    facts = st.builds(
        PoolFacts,
        parity=st.just(parity),
        devices=st.fixed_dictionaries(dict.fromkeys(names, facts_of_a_device)),
        losses_tolerated=st.none() | st.integers(0, parity),
        busy=st.sampled_from(["", "", "a rebuild"]),
    )
    word = st.none() | st.tuples(st.sampled_from(Command), st.sampled_from(names))
    one = st.builds(
        Round,
        after=st.sampled_from([1.0, 10.0, 120.0, 700.0, 4000.0]),
        verdicts=st.lists(verdict, max_size=8),
        facts=facts,
        word=word,
    )
    return draw(st.lists(one, max_size=12))


def play(
    story: list[Round], config: PolicyConfig, *, words: bool
) -> list[tuple[Round, PolicyOutcome]]:
    """All rounds, with the operator's words before them if `words`."""
    state, now, found = PolicyState(), 1e6, []
    for one in story:
        now += one.after
        if words and one.word is not None:
            with contextlib.suppress(MembershipError):  # refused: nothing has changed
                state = command(state, *one.word, one.facts, now, config).state
        outcome = decide(state, one.verdicts, one.facts, now, config)
        state = outcome.state
        found.append((one, outcome))
    return found


def counts(one: Round, outcome: PolicyOutcome) -> tuple[int, int, int]:
    """Devices lost, kept off by the policy, kept off by somebody's word."""
    lost = off = manual = 0
    for device, fact in one.facts.devices.items():
        health = outcome.state.health(device)
        if not fact.present or health.state in LOST:
            lost += 1
        elif health.manual or health.state is S.MAINTENANCE:
            manual += 1
        elif health.state in OFF or (
            health.state is S.DRAINING and fact.pool_state is DeviceState.ONLINE
        ):
            off += 1
    return lost, off, manual


@given(stories(), configs)
def test_parity_is_never_given_away_by_choice_rule_17(
    story: list[Round], config: PolicyConfig
) -> None:
    """PROTOCOL 17: while anything sits out by the policy's choice, it leaves `reserve` losses.

    A drain that was begun is not undone by a loss: its device is still read.
    """
    for one, outcome in play(story, config, words=False):
        lost, off, _ = counts(one, outcome)
        spared = sum(
            outcome.state.health(d).state in OFF for d, f in one.facts.devices.items() if f.present
        )
        left = one.facts.parity - lost
        if one.facts.losses_tolerated is not None:
            left = min(left, one.facts.losses_tolerated)
        if spared:
            assert off <= left - config.reserve


@given(stories(), configs)
def test_operators_too_leave_what_can_be_read_rule_17(
    story: list[Round], config: PolicyConfig
) -> None:
    """Sit-outs by word may use the reserve; with those of the policy they stay within parity."""
    for one, outcome in play(story, config, words=True):
        lost, _, _ = counts(one, outcome)
        sitting = sum(
            outcome.state.health(d).state in OFF for d, f in one.facts.devices.items() if f.present
        )
        if sitting:
            assert sitting + lost <= one.facts.parity


@given(stories(), configs)
def test_a_process_asks_for_nothing_of_the_pool_rule_16(
    story: list[Round], config: PolicyConfig
) -> None:
    """PROTOCOL 16: no drain, eviction or healing; it drains only what the pool drains."""
    process = replace(config, role=Role.PROCESS)
    forbidden = {ActionKind.DRAIN, ActionKind.EVICT, ActionKind.HEAL}
    for one, outcome in play(story, process, words=False):
        assert not forbidden & {action.kind for action in outcome.actions}
        for line in outcome.decisions:
            if line.becomes is S.DRAINING:
                assert one.facts.devices[line.device].pool_state is DeviceState.DRAINING


@given(stories(), configs)
def test_only_what_is_drained_and_empty_is_evicted(
    story: list[Round], config: PolicyConfig
) -> None:
    """And what is healed is lost; nothing else is asked for."""
    for one, outcome in play(story, config, words=True):
        for action in outcome.actions:
            if action.kind is ActionKind.EVICT:
                fact = one.facts.devices[action.device]
                assert (fact.pool_state, fact.empty, fact.evictable) == (
                    DeviceState.DRAINING,
                    True,
                    True,
                )
            if action.kind is ActionKind.HEAL:
                assert outcome.state.health(action.device).state in LOST


@given(stories(), configs)
def test_states_survive_a_restart(story: list[Round], config: PolicyConfig) -> None:
    """Encoded and decoded, they are the same."""
    for _, outcome in play(story, config, words=True):
        assert PolicyState.decode(outcome.state.encode(), where="states") == outcome.state


@given(stories(), configs)
def test_every_change_is_written_with_its_reason(story: list[Round], config: PolicyConfig) -> None:
    """Lines lead from the state before to the state after; what is remembered is bounded."""
    before = PolicyState()
    for _, outcome in play(story, config, words=False):
        for device, health in outcome.state.devices.items():
            at = before.health(device).state
            for line in outcome.decisions:
                if line.device == device:
                    assert line.was is at
                    assert line.reason
                    at = line.becomes
            assert at is health.state
            assert len(health.changes) <= 64
            assert len(health.sat_out) <= len(health.sitouts)
        before = outcome.state


@given(st.binary(max_size=200), st.integers(0, 10_000), st.integers(1, 255))
def test_damaged_states_are_refused(junk: bytes, at: int, flip: int) -> None:
    """Never taken for good ones: guards would be reset in silence."""
    whole = bytearray(PolicyState(now_seconds=5.0, removals=(1.0,)).encode())
    whole[at % len(whole)] ^= flip
    for data in (junk, bytes(whole)):
        try:
            PolicyState.decode(data, where="states")
        except IntegrityError:
            continue
        # the digest does not cover white space
        assert PolicyState.decode(data, where="states").removals == (1.0,)


def test_states_without_a_field_are_refused() -> None:
    """Not filled with defaults."""
    state = decide(
        PolicyState(), [], PoolFacts(parity=1, devices={"d0": DeviceFacts()}), 1.0, PolicyConfig()
    ).state
    body = unseal(state.encode(), where="states")
    for name, value in (("pinned", 1), ("sitouts", 3), ("state", "odd"), ("score", None)):
        devices = body["devices"]
        assert isinstance(devices, dict)
        wrong = {**body, "devices": {"d0": {**devices["d0"], name: value}}}
        with pytest.raises(IntegrityError):
            PolicyState.decode(seal(wrong), where="states")
    with pytest.raises(IntegrityError):
        PolicyState.decode(seal({**body, "devices": []}), where="states")
