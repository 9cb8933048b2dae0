"""When to save: policies are pure, and a schedule remembers what was asked, saved and restored."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import pytest

from hpstore.checkpoint import AnyOf, AtTimes, EveryInterval, EverySteps, OnPredicate, SavePolicy
from hpstore.checkpoint.ranks.collectives import Ranks
from hpstore.checkpoint.save.save_policies import Moment
from hpstore.checkpoint.save.save_schedule import SaveSchedule
from hpstore.errors import CheckpointError, ConfigError

NOON = datetime.datetime(2026, 3, 10, 12, tzinfo=datetime.UTC).timestamp()


class Clocks:
    """What rank 0 reads."""

    def __init__(self, wall: float = NOON) -> None:
        self.monotonic, self.wall = 1000.0, wall

    def schedule(self, policy: SavePolicy | None, ranks: Ranks | None = None) -> SaveSchedule:
        return SaveSchedule(
            policy,
            ranks or Ranks(1.0, alone=True),
            monotonic=lambda: self.monotonic,
            wall=lambda: self.wall,
        )

    def run(self, seconds: float) -> None:
        """Both clocks go on."""
        self.monotonic += seconds
        self.wall += seconds


def due(policy: SavePolicy, steps: range | list[int]) -> list[int]:
    """Steps at which a fresh run is to save."""
    schedule = Clocks().schedule(policy)
    return [step for step in steps if schedule.due(step)]


def test_every_so_many_steps_of_the_run() -> None:
    """At the multiples; step 0 is none."""
    assert due(EverySteps(4), range(14)) == [4, 8, 12]
    assert due(EverySteps(1), range(3)) == [1, 2]


def test_a_multiple_that_was_passed_over_is_due_at_the_next_question() -> None:
    """Once, whether the trainer asks after every eighth step or left some out."""
    assert due(EverySteps(10), list(range(8, 60, 8))) == [16, 24, 32, 40, 56]
    assert due(EverySteps(10), [9, 35, 36, 41]) == [35, 41]
    assert due(EverySteps(10), [25, 26]) == []  # of what was before the first nothing is known


def test_after_a_restart_steps_count_from_the_start_of_the_run() -> None:
    """Not from the restart; a multiple between the restored step and the first question is due."""
    schedule = Clocks().schedule(EverySteps(100))
    schedule.restored(230)
    assert [step for step in range(231, 402) if schedule.due(step)] == [300, 400]
    again = Clocks().schedule(EverySteps(100))
    again.restored(230)
    assert again.due(304)
    same = Clocks().schedule(EverySteps(100))
    same.restored(300)
    assert not same.due(300)  # it is there
    assert not same.due(301)


def test_a_run_that_went_back_is_due_at_the_same_steps_again() -> None:
    """By restore(), or by itself."""
    schedule = Clocks().schedule(EverySteps(5))
    for _ in range(2):
        assert [step for step in range(8, 13) if schedule.due(step)] == [10]
        schedule.restored(7)
    assert schedule.due(20)
    assert schedule.due(15)
    assert not schedule.due(9)
    assert schedule.due(10)


def test_a_step_asked_twice_has_one_answer_until_it_is_saved() -> None:
    """The function is called once; after the save the answer is False, and the next step is its
    own."""
    asked: list[int] = []

    def odd(step: int) -> bool:
        asked.append(step)
        return step % 2 == 1

    schedule = Clocks().schedule(OnPredicate(odd))
    assert [schedule.due(3) for _ in range(3)] == [True] * 3
    schedule.saved(3)
    assert [schedule.due(3) for _ in range(2)] == [False] * 2
    assert not schedule.due(4)
    assert not schedule.due(4)
    assert asked == [3, 4]


def test_a_save_of_another_reason_counts() -> None:
    """What was saved by hand is not due once more, and the interval begins again."""
    clocks = Clocks()
    schedule = clocks.schedule(EverySteps(10) | EveryInterval(60))
    schedule.due(9)
    schedule.saved(10)
    assert not schedule.due(11)
    clocks.run(59)
    assert not schedule.due(12)
    schedule.saved(12)
    clocks.run(59)
    assert not schedule.due(13)
    clocks.run(1)
    assert schedule.due(14)


def test_an_interval_counts_from_the_last_answer_or_save() -> None:
    """Not from multiples of a clock; an answer that no save follows is not repeated."""
    clocks = Clocks()
    schedule = clocks.schedule(EveryInterval("1min"))
    found = []
    for step in range(1, 12):
        clocks.run(25)
        if schedule.due(step):
            found.append(step)
            clocks.run(10)  # the save itself
            schedule.saved(step)
    assert found == [3, 5, 7, 9, 11]
    clocks.run(61)
    assert schedule.due(12)
    assert not schedule.due(13)  # skipped by on_busy, or the user did not save


def test_an_interval_begins_again_with_a_restart() -> None:
    """The time between two processes, and that of restoring, does not count."""
    clocks = Clocks()
    schedule = clocks.schedule(EveryInterval(60))
    clocks.run(59)
    schedule.restored(7)
    clocks.run(59)
    assert not schedule.due(8)
    clocks.run(1)
    assert schedule.due(9)


def test_a_clock_that_is_set_does_not_move_an_interval() -> None:
    """It is counted by a clock that never jumps."""
    clocks = Clocks()
    schedule = clocks.schedule(EveryInterval(60))
    clocks.wall += 10**8
    assert not schedule.due(1)
    clocks.run(60)
    clocks.wall -= 2 * 10**8
    assert schedule.due(2)


def hours(policy: AtTimes, start: float, moves: list[float]) -> list[bool]:
    """Answers at steps that end after so many hours of the wall clock each."""
    clocks = Clocks(start)
    schedule, found = clocks.schedule(policy), []
    for step, move in enumerate(moves):
        clocks.wall += move * 3600
        found.append(schedule.due(step))
    return found


def test_a_time_of_day_is_due_once_a_day() -> None:
    """After the first step that ends at or after it; several times one by one."""
    one = AtTimes("13:00", zone="UTC")
    assert hours(one, NOON, [0.5, 0.5, 0.5, 23, 0.5]) == [False, True, False, False, True]
    two = AtTimes(["13:00", "14:30:00"], zone="UTC")
    assert hours(two, NOON, [1.1, 1, 1, 22]) == [True, False, True, True]
    assert hours(two, NOON, [5, 0.1]) == [True, False]  # both within one step
    assert hours(one, NOON, [24 * 9, 0.5]) == [True, False]


def test_a_time_before_the_process_is_not_made_good() -> None:
    """It began at noon; a run that restores has nothing new to save."""
    assert hours(AtTimes("11:59", zone="UTC"), NOON, [0, 23.9, 0.1]) == [False, False, True]
    assert hours(AtTimes("12:00", zone="UTC"), NOON, [0, 0.1]) == [False, False]


def test_a_clock_that_jumps_over_a_time_makes_it_due_once() -> None:
    """Forward: at the next question. Back by less than an hour: not a second time."""
    one = AtTimes("13:00", zone="UTC")
    assert hours(one, NOON, [2, 0.1]) == [True, False]
    assert hours(one, NOON, [1.2, -0.9, 0.8, 0.2]) == [True, False, False, False]
    assert hours(one, NOON, [1.2, -0.9, 24.6, 0.2]) == [True, False, False, True]


def test_a_clock_that_jumps_past_all_calendars_is_borne() -> None:
    """A year that Python's dates do not have: each time of day has come by then."""
    one = AtTimes("13:00", zone="UTC")
    assert one.due(Moment(step=1, before=0, elapsed_seconds=0, wall_before=NOON, wall_now=1e15))


