"""Which step to read, and from which pool: the newest, from the nearest pool that has it."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from hpstore.checkpoint.catalog.step_catalog import StepCatalog
from hpstore.checkpoint.tiers.hidden_copies import hidden_copies
from hpstore.errors import HpstoreError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCandidate:
    """A step in one of the pools of a run; 0 is the one that it saves into. `listed`: it was there
    when the pools were listed, and was not just asked for."""

    step: int
    pool: int
    listed: bool = True


def newest_untried(
    found: Iterable[StepCandidate], tried: Collection[StepCandidate]
) -> StepCandidate | None:
    """The newest step that was not tried, in the nearest pool. Asked with a fresh list each time:
    retention of a process that saves on may have removed the step that was wanted, for a newer one
    (PROTOCOL 8). Pure."""
    return max(
        (each for each in found if each not in tried),
        key=lambda each: (each.step, -each.pool),
        default=None,
    )


def listed_steps(catalogs: Sequence[StepCatalog]) -> list[StepCandidate]:
    """All committed steps of all pools, without copies of those that a rollback has hidden.

    A tier that cannot be listed is passed over, and logged, while the first pool has steps. Else
    what went wrong is raised: a run that could go on would start from nothing.
    """
    first, *others = catalogs
    found = [StepCandidate(step=step, pool=0) for step in first.all()]
    for number, catalog in enumerate(others, 1):
        try:
            hidden = hidden_copies(first, catalog)
            steps = [step for step in catalog.all() if step not in hidden]
            found += [StepCandidate(step=step, pool=number) for step in steps]
        except (HpstoreError, OSError) as error:
            if not found:
                raise
            _log.warning("steps in %s cannot be listed now: %s", catalog.pool.config.name, error)
    return found


def newest_valid(catalogs: Sequence[StepCatalog]) -> int | None:
    """The newest step that can be read in some pool; tiers as listed_steps has them."""
    newest = catalogs[0].latest_valid()
    for catalog in catalogs[1:]:
        try:
            found = catalog.latest_valid(hidden=hidden_copies(catalogs[0], catalog))
        except (HpstoreError, OSError) as error:
            if newest is None:
                raise
            _log.warning("steps in %s cannot be listed now: %s", catalog.pool.config.name, error)
        else:
            newest = max((s for s in (newest, found) if s is not None), default=None)
    return newest


def nearest(catalogs: Sequence[StepCatalog], step: int) -> Sequence[StepCatalog]:
    """The pools that have a step, the first one first; the first of all where none has it."""
    if len(catalogs) == 1:
        return catalogs
    pools = [each.pool for each in listed_steps(catalogs) if each.step == step]
    return [catalogs[number] for number in pools] or catalogs[:1]
