"""A rollback by all ranks of a job: rank 0 does it while the others wait for its outcome."""

from __future__ import annotations

import json
import logging
from typing import Any

from hpstore import errors
from hpstore.checkpoint.catalog.hidden_steps import Rollback
from hpstore.checkpoint.catalog.rollback import hide_later, may_hide, now_milliseconds
from hpstore.checkpoint.catalog.step_catalog import StepCatalog
from hpstore.checkpoint.format.checkpoint_manifest import checked_step
from hpstore.checkpoint.ranks.collectives import RankChannel, Ranks
from hpstore.checkpoint.save.saver import Saver
from hpstore.errors import CheckpointError, ConfigError, HpstoreError

_log = logging.getLogger(__name__)
ROLLBACK_SECONDS = 7 * 24 * 3600.0
_LONGEST_SECONDS = 100 * 365 * 24 * 3600.0


def roll_back(
    ranks: Ranks,
    steps: StepCatalog,
    saver: Saver,
    step: int,
    grace_seconds: float,
    force: bool,
) -> Rollback:
    """Checkpointer.rollback(). Collective; what goes wrong is raised on all ranks."""
    step = checked_step(step)
    number = isinstance(grace_seconds, int | float) and not isinstance(grace_seconds, bool)
    if not number:
        raise ConfigError(f"grace_seconds={grace_seconds!r} is not a number of seconds")
    if not 0 <= grace_seconds <= _LONGEST_SECONDS:  # nan neither; no repr: it may be a huge int
        raise ConfigError("grace_seconds must be from 0 to a hundred years")
    if steps.pool.read_only:
        raise CheckpointError(
            f"the pool of {steps.prefix!r} was opened read-only: no step can be hidden in it"
        )
    outcome: dict[str, Any] = {}  # Any: JSON
    error: BaseException | None = None
    if ranks.leads:
        try:
            grace_ms = round(grace_seconds * 1000)
            outcome["done"] = _lead(steps, saver, step, grace_ms, force).as_dict()
        except BaseException as raised:  # noqa: BLE001 (told to the other ranks, then raised)
            error = raised
            outcome = {"error": f"rank 0: {raised}", "kind": type(raised).__name__}
    heard = json.loads(ranks.broadcast(json.dumps(outcome).encode(), RankChannel.TRAINER))
    saver.went_back()
    if error is not None:
        raise error
    if "error" in heard:
        kind = getattr(errors, heard["kind"], CheckpointError)
        raise kind(heard["error"])
    return Rollback.of_dict(heard["done"])


def _lead(steps: StepCatalog, saver: Saver, step: int, grace_ms: int, force: bool) -> Rollback:
    """What rank 0 does."""
    saver.tiers.bring(step)
    may_hide(steps, step, force=force)  # before another process loses its fence for nothing
    # first: a later step left in a tier would be restored
    emptied = saver.tiers.go_back(step, force=force)
    try:
        done = hide_later(
            steps,
            step,
            session=saver.go_back(),
            grace_ms=grace_ms,
            now_ms=now_milliseconds(),
            force=force,
        )
    except HpstoreError as error:
        if emptied:
            text = f"{str(error).rstrip('.')}. Before that {', '.join(emptied)} let later steps go"
            raise type(error)(text, device=error.device, key=error.key) from error
        raise
    if done.hidden:
        _log.warning(
            "%r went back to step %d: the later steps %s are hidden, and kept for %.0f s. "
            "steps.undo_rollback(%r) takes that back.",
            steps.prefix,
            step,
            list(done.hidden[-8:]),
            grace_ms / 1000,
            done.name,
        )
    return done
