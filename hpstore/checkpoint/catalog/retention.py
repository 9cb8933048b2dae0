"""Which steps stay, and what under a prefix belongs to nobody (PROTOCOL 18). Pure decisions."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from hpstore.checkpoint.format.checkpoint_manifest import Listing
from hpstore.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """Keep the `count` best steps by a metric given to save(metrics=)."""

    metric: str
    mode: str = "min"  # or "max"
    count: int = 1

    def chosen(self, metrics: Mapping[int, Mapping[str, float]]) -> set[int]:
        """The best steps among those that have the metric; the newer of equals."""
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
            ("keep_last", self.keep_last), ("keep_every", self.keep_every),
            ("keep_best's count", best.count if best else None),
        ):  # fmt: skip
            if value is not None and (type(value) is not int or value < 1):
                raise CheckpointError(f"{name} must be a whole number of at least 1, or None")
        if (self.keep_every is not None or best is not None) and self.keep_last is None:
            raise CheckpointError(
                "keep_every and keep_best say what stays beyond keep_last: set that, too"
            )
        if best is not None and best.mode not in ("min", "max"):
            raise CheckpointError(f"keep_best's mode {best.mode!r} is neither 'min' nor 'max'")


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


def orphans(
    listing: Listing, named: Collection[str], living: Collection[str]
) -> list[str]:  # fmt: skip
    """Segments that no manifest names and no living attempt (by nonce) may still commit."""
    return sorted(
        key
        for key, (_, nonce) in listing.segments.items()
        if key not in named and nonce not in living
    )


__all__ = ["Best", "Retention", "orphans", "steps_to_drop"]
