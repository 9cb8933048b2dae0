"""What a checkpointer counts and logs beside its work."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping, Sequence

_log = logging.getLogger(__name__)
Counters = MutableMapping[str, int]


def note_differing(counters: Counters, paths: Sequence[str]) -> None:
    """Ranks that record different values under one name: counted, logged once."""
    if paths and not counters["saves_with_differing_values_total"]:
        _log.warning(
            "ranks differ in %d values, such as %r: the first rank's are recorded. Wrap in "
            "per_rank() what every rank has for itself.", len(paths), paths[0],
        )  # fmt: skip
    counters["saves_with_differing_values_total"] += bool(paths)


def note_stall(counters: Counters, limit: float | None, staged: float, waited: float) -> None:
    """A save that kept the trainer longer than `limit` seconds: counted, logged."""
    if limit is not None and staged > limit:
        counters["stalls_over_limit_total"] += 1
        _log.warning(
            "save() kept the trainer %.3f s (limit %.3f), %.3f s of it waiting for the save "
            "before", staged, limit, waited,
        )  # fmt: skip


__all__ = ["note_differing", "note_stall"]
