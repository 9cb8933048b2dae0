"""What rank 0 does after a commit: older steps go, when the new one is whole (PROTOCOL 19)."""

from __future__ import annotations

import logging

from hpstore.checkpoint.expiring import note_expiring
from hpstore.checkpoint.handles import SaveReport
from hpstore.checkpoint.retention import Retention
from hpstore.checkpoint.steps import Steps

_log = logging.getLogger(__name__)


def after_commit(
    steps: Steps, report: SaveReport, retention: Retention, counters: dict[str, int]
) -> None:
    """Remove what retention does not keep, or keep it until a newer step is whole.

    The step is looked at once more: devices may have gone between the check of its segments and
    the put of its manifest. Failing at any of this does not fail the save.
    """
    parity = steps.pool.parity
    if report.spare_columns >= parity and steps.is_whole(report.step):
        steps.retain(report.step, retention)
        note_expiring(steps, report.step, retention)
        return
    if retention.keep_last is None:
        return
    if not counters["retentions_postponed_total"]:
        _log.warning(
            "older steps under %r are kept: step %d, or what it refers to, survives fewer than %d "
            "lost devices. Bring devices back, or rebuild the pool; until then saves take up "
            "space.",
            steps.prefix,
            report.step,
            parity,
        )
    counters["retentions_postponed_total"] += 1


__all__ = ["after_commit"]
