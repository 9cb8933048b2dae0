"""Which steps stay, and why: retention.decide() is pure."""

from __future__ import annotations

from typing import Any

import pytest

from hpstore.checkpoint import Best, RetentionRule
from hpstore.checkpoint.catalog.retention import Retention, StepDecision, StepFacts, decide
from hpstore.errors import ConfigError
from hpstore.units import format_span, parse_seconds, seconds_argument

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
NOW_MS = 1_700_000_000_000
WEEK = Retention(keep_last=1, keep_for_seconds=7 * 86400.0)


def aged(**days: float) -> dict[int, StepFacts]:
    """Facts of steps s1, s2, ... that are so many days old."""
    return {
        int(name[1:]): StepFacts(created_ms=NOW_MS - round(age * DAY_MS))
        for name, age in days.items()
    }


def gone(steps: list[int], retention: Retention, **words: Any) -> list[int]:
    """Steps that go; by default after the newest was committed."""
    words = {"committed": max(steps), "now_ms": NOW_MS} | words
    return [found.step for found in decide(steps, retention, **words) if not found.stays]


def one(step: int, found: list[StepDecision]) -> StepDecision:
    return next(decision for decision in found if decision.step == step)


def test_the_newest_never_goes() -> None:
    """keep_last, keep_every, none; a run that was rolled back keeps what it commits."""
    last = Retention(keep_last=1)
    assert gone([1, 2, 3], Retention()) == []
    assert gone([3, 1, 2], last) == [1, 2]
    assert gone([10, 20, 25], Retention(keep_last=1, keep_every=10)) == []
    assert gone([40, 50, 51, 60, 70], last, committed=51) == [40, 50]
    assert gone([1, 2, 3], last, protected={"a": 1}) == [2]
    assert gone([5], Retention(keep_last=9)) == []
    assert decide([], last, committed=0, now_ms=0) == []


def test_the_best_of_the_steps_that_have_the_metric_stays() -> None:
    """Not a NaN, the newer of equals, and one of a run that was rolled back does not stand in."""
    best = Retention(keep_last=1, keep_best=Best(metric="loss", mode="min"))
    values = {1: 3.0, 2: 1.0, 3: float("nan"), 4: 5.0}
    facts = {s: StepFacts(created_ms=0, metrics={"loss": v}) for s, v in values.items()}
    facts[5] = StepFacts(created_ms=0, metrics={"other": 0.0})
    assert gone([1, 2, 3, 4, 5], best, facts=facts) == [1, 3, 4]
    even = {s: StepFacts(created_ms=0, metrics={"loss": 1.0}) for s in (1, 2, 3)}
    assert gone([1, 2, 3], best, facts=even) == [1, 2]
    later = {1: facts[1], 2: facts[4], 9: facts[2]}
    assert gone([1, 2, 9], best, facts=later, committed=2) == []


def test_young_steps_stay_besides_those_that_other_rules_keep() -> None:
    """A union: an old one stays by another rule, a young one by its age alone."""
    facts = aged(s1=30, s2=8, s3=6.9, s4=1, s5=0)
    assert gone([1, 2, 3, 4, 5], WEEK, facts=facts) == [1, 2]
    both = Retention(keep_last=1, keep_every=2, keep_for_seconds=7 * 86400.0)
    assert gone([1, 2, 3, 4, 5], both, facts=facts) == [1]
    exact = {1: StepFacts(created_ms=NOW_MS - 7 * DAY_MS), 2: StepFacts(created_ms=NOW_MS)}
    assert gone([1, 2], WEEK, facts=exact) == [1]


def test_a_step_from_the_future_never_goes_by_age() -> None:
    """The clock of the host that saved it was ahead, or this one is behind."""
    facts = aged(s1=-0.5, s2=-4000, s3=0)
    decisions = decide([1, 2, 3], WEEK, committed=3, now_ms=NOW_MS, facts=facts)
    assert all(found.stays for found in decisions)
    assert "12.0 h in the future by this clock" in decisions[0].reason
    assert decisions[0].rules == (RetentionRule.AGE,)


