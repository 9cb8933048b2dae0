"""Which steps stay, and what under a prefix belongs to nobody (PROTOCOL 18). Pure decisions."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from hpstore.checkpoint.format.checkpoint_manifest import Listing
from hpstore.errors import ConfigError


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
    """What stays: the last ones, every so many steps, the best. `keep_last` None keeps all."""

    keep_last: int | None = None
    keep_every: int | None = None
    keep_best: Best | None = None

    def __post_init__(self) -> None:
        best = self.keep_best
        for name, value in (
            ("keep_last", self.keep_last),
            ("keep_every", self.keep_every),
            ("keep_best's count", best.count if best else None),
        ):
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"{name} must be a whole number of at least 1, or None")
        if (self.keep_every is not None or best is not None) and self.keep_last is None:
            raise ConfigError(
                "keep_every and keep_best say what stays beyond keep_last: set that, too"
            )


def steps_to_drop(
    steps: Iterable[int],
    retention: Retention,
    *,
    committed: int,
    protected: Collection[int] = (),
    metrics: Mapping[int, Mapping[str, float]] | None = None,
) -> list[int]:
    """Steps that retention removes after `committed` was: only earlier ones, never itself.

    Later steps are those of a run that was rolled back; they are the user's to delete.
    """
    if retention.keep_last is None:
        return []
    ordered = sorted(step for step in steps if step <= committed)
    kept = {*ordered[-max(1, retention.keep_last) :], *protected}
    if retention.keep_every:
        kept |= {step for step in ordered if step % retention.keep_every == 0}
    if retention.keep_best is not None:
        kept |= retention.keep_best.chosen(metrics or {})
    return [step for step in ordered if step not in kept and step != committed]


def orphans(listing: Listing, named: Collection[str], living: Collection[str]) -> list[str]:
    """Segments that no manifest names and no living attempt (by nonce) may still commit."""
    return sorted(
        key
        for key, (_, nonce) in listing.segments.items()
        if key not in named and nonce not in living
    )
