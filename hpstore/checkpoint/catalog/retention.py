"""Which steps stay, and what under a prefix belongs to nobody (PROTOCOL 18). Pure decisions."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from hpstore.checkpoint.format.checkpoint_manifest import Listing
from hpstore.errors import ConfigError
from hpstore.units import format_span, seconds_argument


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """Keep the best steps by a metric: `Best(metric="loss", mode="min", count=3)`.

    Parameters
    ----------
    metric
        A name among those given to save(metrics=).
    mode
        "min" or "max": whether smaller or greater is better.
    count
        How many of the best steps stay.

    Raises
    ------
    ConfigError
        The metric has no name, or the mode is neither.
    """

    metric: str
    mode: str
    count: int = 1

    def __post_init__(self) -> None:
        if self.mode not in ("min", "max"):
            raise ConfigError(f"the mode {self.mode!r} of Best is neither 'min' nor 'max'")
        if not isinstance(self.metric, str) or not self.metric:
            raise ConfigError(f"the metric {self.metric!r} of Best is not a name")

    @classmethod
    def of(cls, said: Best | str | None) -> Best | None:
        """What keep_best means: a Best, "min:loss" or "max:acc". Raises ConfigError."""
        if said is None or isinstance(said, Best):
            return said
        mode, colon, metric = str(said).partition(":")
        if colon and mode in ("min", "max"):
            return cls(metric=metric, mode=mode)
        raise ConfigError(
            f"keep_best={said!r} must say which is better: "
            f'"min:{said}" keeps the step where it is smallest, "max:{said}" where it is greatest'
        )

    def chosen(self, metrics: Mapping[int, Mapping[str, float]]) -> set[int]:
        """The best steps among those that have the metric; the newer of equals.

        Parameters
        ----------
        metrics
            By step, its numbers by name.
        """
        sign = 1 if self.mode == "min" else -1
        rated = [
            (sign * values[self.metric], -step)
            for step, values in metrics.items()
            if self.metric in values and not math.isnan(values[self.metric])
        ]
        return {-step for _, step in sorted(rated)[: self.count]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """What stays: the last ones, every so many steps, the best, the young. A step stays when any
    of these says so. `keep_last` None keeps all."""

    keep_last: int | None = None
    keep_every: int | None = None
    keep_best: Best | None = None
    keep_for_seconds: float | None = None

    def __post_init__(self) -> None:
        best = self.keep_best
        for name, value in (
            ("keep_last", self.keep_last),
            ("keep_every", self.keep_every),
            ("keep_best's count", best.count if best else None),
        ):
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"{name} must be a whole number of at least 1, or None")
        besides = (self.keep_every, best, self.keep_for_seconds)
        if self.keep_last is None and any(rule is not None for rule in besides):
            raise ConfigError(
                "keep_every, keep_best and keep_for say what stays beyond keep_last: set that, too"
            )

    @classmethod
    def of(
        cls,
        keep_last: int | None,
        keep_every: int | None,
        keep_best: Best | str | None,
        keep_for: float | str | None,
    ) -> Retention:
        """By the arguments of a Checkpointer. Raises ConfigError."""
        return cls(
            keep_last=keep_last,
            keep_every=keep_every,
            keep_best=Best.of(keep_best),
            keep_for_seconds=None if keep_for is None else seconds_argument("keep_for", keep_for),
        )

    @property
    def needs_facts(self) -> bool:
        """Whether it decides by more than the numbers of the steps."""
        return self.keep_best is not None or self.keep_for_seconds is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """What a manifest says of its step that retention looks at. `created_ms`: of the commit, in
    milliseconds since 1970 by the clock of the host that made it."""

    created_ms: int
    metrics: Mapping[str, float] = field(default_factory=dict)


class RetentionRule(StrEnum):
    """Why a step stays."""

    LAST = "keep_last"
    EVERY = "keep_every"
    BEST = "keep_best"
    AGE = "keep_for"
    PROTECTED = "protected"
    ALL = "all stay"  # no keep_last was given
    LATER = "later"  # than the step that was committed last: of a run that was rolled back
    UNREAD = "unread"  # its manifest cannot be read
    FRAGILE = "not whole"  # one more loss could end it, or the newest step: nothing goes then


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDecision:
    """What retention decides about one step.

    `rules` say why it stays, in a fixed order; of a step that goes there are none. `reason` says in
    words why it stays or goes.
    """

    step: int
    rules: tuple[RetentionRule, ...]
    reason: str

    @property
    def stays(self) -> bool:
        """Whether any rule keeps it."""
        return bool(self.rules)

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {
            "step": self.step,
            "stays": self.stays,
            "rules": [rule.value for rule in self.rules],
            "reason": self.reason,
        }


def decide(
    steps: Iterable[int],
    retention: Retention,
    *,
    committed: int,
    now_ms: int,
    protected: Mapping[str, int] | None = None,
    facts: Mapping[int, StepFacts] | None = None,
    fragile: Collection[int] = (),
) -> list[StepDecision]:
    """Say of each step, ascending, whether it stays after `committed` was committed, and why.

    Only earlier steps go, never `committed` itself. Later ones are those of a run that was rolled
    back; they are the user's to delete. `protected`: steps by name. `facts`: of the steps whose
    manifest was read. `fragile`: steps that may yet be lost: they stay, and do not count for
    keep_last.
    """
    known, names = facts or {}, protected or {}
    ordered = sorted(set(steps))
    counted = [step for step in ordered if step <= committed and step not in fragile]
    last = set(counted[-retention.keep_last :]) if retention.keep_last is not None else set()
    best: set[int] = set()
    if retention.keep_best is not None:
        best = retention.keep_best.chosen(
            {step: known[step].metrics for step in counted if step in known}
        )
    return [
        _decided(
            step,
            retention,
            [
                (RetentionRule.ALL, "keep_last is not set" if retention.keep_last is None else ""),
                (RetentionRule.LATER, f"later than step {committed}" if step > committed else ""),
                (RetentionRule.FRAGILE, "one more loss could end it" if step in fragile else ""),
                (RetentionRule.LAST, f"one of the last {retention.keep_last}" * (step in last)),
                (RetentionRule.EVERY, _every(step, retention)),
                (RetentionRule.BEST, _best(step, retention, known) if step in best else ""),
                (RetentionRule.AGE, _young(known.get(step), retention, now_ms)),
                (RetentionRule.PROTECTED, _protected(step, names)),
                (RetentionRule.UNREAD, _unread(step, retention, known)),
            ],
            known.get(step),
            now_ms,
        )
        for step in ordered
    ]


def _decided(
    step: int,
    retention: Retention,
    found: Sequence[tuple[RetentionRule, str]],
    facts: StepFacts | None,
    now_ms: int,
) -> StepDecision:
    """The rules that have a reason for a step keep it; without any it goes, and that is said."""
    kept = [(rule, text) for rule, text in found if text]
    if not kept:
        text = _why_it_goes(retention, facts, now_ms)
        return StepDecision(step=step, rules=(), reason=text)
    return StepDecision(
        step=step,
        rules=tuple(rule for rule, _ in kept),
        reason="; ".join(text for _, text in kept),
    )


def _every(step: int, retention: Retention) -> str:
    every = retention.keep_every
    return f"a multiple of {every}" if every and step % every == 0 else ""


def _best(step: int, retention: Retention, known: Mapping[int, StepFacts]) -> str:
    best = retention.keep_best
    if best is None:
        return ""
    place = "the best" if best.count == 1 else f"one of the {best.count} best"
    return f"{place} by {best.mode}:{best.metric} ({known[step].metrics[best.metric]:.6g})"


def _young(facts: StepFacts | None, retention: Retention, now_ms: int) -> str:
    """A step of the future is young, whatever made its clock or this one differ."""
    limit = retention.keep_for_seconds
    if facts is None or limit is None:
        return ""
    seconds = (now_ms - facts.created_ms) / 1000
    if seconds < 0:
        return f"saved {format_span(-seconds)} in the future by this clock"
    return f"{format_span(seconds)} old, less than {format_span(limit)}" if seconds < limit else ""


def _protected(step: int, names: Mapping[str, int]) -> str:
    found = sorted(name for name, kept in names.items() if kept == step)
    return f"protected as {', '.join(found)}" if found else ""


def _unread(step: int, retention: Retention, known: Mapping[int, StepFacts]) -> str:
    """What cannot be read may be the best, or young."""
    return "its manifest cannot be read" if retention.needs_facts and step not in known else ""


def _why_it_goes(retention: Retention, facts: StepFacts | None, now_ms: int) -> str:
    parts = [f"not one of the last {retention.keep_last}"]
    if retention.keep_every:
        parts.append(f"no multiple of {retention.keep_every}")
    if retention.keep_best is not None:
        parts.append(f"not the best by {retention.keep_best.mode}:{retention.keep_best.metric}")
    if retention.keep_for_seconds is not None and facts is not None:
        parts.append(f"{format_span((now_ms - facts.created_ms) / 1000)} old")
    return ", ".join(parts)


def orphans(listing: Listing, named: Collection[str], living: Collection[str]) -> list[str]:
    """Segments that no manifest names and no living attempt (by nonce) may still commit."""
    return sorted(
        key
        for key, (_, nonce) in listing.segments.items()
        if key not in named and nonce not in living
    )
