"""How a pipeline goes on from a checkpoint of its own, of an older hpstore or of another run."""

from __future__ import annotations

import logging
from typing import Any

from hpstore.checkpoint import Checkpointer
from hpstore.checkpoint.ranks.collectives import RankChannel, Ranks
from hpstore.errors import HpstoreError
from hpstore.trainers.pipelining.run_position import OWN

_log = logging.getLogger(__name__)


# Any below: a training state holds whatever its owner puts there
def restore_run(
    ckpt: Checkpointer,
    ranks: Ranks,
    state: dict[str, Any],
    data_name: str,
    step: int | None,
    *,
    strict: bool,
) -> int | None:
    """Fill `state`; the step. Its value `data_name` is looked for under the name that an older
    hpstore gave it, too. Collective. Raises what Checkpointer.restore does."""
    old = (
        ranks.broadcast(
            b"1" if ranks.leads and _is_old(ckpt, data_name, step) else b"0", RankChannel.TRAINER
        )
        == b"1"
    )
    if not old:
        return ckpt.restore(state, step, strict=strict)
    state[OWN] = state.pop(data_name)
    try:
        return ckpt.restore(state, step, strict=strict)
    finally:
        state[data_name] = state.pop(OWN)


def _is_old(ckpt: Checkpointer, data_name: str, step: int | None) -> bool:
    """Whether the step has a pipeline's state beside, and none of a loader."""
    try:
        steps = ckpt.steps() if step is None else [step]
        tree = ckpt.steps.manifest(steps[-1]).tree if steps else {}
    except HpstoreError as error:  # restore() says what is wrong, or takes the step before
        _log.debug("the newest step was not looked at: %s", error)
        return False
    return isinstance(tree, dict) and OWN in tree and data_name not in tree
