"""Names of checkpoints whose steps are in further pools, and tiers of adapters that are pickled."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch.distributed as dist

from hpstore.checkpoint import Checkpointer, Tier
from hpstore.checkpoint.tiers.nearest_step import listed_steps
from hpstore.errors import CheckpointError, ConfigError
from hpstore.pool.pool import Pool
from hpstore.trainers.optional_import import UnopenedPool, as_pool
from hpstore.trainers.sharded_parts import UNREADABLE, of_nearest

_log = logging.getLogger(__name__)
_RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID")  # as Lightning looks for its own


def checked_trainer_tiers(tiers: Iterable[Tier]) -> tuple[Tier, ...]:
    """`tiers`. Raises ConfigError for one that keeps steps by a metric: adapters record none."""
    found = tuple(tiers)
    for tier in found:
        if isinstance(tier, Tier) and tier.keep_best is not None:
            raise ConfigError(
                "Tier(keep_best=) goes by the metrics of a step, and trainers' adapters record "
                "none: use keep_last=, keep_every= or keep_for="
            )
    return found


def tiers_here(tiers: Iterable[Tier], *, saves: bool) -> tuple[Tier, ...]:
    """`tiers` for a process that saves for all, or for one that only loads and copies nothing."""
    return tuple(tiers) if saves else tuple(replace(tier, copies=False) for tier in tiers)


class TierNames:
    """Which names the steps in further pools have: each records its own. One thread at a time."""

    def __init__(self, checkpoints: Checkpointer) -> None:
        self._checkpoints = checkpoints
        self._known: dict[int, str | None] = {}  # by number, None where it cannot be read

    def besides(self, names: Collection[str]) -> dict[str, int]:
        """The newest number of each name that a tier holds and that is none of `names`."""
        tiers = self._checkpoints.saver.tiers.catalogs
        if not tiers:
            return {}
        catalogs = self._checkpoints.steps.catalogs
        numbers = sorted({each.step for each in listed_steps(catalogs) if each.pool > 0})
        found = {name: number for number in numbers if (name := self._name_of(number)) is not None}
        self._known = {number: self._known[number] for number in numbers}
        return {name: number for name, number in found.items() if name not in names}

    def _name_of(self, number: int) -> str | None:
        if self._known.get(number) is None:
            try:
                self._known[number] = of_nearest(
                    self._checkpoints,
                    number,
                    lambda catalog: _recorded_name(catalog.manifest(number).tree),
                )
            except (*UNREADABLE, CheckpointError) as error:
                _log.warning("checkpoint %d of a tier is passed over: %s", number, error)
                self._known[number] = None
        return self._known[number]


def _recorded_name(tree: Any) -> str | None:  # Any: JSON
    name = tree.get("name") if isinstance(tree, dict) else None
    return name if isinstance(name, str) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class UnopenedTier:
    """A tier of a pickled adapter: its pool is opened at the first use, if ever."""

    pool: UnopenedPool
    options: dict[str, Any]  # Any: Tier's other arguments

    @classmethod
    def of(cls, tier: Tier) -> UnopenedTier:
        """Of an open one."""
        options = {f.name: getattr(tier, f.name) for f in fields(tier) if f.name != "pool"}
        pool = UnopenedPool(config=tier.pool.config, read_only=tier.pool.read_only)
        return cls(pool=pool, options=options)


def leads_job() -> bool:
    """Whether this process is the first of its job, as far as torch or its launcher says."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    said = (os.environ.get(name, "") for name in _RANKS)
    return next((rank for rank in said if rank.isdigit()), "0") == "0"


def opened_tiers(tiers: Sequence[Tier | UnopenedTier]) -> tuple[tuple[Tier, ...], list[Pool]]:
    """Tiers, and the pools that were opened for them: whoever asked closes these."""
    found: list[Tier] = []
    opened: list[Pool] = []
    try:
        for tier in tiers:
            if isinstance(tier, UnopenedTier):
                pool, _ = as_pool(tier.pool)
                opened.append(pool)
                tier = Tier(pool=pool, **tier.options)  # the same, open
            found.append(tier)
    except BaseException:
        close_all(opened)
        raise
    return tuple(found), opened


def close_all(pools: Sequence[Pool]) -> None:
    """Close pools, in their order."""
    for pool in pools:
        pool.close()
