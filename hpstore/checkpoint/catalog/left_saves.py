"""The end of saves that writers of dead trainers still make when a restart has waited enough."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from hpstore.checkpoint.catalog.dead_saves import decide
from hpstore.checkpoint.catalog.left_writers import WriterRecord
from hpstore.checkpoint.catalog.run_index import take_over_from
from hpstore.checkpoint.catalog.step_catalog import StepCatalog
from hpstore.checkpoint.catalog.writer_fence import SaveAttempt
from hpstore.checkpoint.format.checkpoint_manifest import manifest_key
from hpstore.errors import HpstoreError, IntegrityError, ObjectNotFound

_log = logging.getLogger(__name__)


def end_left_saves(steps: StepCatalog, records: Sequence[WriterRecord]) -> None:
    """Let these writers commit nothing after the return: what they have begun to commit is there
    to stay, or never comes (PROTOCOL 18). What fails is logged, and the saves go on."""
    for record in records:
        try:
            _end(steps, record)
        except (HpstoreError, OSError) as error:
            _log.warning(
                "what becomes of step %s, which process %d writes for a trainer that has ended, is "
                "left open: %s. A save of that step here may raise VersionConflict",
                record.step,
                record.pid,
                error,
            )
            continue
        _log.warning(
            "process %d is waited for no longer: it commits nothing more under %r",
            record.pid,
            steps.prefix,
        )


def _end(steps: StepCatalog, record: WriterRecord) -> None:
    """The fence first: a save without a note looks at it under the claim of its put."""
    take_over_from(steps, record.boot, record.pid)
    listing = steps.listing()
    for key in listing.attempts:
        with suppress(ObjectNotFound, IntegrityError):
            attempt = SaveAttempt.decode(steps.pool.get(key), where=key)
            process = (attempt.boot, attempt.namespace, attempt.pid, attempt.ticks)
            if process == (record.boot, record.namespace, *record.process):
                steps.end_attempt(key, attempt)
    if record.step is not None:
        key = manifest_key(steps.prefix, record.step)
        decide(steps.pool, key, replaces=record.replaces, counts=partial(steps.counts, record.step))