def test_a_clock_that_was_far_ahead_does_not_silence_a_time() -> None:
    """It was a year ahead when the job began, and is set right."""
    year = 24 * 365.0
    one = AtTimes("13:00", zone="UTC")
    assert hours(one, NOON + year * 3600, [-year, 0.9, 0.2]) == [False, False, True]


@pytest.mark.parametrize(
    ("day", "found"),
    [
        # 02:30 does not exist on 29 March 2026: an hour after 01:30 it is due
        (datetime.date(2026, 3, 29), [False, False, True, False]),
        # on 25 October it comes twice: the first time only
        (datetime.date(2026, 10, 25), [False, True, False, False]),
    ],
)
def test_summer_time_makes_a_time_due_once(day: datetime.date, found: list[bool]) -> None:
    """Asked at full hours after midnight of Berlin."""
    berlin = AtTimes("02:30", zone="Europe/Berlin")
    midnight = datetime.datetime.combine(day, datetime.time(), berlin._zone()).timestamp()
    moves = [1.9, 0.7, 0.9, 1] if found[1] else [1.9, 0.5, 0.2, 1]
    assert hours(berlin, midnight, moves) == found


def test_the_zone_of_the_host_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of rank 0."""
    import time

    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        assert hours(AtTimes("22:00"), NOON, [0.9, 0.2]) == [False, True]  # 13:00 UTC
    finally:
        monkeypatch.undo()
        time.tzset()


def test_any_of_several() -> None:
    """As `|` or as a list; nested."""
    assert due(EverySteps(4) | EverySteps(6), range(13)) == [4, 6, 8, 12]
    nested = AnyOf([EverySteps(4) | EverySteps(6), OnPredicate(lambda step: step == 7)])
    assert due(nested, range(9)) == [4, 6, 7, 8]
    assert str(nested).startswith("every 4 steps, or every 6 steps, or when ")


class Follower(Ranks):
    """Rank 1 of 2: what rank 0 reports is given."""

    def __init__(self, reports: list[tuple[int, int]]) -> None:
        self.rank, self.world, self.reports = 1, 2, reports

    def all_gather(self, mine: bytes, channel: object) -> list[bytes]:
        return [mine, mine]

    def announced(self, mine: tuple[int, ...], channel: object) -> tuple[int, ...]:
        return self.reports.pop(0)


def never(step: int) -> bool:
    raise AssertionError(f"called with {step}")


def test_other_ranks_take_the_answer_of_rank_0() -> None:
    """Their clocks and functions are not looked at; a step asked twice needs no second message."""
    clocks = Clocks()
    ranks = Follower([(1, 0), (2, 1)])
    schedule = clocks.schedule(EveryInterval(60) | OnPredicate(never), ranks)
    clocks.run(600)
    assert not schedule.due(1)
    assert schedule.due(2)
    assert schedule.due(2)
    assert ranks.reports == []


@pytest.mark.parametrize(
    "policy",
    [
        EverySteps(2),
        OnPredicate(lambda step: step % 2 == 0, alike=True),
        EverySteps(2) | EverySteps(4),
    ],
)
def test_what_steps_alone_decide_needs_no_message(policy: SavePolicy) -> None:
    """No rank waits for another."""
    schedule = Clocks().schedule(policy, Follower([]))
    assert [step for step in range(1, 7) if schedule.due(step)] == [2, 4, 6]


def test_of_mixed_policies_only_what_is_left_open_needs_a_message() -> None:
    """At step 2 all ranks know already, and rank 0's function is not called."""
    ranks = Follower([(1, 0), (3, 1)])
    schedule = Clocks().schedule(EverySteps(2) | OnPredicate(never), ranks)
    assert [schedule.due(step) for step in (1, 2, 3)] == [False, True, True]


