"""A restore by all ranks of a job: the same step everywhere, or a word why not (PROTOCOL 20)."""

from __future__ import annotations

import json
import logging

from hpstore.checkpoint.manifest import Manifest
from hpstore.checkpoint.ranks import Channel, Ranks
from hpstore.checkpoint.restoring import RestoreOptions, RestoreReport, restore_state
from hpstore.checkpoint.steps import Steps
from hpstore.checkpoint.training import State
from hpstore.errors import (
    CheckpointError,
    HpstoreError,
    IntegrityError,
    ObjectNotFound,
    RedundancyError,
)

_log = logging.getLogger(__name__)
_PASSABLE = (IntegrityError, RedundancyError, ObjectNotFound)  # an older step may be readable


def restore_together(
    ranks: Ranks, steps: Steps, state: State, step: int | None, how: RestoreOptions
) -> tuple[Manifest, RestoreReport] | None:
    """Restore `step`, or the newest that all ranks can read; None when there is no checkpoint.

    Collective. Raises what no older step would mend, such as a mismatch, on all ranks.
    """
    wanted = [step] if step is not None else list(reversed(_agreed_steps(ranks, steps)))
    for candidate in wanted:
        found = _try(ranks, steps, state, candidate, how)
        if not isinstance(found, Exception):
            return found
        if step is not None:
            raise steps.placed(found, step)
        _log.warning("checkpoint step %d is passed over: %s", candidate, found)
    if wanted:
        raise CheckpointError(
            f"none of the {len(wanted)} checkpoints under {steps.prefix!r} can be read now. "
            "Nothing was deleted; bring missing devices back and try again."
        )
    return None


def _agreed_steps(ranks: Ranks, steps: Steps) -> list[int]:
    """Rank 0 lists; all restore the same steps."""
    if ranks.world == 1:
        return steps.all()
    try:
        mine = json.dumps(steps.all() if ranks.leads else []).encode()
    except (HpstoreError, OSError) as error:
        ranks.broadcast(json.dumps(str(error)).encode(), Channel.TRAINER)
        raise
    found: list[int] | str = json.loads(ranks.broadcast(mine, Channel.TRAINER))
    if isinstance(found, str):
        raise CheckpointError(f"rank 0 cannot list the steps: {found}")
    return found


def _try(
    ranks: Ranks, steps: Steps, state: State, step: int, how: RestoreOptions
) -> tuple[Manifest, RestoreReport] | Exception:
    """Restore one step; what went wrong on any rank, when it can be passed over."""
    error: Exception | None = None
    done: tuple[Manifest, RestoreReport] | None = None
    try:
        manifest = steps.manifest(step)
        done = manifest, restore_state(steps.pool, manifest, state, how)
    except Exception as found:  # noqa: BLE001 (told to the other ranks, then raised)
        error = found
    said = "" if error is None else f"rank {ranks.rank}: {error}"
    fatal = error is not None and not isinstance(error, _PASSABLE)
    votes = [
        json.loads(vote)
        for vote in ranks.all_gather(json.dumps([said, fatal]).encode(), Channel.TRAINER)
    ]
    if fatal and error is not None:
        raise error
    others = "; ".join(text for text, _ in votes if text)
    if any(worst for _, worst in votes):
        raise CheckpointError(f"step {step} could not be restored: {others}")
    if error is not None:
        return error
    if others or done is None:
        return IntegrityError(f"step {step} cannot be read on all ranks: {others}")
    return done


__all__ = ["restore_together"]
