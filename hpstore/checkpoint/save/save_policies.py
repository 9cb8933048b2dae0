"""When to save: policies that users give to a Checkpointer. Each decides from what it is shown."""

from __future__ import annotations

import datetime
import zoneinfo
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hpstore.errors import ConfigError
from hpstore.units import format_span, seconds_argument, whole_argument

_DAY_SECONDS = 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What a policy is shown after a step.

    `before`: the step after which it was asked before; it answers for all steps since then.
    `elapsed_seconds`: since the last save, by a clock that never jumps. `wall_before`, `wall_now`:
    seconds since 1970 when it was asked before, and now.
    """

    step: int
    before: int
    elapsed_seconds: float
    wall_before: float
    wall_now: float


class SavePolicy:
    """When to save: `EverySteps`, `EveryInterval`, `AtTimes`, `OnPredicate`, or any of several:
    `EverySteps(1000) | EveryInterval("30min")`.

    A policy is a description and has no state: one object serves many Checkpointers.
    """

    __slots__ = ()

    @property
    def by_step(self) -> bool:
        """Whether its answer depends on steps alone, so that ranks agree without a message."""
        raise NotImplementedError

    def due(self, moment: Moment) -> bool:
        """Whether to save now.

        Parameters
        ----------
        moment
            What it decides from.
        """
        raise NotImplementedError

    def due_by_step(self, moment: Moment) -> bool:
        """Whether to save now, for a reason on which all ranks agree without a message.

        Parameters
        ----------
        moment
            What it decides from.
        """
        return self.by_step and self.due(moment)

    def __or__(self, other: object) -> AnyOf:
        return AnyOf((self, other)) if isinstance(other, SavePolicy) else NotImplemented


@dataclass(frozen=True, slots=True)
class EverySteps(SavePolicy):
    """Save after every `steps` steps, counted from the start of the run: at the multiples.

    A multiple that was passed over, as by a trainer that asks after every eighth step, is due at
    the next question. Step 0 is none.

    Parameters
    ----------
    steps
        At least 1.

    Raises
    ------
    ConfigError
        `steps` is not a whole number of at least 1.
    """

    steps: int

    def __post_init__(self) -> None:
        whole_argument("EverySteps(steps)", self.steps, least=1, like="1000")

    @property
    def by_step(self) -> bool:
        """Always."""
        return True

    def due(self, moment: Moment) -> bool:
        """Whether a multiple has come since the question before.

        Parameters
        ----------
        moment
            What it decides from.
        """
        return moment.step // self.steps > max(0, moment.before) // self.steps

    def __str__(self) -> str:
        return f"every {self.steps} steps"


@dataclass(frozen=True, slots=True)
class EveryInterval(SavePolicy):
    """Save when so much time has passed since the last save, whatever was the reason for that.

    Counted by the monotonic clock of rank 0, from when the Checkpointer was made, a step was
    restored, or a save began: a clock that is set changes nothing, and the time between two
    processes does not count.

    Parameters
    ----------
    interval
        Seconds, or text such as "90s", "30min" or "12h".

    Raises
    ------
    ConfigError
        `interval` is not a span of time above 0.
    """

    interval: float | str

    def __post_init__(self) -> None:
        seconds_argument("EveryInterval(interval)", self.interval)

    @property
    def by_step(self) -> bool:
        """Never: clocks of ranks differ."""
        return False

    def due(self, moment: Moment) -> bool:
        """Whether the time has passed.

        Parameters
        ----------
        moment
            What it decides from.
        """
        return moment.elapsed_seconds >= seconds_argument("interval", self.interval)

    def __str__(self) -> str:
        return f"every {format_span(seconds_argument('interval', self.interval))}"


@dataclass(frozen=True, slots=True)
class AtTimes(SavePolicy):
    """Save after the first step that ends at or after a time of day, by the clock of rank 0.

    A time that a clock set forward has skipped, or that came within a long step, is due at the next
    question, once. One that comes twice, where summer time ends or a clock is set back by less than
    an hour, is due the first time only. Times that passed while no process ran are not made good.

    Parameters
    ----------
    times
        "HH:MM" or "HH:MM:SS": one, or several in a sequence.
    zone
        A time zone such as "UTC" or "Europe/Berlin". Default: that of the host of rank 0.

    Raises
    ------
    ConfigError
        A time or the zone is not one.
    """

    times: str | Sequence[str]
    zone: str | None = None

    def __post_init__(self) -> None:
        if not self._parsed():
            raise ConfigError('AtTimes(times) has no time: give for example "03:00"')
        self._zone()

    def _parsed(self) -> list[datetime.time]:
        texts = [self.times] if isinstance(self.times, str) else list(self.times)
        found = []
        for text in texts:
            try:
                found.append(datetime.time.fromisoformat(text))
            except (TypeError, ValueError):
                raise ConfigError(
                    f'AtTimes(times): {text!r} is not a time of day such as "03:00" or "15:30:00"'
                ) from None
            if found[-1].tzinfo is not None:
                raise ConfigError(f"AtTimes(times): {text!r} has a zone: give it as zone=")
        return found

    def _zone(self) -> zoneinfo.ZoneInfo | None:
        if self.zone is None:
            return None
        try:
            return zoneinfo.ZoneInfo(self.zone)
        except (zoneinfo.ZoneInfoNotFoundError, TypeError, ValueError, OSError) as error:
            raise ConfigError(f"AtTimes(zone): {self.zone!r} is no time zone here") from error

    @property
    def by_step(self) -> bool:
        """Never: clocks of ranks differ."""
        return False

    def due(self, moment: Moment) -> bool:
        """Whether one of the times has come since the question before.

        Parameters
        ----------
        moment
            What it decides from.
        """
        if moment.wall_now - moment.wall_before > 2 * _DAY_SECONDS:
            return True  # each time of day has come
        zone = self._zone()
        day = datetime.datetime.fromtimestamp(moment.wall_before, zone).date()
        last = datetime.datetime.fromtimestamp(moment.wall_now, zone).date()
        while day <= last:
            for time in self._parsed():  # fold 0: of a time that comes twice, the first
                at = datetime.datetime.combine(day, time, zone).timestamp()
                if moment.wall_before < at <= moment.wall_now:
                    return True
            day += datetime.timedelta(days=1)
        return False

    def __str__(self) -> str:
        shown = ", ".join(time.isoformat() for time in self._parsed())
        return f"at {shown}" + (f" in {self.zone}" if self.zone is not None else "")


@dataclass(frozen=True, slots=True)
class OnPredicate(SavePolicy):
    """Save when a function of yours says so.

    Parameters
    ----------
    test
        Called with the step; what it returns is taken as true or false. Rank 0 alone calls it and
        reports the answer to the others, once for each step that is asked about and that no policy
        beside it was due at.
    alike
        All ranks come to the same answer by themselves, from the step or from what is equal on all:
        each calls `test`, and no message is sent. If they differ after all, the job hangs in the
        next save.

    Raises
    ------
    ConfigError
        `test` cannot be called.
    """

    test: Callable[[int], object]
    alike: bool = False

    def __post_init__(self) -> None:
        if not callable(self.test):
            raise ConfigError(f"OnPredicate(test) is a {type(self.test).__name__}: give a function")

    @property
    def by_step(self) -> bool:
        """As the user says."""
        return self.alike

    def due(self, moment: Moment) -> bool:
        """What the function says.

        Parameters
        ----------
        moment
            What it decides from.
        """
        return bool(self.test(moment.step))

    def __str__(self) -> str:
        name = getattr(self.test, "__qualname__", type(self.test).__qualname__)
        return f"when {name} is true" + (" on each rank" if self.alike else "")


@dataclass(frozen=True, slots=True)
class AnyOf(SavePolicy):
    """Save when any of several policies is due: `AnyOf([a, b])`, or `a | b`.

    Parameters
    ----------
    policies
        At least one.

    Raises
    ------
    ConfigError
        There is none, or one of them is not a policy.
    """

    policies: Sequence[SavePolicy]

    def __post_init__(self) -> None:
        policies = self.policies
        if not isinstance(policies, Sequence) or not policies:
            raise ConfigError("AnyOf(policies) needs a list of policies")
        for policy in policies:
            checked_policy("AnyOf(policies)", policy)

    @property
    def by_step(self) -> bool:
        """Whether all of them are."""
        return all(policy.by_step for policy in self.policies)

    def due(self, moment: Moment) -> bool:
        """Whether one of them is.

        Parameters
        ----------
        moment
            What they decide from.
        """
        return any(policy.due(moment) for policy in self.policies)

    def due_by_step(self, moment: Moment) -> bool:
        """Whether one of them is, of those on which ranks agree without a message.

        Parameters
        ----------
        moment
            What they decide from.
        """
        return any(policy.due_by_step(moment) for policy in self.policies)

    def __str__(self) -> str:
        return ", or ".join(str(policy) for policy in self.policies)


def checked_policy(name: str, policy: object) -> SavePolicy:
    """`policy`, which must be one. Raises ConfigError, which names the argument."""
    if not isinstance(policy, SavePolicy):
        raise ConfigError(
            f"{name}: {policy!r} is not a policy: give for example EverySteps(1000) or "
            'EveryInterval("30min")'
        )
    return policy