@pytest.mark.parametrize(
    ("report", "said"), [((5, 0), "rank 0 step 5"), ((1, 2), "the policy failed on rank 0")]
)
def test_ranks_that_do_not_agree_are_an_error(report: tuple[int, int], said: str) -> None:
    """They ask about different steps, or rank 0 has no answer."""
    with pytest.raises(CheckpointError, match=said):
        Clocks().schedule(EveryInterval(60), Follower([report])).due(1)


def test_what_a_function_raises_is_raised() -> None:
    """And the step can be asked about again."""
    answers: list[Any] = [OSError("no file"), True]

    def flaky(step: int) -> bool:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return bool(answer)

    schedule = Clocks().schedule(OnPredicate(flaky))
    with pytest.raises(OSError, match="no file"):
        schedule.due(1)
    assert schedule.due(1)


def test_without_a_policy_it_cannot_be_asked() -> None:
    """The message has a policy to give."""
    with pytest.raises(ConfigError, match=r"when=EverySteps\(1000\)"):
        Clocks().schedule(None).due(1)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: EverySteps(0), r"EverySteps\(steps\) is 0"),
        (lambda: EverySteps(2.5), r"EverySteps\(steps\) is 2.5, a float"),  # type: ignore[arg-type]
        (lambda: EveryInterval("soon"), "'soon' is not a span of time"),
        (lambda: EveryInterval(0), "above 0"),
        (lambda: AtTimes("25:00"), "'25:00' is not a time of day"),
        (lambda: AtTimes([]), "has no time"),
        (lambda: AtTimes([3]), "3 is not a time of day"),  # type: ignore[list-item]
        (lambda: AtTimes("03:00+01:00"), "give it as zone="),
        (lambda: AtTimes("03:00", zone="Mars/Olympus"), "'Mars/Olympus' is no time zone here"),
        (lambda: OnPredicate(True), "is a bool: give a function"),  # type: ignore[arg-type]
        (lambda: AnyOf([]), "needs a list of policies"),
        (lambda: AnyOf([EverySteps(1), 500]), "500 is not a policy"),  # type: ignore[list-item]
        (lambda: Clocks().schedule(500), "when: 500 is not a policy"),  # type: ignore[arg-type]
    ],
)
def test_wrong_arguments_are_refused(made: Callable[[], object], said: str) -> None:
    """When the policy is made, as a ConfigError, which is a ValueError."""
    with pytest.raises(ConfigError, match=said):
        made()
