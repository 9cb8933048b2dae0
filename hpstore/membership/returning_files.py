"""What becomes of files on a device that returns, by what the others know (PROTOCOL 12). Pure."""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum

from hpstore.format.keys import Kind
from hpstore.objects.context import View
from hpstore.objects.survey import ColumnFile, Layout, Survey, may_be_acknowledged, newest_by_name


class Return(StrEnum):
    """What becomes of a file on a device that returns."""

    KEEP = "keep"
    REMOVE = "remove"
    QUARANTINE = "quarantine"  # not served, not deleted
    UNCLEAR = "unclear"  # members that do not answer may have what decides


def judge_survey(
    view: View, survey: Survey, device_id: str, *, recent: bool, swept: int = 0
) -> list[tuple[ColumnFile, Return]]:
    """Every file of a key on a returning device, by what the others know. Pure."""
    others = tuple(file for file in survey.files if file.device != device_id)
    newest = newest_by_name(view, Survey(key=survey.key, files=others, unknown=survey.unknown))
    unhealed = view.record.unhealed() - survey.unknown - {device_id}
    return [
        (
            file,
            judge_return(
                file,
                newest,
                [f for f in others if f.name.layout == file.name.layout],
                recent=recent and file.name.version.counter > swept,
                silent=view.record.weight(survey.unknown - {device_id}),
                unhealed=view.record.weight(unhealed),
            ),
        )
        for file in survey.files
        if file.device == device_id
    ]


def judge_return(
    file: ColumnFile,
    newest: Layout | None,
    fellows: Collection[ColumnFile],
    *,
    recent: bool,
    silent: int,
    unhealed: int,
) -> Return:
    """What becomes of one file of a returning device. Pure.

    `newest`: what a read would choose without it. `fellows`: files of its own layout on others.
    `recent`: it left within the time of tombstones, and no sweep passed the file since: a tombstone
    would be there, and what nobody else knows may be the last copies of something. `silent` members
    do not answer; `unhealed` devices were evicted, and not made up for. Both may hide fellows.
    """
    version, kind, data, parity = file.name.layout
    if newest is not None and version < newest.version:
        needed = newest.parity + 1 if newest.kind is Kind.TOMBSTONE else newest.width
        if len(newest.columns) >= needed:  # PROTOCOL 8: only what is settled supersedes
            return Return.REMOVE
    elif newest is not None and file.name.layout == newest.files[0].name.layout:
        held = {other.name.column for other in newest.files}
        return Return.REMOVE if file.name.column in held else Return.KEEP
    if recent:
        return Return.KEEP
    mine = Layout(version=version, kind=kind, data=data, parity=parity, files=(file, *fellows))
    seen = len(mine.columns)
    if fellows and may_be_acknowledged(mine, seen=seen, unknown_devices=silent + unhealed):
        return Return.KEEP  # it lives elsewhere, and what is newer is not whole
    if may_be_acknowledged(mine, seen=seen, unknown_devices=silent):
        return Return.UNCLEAR
    return Return.QUARANTINE
