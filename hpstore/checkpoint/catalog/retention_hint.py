"""The note on what the next save's retention removes, for those who heal
(hpstore/maintenance/deferred_repair.py)."""

from __future__ import annotations

import logging

from hpstore.checkpoint.catalog.retain_steps import facts_of
from hpstore.checkpoint.catalog.retention import Retention, decide
from hpstore.checkpoint.catalog.step_catalog import StepCatalog
from hpstore.checkpoint.format.checkpoint_manifest import manifest_key
from hpstore.errors import HpstoreError, ObjectNotFound
from hpstore.maintenance.deferred_repair import Expiry, note_key

_log = logging.getLogger(__name__)
_SLACK_MS = 60_000  # a save is expected for so long at least after its time


def note_expiring(steps: StepCatalog, committed: int, retention: Retention) -> None:
    """Leave word of what retention removes when the step after `committed` is there. Best effort:
    failing at it is counted and fails nothing.

    The newest step is never named, nor what a step that stays or a save under way refers to.
    """
    if retention.keep_last is None:
        return
    key = note_key(steps.prefix)
    try:
        note = _expiry(steps, committed, retention)
        if note is not None:
            steps.pool.put(key, note.encode())
        else:
            steps.pool.delete(key)
    except ObjectNotFound:
        return
    except (HpstoreError, OSError) as error:
        steps.pool.metrics.count("expiry_note_error_total")
        _log.info("what retention will remove under %r is not noted: %s", steps.prefix, error)


def _expiry(steps: StepCatalog, committed: int, retention: Retention) -> Expiry | None:
    known = [step for step in steps.all() if step <= committed]
    newest = steps.facts(committed)
    before = max((step for step in known if step < committed), default=committed)
    interval_ms = newest.created_ms - steps.facts(before).created_ms
    expected_ms = newest.created_ms + interval_ms
    going = _going(steps, known, committed, retention, expected_ms)
    if not going or interval_ms <= 0:
        return None
    sizes = {s.key: s.size for step in going for s in steps.facts(step).objects}
    for key in steps.still_named(set(sizes), going):
        del sizes[key]
    sizes |= {manifest_key(steps.prefix, step): steps.facts(step).within_bytes for step in going}
    return Expiry(
        reason=f"step {', '.join(map(str, going))} of {steps.prefix!r} goes with the next save",
        sizes=sizes,
        instead=(manifest_key(steps.prefix, committed), *(s.key for s in newest.objects)),
        expected_ms=expected_ms,
        limit_ms=expected_ms + max(interval_ms, _SLACK_MS),
    )


def _going(
    steps: StepCatalog, known: list[int], committed: int, retention: Retention, expected_ms: int
) -> list[int]:
    """Steps that retention would remove if the one after `committed` were there, but for it."""
    following = committed + 1
    decisions = decide(
        [*known, following],
        retention,
        committed=following,
        now_ms=expected_ms,
        protected=steps.protected(),
        facts=facts_of(steps, known) if retention.needs_facts else {},
    )
    return [found.step for found in decisions if not found.stays and found.step != committed]