def test_a_clock_that_is_ahead_leaves_what_other_rules_keep() -> None:
    """By it every step is old: the last, the multiples, the best and the protected stay."""
    metrics = {s: StepFacts(created_ms=NOW_MS, metrics={"loss": float(s)}) for s in range(1, 9)}
    rules = Retention(
        keep_last=2,
        keep_every=4,
        keep_best=Best(metric="loss", mode="min"),
        keep_for_seconds=60.0,
    )
    found = gone(list(range(1, 9)), rules, facts=metrics, now_ms=10**15, protected={"a": 3})
    assert found == [2, 5, 6]


def test_steps_are_not_in_the_order_of_their_times() -> None:
    """A run that went back saved step 2 after step 3: each is judged by its own time."""
    assert gone([1, 2, 3, 4], WEEK, facts=aged(s1=9, s2=1, s3=8, s4=0)) == [1, 3]


def test_what_cannot_be_read_stays_where_a_rule_must_read_it() -> None:
    """It may be young, or the best. By numbers alone it goes as any other."""
    facts = aged(s2=20, s3=0)
    decisions = decide([1, 2, 3], WEEK, committed=3, now_ms=NOW_MS, facts=facts)
    assert [found.stays for found in decisions] == [True, False, True]
    assert decisions[0].rules == (RetentionRule.UNREAD,)
    assert gone([1, 2, 3], Retention(keep_last=1), facts={}) == [1, 2]


def test_a_fragile_step_stays_and_does_not_count() -> None:
    """PROTOCOL 8: what one more loss would end does not stand in for another step."""
    last = Retention(keep_last=2)
    assert gone([1, 2, 3, 4], last, fragile=[3]) == [1]
    decisions = decide([1, 2, 3, 4], last, committed=4, now_ms=0, fragile=[3])
    assert one(3, decisions).rules == (RetentionRule.FRAGILE,)


def test_every_rule_that_keeps_a_step_is_named() -> None:
    """In a fixed order, with a reason in words; of one that goes, what it lacks."""
    rules = Retention(
        keep_last=1,
        keep_every=10,
        keep_best=Best(metric="acc", mode="max"),
        keep_for_seconds=86400.0,
    )
    facts = {
        s: StepFacts(created_ms=NOW_MS - d * DAY_MS, metrics={"acc": a})
        for s, d, a in ((7, 9, 0.5), (10, 3, 0.9), (11, 0, 0.1), (12, 0, 0.2))
    }
    decisions = decide(
        [7, 10, 11, 12, 13],
        rules,
        committed=12,
        now_ms=NOW_MS,
        facts=facts,
        protected={"a": 10, "b": 10},
    )
    assert one(10, decisions).rules == (
        RetentionRule.EVERY,
        RetentionRule.BEST,
        RetentionRule.PROTECTED,
    )
    assert one(10, decisions).reason == (
        "a multiple of 10; the best by max:acc (0.9); protected as a, b"
    )
    assert one(12, decisions).rules == (RetentionRule.LAST, RetentionRule.AGE)
    assert one(13, decisions).rules[0] is RetentionRule.LATER
    assert one(7, decisions).as_dict() == {
        "step": 7,
        "stays": False,
        "rules": [],
        "reason": "not one of the last 1, no multiple of 10, not the best by max:acc, 9.0 d old",
    }


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("90s", 90), ("1.5 h", 5400), ("30min", 1800), ("7D", 604800), ("2w", 1209600)],
)
def test_spans_are_read(text: str, seconds: float) -> None:
    """With and without a unit."""
    assert parse_seconds(text) == seconds
    assert seconds_argument("x", text) == seconds


@pytest.mark.parametrize("wrong", ["", "week", "7 days ago", "-1d", 0, -1, "0s", True, None, 1e999])
def test_a_wrong_span_is_refused_by_name(wrong: Any) -> None:
    """When it is given, as a ConfigError."""
    with pytest.raises(ConfigError, match=r"^keep_for"):
        seconds_argument("keep_for", wrong)


def test_keep_for_says_what_stays_beyond_keep_last() -> None:
    """Alone it would let a clock that is ahead remove all steps but one."""
    with pytest.raises(ConfigError, match="keep_for say what stays beyond keep_last"):
        Retention(keep_for_seconds=5.0)


def test_spans_are_shown_in_their_largest_unit() -> None:
    """As an operator would say them."""
    shown = [format_span(n) for n in (0, 59.4, 60, 5400, 86400, 604800)]
    assert shown == ["0 s", "59 s", "1.0 min", "1.5 h", "1.0 d", "7.0 d"]
