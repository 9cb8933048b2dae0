"""What a save reports to the log: counted, and where it says the same each time, logged once."""

from __future__ import annotations

import logging
from collections.abc import Sequence

_log = logging.getLogger(__name__)
SAVE_COUNTERS = (
    "saves_skipped_total",
    "saves_failed_total",
    "saves_retried_total",
    "stalls_over_limit_total",
    "overlap_without_optimizer_total",
    "sliced_saves_total",
    "saves_with_differing_values_total",
    "retentions_postponed_total",
)


def note_differing(counters: dict[str, int], paths: Sequence[str]) -> None:
    """Ranks that record different values under one name: counted, logged once."""
    if paths and not counters["saves_with_differing_values_total"]:
        _log.warning(
            "ranks differ in %d values, such as %r: the first rank's are recorded. Wrap in "
            "per_rank() what every rank has for itself.",
            len(paths),
            paths[0],
        )
    counters["saves_with_differing_values_total"] += bool(paths)


def warn_of_stall(
    counters: dict[str, int], limit: float | None, staged: float, waited: float
) -> None:
    """A save() that has kept the trainer longer than `limit` seconds."""
    if limit is not None and staged > limit:
        counters["stalls_over_limit_total"] += 1
        _log.warning(
            "save() kept the trainer %.3f s (limit %.3f), %.3f s of it waiting for the save before",
            staged,
            limit,
            waited,
        )
