"""Move one column of a whole object from one device to another, never with less than all of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from hpstore.devices.horizon_guard import HorizonPassed
from hpstore.errors import ObjectNotFound
from hpstore.maintenance.rebuild_columns import rebuild_columns
from hpstore.objects.context import PoolContext
from hpstore.objects.horizon import read_horizons
from hpstore.objects.read.object_reader import Changed
from hpstore.objects.read.resolve import open_survey
from hpstore.objects.survey import Survey, stable_survey
from hpstore.objects.write.column_writer import MembershipMoved
from hpstore.objects.write.delete_files import remove_files
from hpstore.objects.write.stripe_writer import Throttle

_log = logging.getLogger(__name__)


def move_column(
    store: PoolContext,
    key: str,
    source: str,
    target: str,
    throttle: Throttle,
    *,
    worth: Callable[[int], bool],
) -> int:
    """Copy the column that `source` has onto `target`, then remove it there; bytes of its file.

    0 when nothing was done: the object is gone, changes, is not whole, or the move is not `worth`
    so many bytes. The copy is durable under its name, and no newer membership is known to both
    devices, before anything is removed; a crash in between leaves the column twice, which the next
    repair of the object clears up. Raises WriteFailed, or what reading raised; nothing has changed.
    """
    with store.key_lock(key):  # no repair of it at the same time
        horizons = read_horizons(store)
        survey = stable_survey(store, key)
        try:
            nbytes = _copy(store, survey, horizons, source, target, throttle, worth)
        except ObjectNotFound:
            return 0
        except (Changed, MembershipMoved, HorizonPassed):
            store.refresh()
            return 0
        if nbytes:
            _remove(store, survey, source, target)
        return nbytes


def _copy(
    store: PoolContext,
    survey: Survey,
    horizons: Mapping[str, int],
    source: str,
    target: str,
    throttle: Throttle,
    worth: Callable[[int], bool],
) -> int:
    layouts, now = survey.layouts(), store.pinned()
    held = {file.device: file for file in survey.files}
    if len(layouts) != 1 or source not in held or target in held:
        return 0
    reader = open_survey(now, survey)
    try:
        reader.judging = False  # what is come upon here is no new sign
        width = reader.header.geometry.width
        reader.open_columns(range(width))
        nbytes = reader.header.file_bytes
        if len(reader.columns) < width or not worth(nbytes):
            return 0
        rebuild_columns(now, reader, {target: held[source].name.column}, throttle, horizons)
        return nbytes
    finally:
        reader.close()


def _remove(store: PoolContext, survey: Survey, source: str, target: str) -> None:
    """Not when the device that loses the file knows a newer membership, or does not answer; nor
    when the copy is gone again: a repair in another process may have kept the source's column."""
    planned = store.view.record.generation
    now = stable_survey(store, survey.key)
    files = {file.name for file in now.files if file.device == target}
    generation = store.each([source], store.generation_on).get(source)
    if not isinstance(generation, int) or generation > planned:
        _log.info("a column of %r stays on both devices: the membership has moved", survey.key)
        return
    remove_files(
        store,
        survey.key,
        [file for file in survey.files if file.device == source and file.name in files],
    )
