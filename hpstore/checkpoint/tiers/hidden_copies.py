"""Copies of steps that a rollback of the first pool has hidden: nothing restores them.

A copy names the rollbacks that its pool knew. One that lacks a later rollback to an earlier step is
of the line that was left. Rollback() removes those; this finds what is left by a rollback of a
process that knows no tiers, or by a copy that was stopped in the middle.
"""

from __future__ import annotations

import logging

from hpstore.checkpoint.catalog.hidden_steps import RollbackState
from hpstore.checkpoint.catalog.rollback import rollbacks
from hpstore.checkpoint.catalog.step_catalog import StepCatalog
from hpstore.errors import HpstoreError

_log = logging.getLogger(__name__)
ROLLBACKS = "rollbacks"  # of a copy's `extra`: names of those that the first pool knew


def rollback_names(source: StepCatalog) -> list[str]:
    """Of all rollbacks of which the pool keeps something."""
    return [record.name for record in rollbacks(source)]


def hidden_copies(source: StepCatalog, target: StepCatalog) -> set[int]:
    """Steps in `target` that a rollback of `source` has left behind."""
    gone = (RollbackState.HIDDEN, RollbackState.EXPIRED)
    records = [record for record in rollbacks(source) if record.state in gone]
    found: set[int] = set()
    for step in target.all() if records else []:
        later = {record.name for record in records if record.step < step}
        if not later:
            continue
        try:
            known = target.facts(step).extra.get(ROLLBACKS)
        except (HpstoreError, OSError) as error:
            _log.info("step %d of %s: %s", step, target.pool.config.name, error)
            continue  # a restore passes it over
        if not later <= set(map(str, known if isinstance(known, list) else ())):
            found.add(step)
    return found
