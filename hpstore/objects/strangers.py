"""Files on a device that no writer of the pool made: they are put out of the way by repairs.

Names without the pool's tag, and what is called a tombstone and is none (docs/decisions/0098).
"""

from __future__ import annotations

import logging
from collections import defaultdict

from hpstore.devices.base import Device
from hpstore.objects.context import PoolContext
from hpstore.objects.survey import ColumnFile, Survey, path_on, stable_survey, with_tombstones

_log = logging.getLogger(__name__)


def set_aside(store: PoolContext, survey: Survey) -> int:
    """Put what a survey has found to be none of the pool's into quarantine/; how many files went.

    That is names that no writer of the pool gave, and tombstones without their content. The latter
    stay while more than m devices are unknown: that one was there is all that speaks against an
    older version then. What fails is met again by the next repair of the key.
    """
    record = store.view.record
    unsure = record.weight(survey.unknown | record.unhealed()) > record.parity
    files = survey.strangers if unsure else (*survey.strangers, *survey.blanks)
    if not files:
        return 0
    by_device: defaultdict[str, list[ColumnFile]] = defaultdict(list)
    for file in files:
        by_device[file.device].append(file)

    def move(device_id: str, device: Device) -> int:
        for file in by_device[device_id]:
            device.quarantine(path_on(device, survey.key, file.name))
        return len(by_device[device_id])

    answers = store.each(by_device, move)
    moved = sum(answer for answer in answers.values() if isinstance(answer, int))
    store.metrics.count("file_set_aside_total", moved)
    _log.warning(
        "%d of %d files of %r that are none of this pool's were put into quarantine/",
        moved,
        len(files),
        survey.key,
    )
    return moved


def cleared_survey(store: PoolContext, key: str, verify: bool) -> tuple[Survey, int]:
    """A survey to repair by, once what is none of the pool's is out of the way, and how many files
    that were. With `verify` the content of every tombstone is looked at."""

    def look() -> Survey:
        survey = stable_survey(store, key)
        return with_tombstones(store, {key: survey}, every=True)[key] if verify else survey

    survey = look()
    moved = set_aside(store, survey)
    return (look() if moved else survey), moved
