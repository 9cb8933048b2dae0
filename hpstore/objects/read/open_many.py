"""Many objects opened together: a few calls on each device for all of them.

An object on its own takes a call on each device to look for it and one more on k of them to open
its columns. Handing so many short calls from thread to thread costs several times what they do; and
a call waits for those that are under way on its device, which read megabytes each.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Sequence

from hpstore.errors import TooManyErasures
from hpstore.format.keys import ColumnName, Kind
from hpstore.objects.context import READ_PATIENCE, PoolContext
from hpstore.objects.read.column_reader import ColumnReader
from hpstore.objects.read.object_reader import Changed, ObjectReader
from hpstore.objects.read.open_columns import open_together
from hpstore.objects.survey import survey_keys

MOST_KEYS = 64  # of one call: it must end within the deadline for a call
_Wanted = tuple[ObjectReader, int, ColumnName]


def open_objects(
    store: PoolContext, keys: Sequence[str], *, whole: bool = False
) -> dict[str, ObjectReader]:
    """Readers of those keys whose newest version can be opened without another look (PROTOCOL 7).

    At most MOST_KEYS of them, each once. `whole`: as open_column has it. What is left out is for
    open_object(), which says what is wrong with it. Errors of calls count as they do there.
    """
    found = _surveyed(store, keys)
    try:
        _open_columns(store, found, whole)
        for key, reader in list(found.items()):
            if not _ready(reader):
                found.pop(key).close()
    except BaseException:
        for reader in found.values():
            reader.close()
        raise
    return found


def _surveyed(store: PoolContext, keys: Sequence[str]) -> dict[str, ObjectReader]:
    """Readers of the newest layouts, without columns; of keys whose newest version surely shows."""
    found: dict[str, ObjectReader] = {}
    for key, survey in survey_keys(store, keys, patience=READ_PATIENCE).items():
        newest = next(iter(survey.layouts()), None)
        plain = newest is not None and newest.kind is not Kind.TOMBSTONE
        if newest is not None and plain and store.shows_without(survey.unknown):
            found[key] = ObjectReader(store, newest, key, unknown=survey.unknown, patient=False)
    return found


def _open_columns(store: PoolContext, readers: dict[str, ObjectReader], whole: bool) -> None:
    """The columns that each would open first."""
    wanted: defaultdict[str, list[_Wanted]] = defaultdict(list)
    for reader in readers.values():
        first = itertools.islice(reader.closed_columns().items(), reader.layout.data)
        for column, file in first:
            wanted[file.device].append((reader, column, file.name))
    names = {
        device: [(reader.key, name) for reader, _, name in columns]
        for device, columns in wanted.items()
    }
    opened = open_together(
        store,
        names,
        whole=whole,
        spare=lambda silent: all(r.enough_without(silent) for r in readers.values()),
    )
    for device, answers in opened.items():
        for (reader, column, _), answer in zip(wanted[device], answers, strict=True):
            if readers.get(reader.key) is not reader:  # it has changed
                if isinstance(answer, ColumnReader):
                    answer.close()
            elif isinstance(answer, FileNotFoundError):
                readers.pop(reader.key).close()
            else:
                reader.adopt(column, answer)


def _ready(reader: ObjectReader) -> bool:
    """Whether k columns are open, after one look more where some could not be."""
    with contextlib.suppress(Changed, TooManyErasures):
        return reader.open_enough()
    return False
