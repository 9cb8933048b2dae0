"""A further pool for the steps of a run: which steps it gets, and which it keeps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hpstore.checkpoint.catalog.retention import Best, Retention
from hpstore.errors import ConfigError
from hpstore.pool.pool import Pool


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """A further pool for the steps of a run: `Checkpointer(..., tiers=[Tier(pool=cold)])`.

    Parameters
    ----------
    pool
        An open pool, with a k and an m of its own. It stays the caller's. From one that was opened
        read-only steps are restored alone.
    every
        Steps that are a multiple of this are copied. Default: each that is committed.
    keep_last, keep_every, keep_best, keep_for
        What stays in this pool, as a Checkpointer has it.
    rate_bytes_per_second
        How fast steps are copied at most. Default: as fast as the devices are.
    retry_seconds
        How long a copy that fails is tried again.
    copies
        False: steps are restored from it, and none is copied there, as by a process that saves
        nothing.

    Raises
    ------
    ConfigError
        A value is not one of those above. It is a ValueError.
    """

    pool: Pool
    every: int | None = None
    keep_last: int | None = None
    keep_every: int | None = None
    keep_best: Best | str | None = None
    keep_for: float | str | None = None
    rate_bytes_per_second: float | None = None
    retry_seconds: float = 120.0
    copies: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.pool, Pool):
            raise ConfigError(
                f"a Tier takes an open pool, not a {type(self.pool).__name__}: hpstore.open(...)"
            )
        if self.every is not None and (type(self.every) is not int or self.every < 1):
            raise ConfigError("every must be a whole number of at least 1, or None")
        rate = self.rate_bytes_per_second
        if rate is not None and not _is_number(rate, above=0):
            raise ConfigError("rate_bytes_per_second must be a number above 0, or None")
        if not _is_number(self.retry_seconds, above=-1):
            raise ConfigError("retry_seconds must be a number of seconds of at least 0")
        if type(self.copies) is not bool:
            raise ConfigError(f"copies is {self.copies!r}, not True or False")
        _ = self.retention  # raises for what retention does not take

    @property
    def name(self) -> str:
        """Of its pool."""
        return self.pool.config.name

    @property
    def retention(self) -> Retention:
        """What stays."""
        return Retention.of(self.keep_last, self.keep_every, self.keep_best, self.keep_for)


def is_due(tier: Tier, step: int) -> bool:
    """Whether a step is copied: never into a pool that was opened read-only."""
    takes = tier.copies and not tier.pool.read_only
    return takes and (tier.every is None or step % tier.every == 0)


def checked_tiers(pool: Pool, tiers: Iterable[Tier]) -> tuple[Tier, ...]:
    """`tiers`. Raises ConfigError unless they are tiers, each of a pool of its own."""
    found = tuple(tiers)
    for tier in found:
        if not isinstance(tier, Tier):
            raise ConfigError(f"tiers= takes Tier(pool=...), not a {type(tier).__name__}")
    ids = [other.admin.record.pool_id for other in (pool, *(tier.pool for tier in found))]
    if len(set(ids)) < len(ids):
        raise ConfigError("each tier needs a pool of its own, another than the one saved into")
    return found


def _is_number(value: object, *, above: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > above
