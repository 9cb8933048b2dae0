"""What may be concluded from a survey when devices are unknown (PROTOCOL 7). Pure."""

from __future__ import annotations

from collections.abc import Sequence

from hpstore.errors import TooFewDevices, TooManyErasures
from hpstore.objects.context import View
from hpstore.objects.survey import Layout, Survey, unknown_devices


def require_known(view: View, survey: Survey) -> None:
    """Before a key is taken for absent: could every copy of it be where we cannot look?

    Raises TooManyErasures when m + 1 devices are unknown.
    """
    unknown = unknown_devices(view, survey)
    if unknown > view.record.parity:
        raise TooManyErasures(
            f"it is unknown whether object {survey.key!r} exists: {unknown} devices do not answer "
            f"or were evicted since the last rebuild, and the pool tolerates {view.record.parity}. "
            "Nothing was changed. Bring devices back, or rebuild if they are gone for good.",
            key=survey.key,
        )


def may_be_older(view: View, survey: Survey, layouts: Sequence[Layout]) -> bool:
    """Whether a newer version than this one may be where we cannot look: more than m are unknown,
    and what is seen of this one may all be where whoever wrote the newer one could not look. Such a
    writer does without devices that weigh at most m, and removes what it replaces on the others."""
    if unknown_devices(view, survey) <= view.record.parity:
        return False
    seen = {file.device for layout in layouts for file in layout.files}
    return view.record.weight(seen) <= view.record.parity


def require_newest(view: View, survey: Survey, layouts: Sequence[Layout]) -> None:
    """Before a version is taken for the newest. Raises TooManyErasures when it may be older."""
    unknown, parity = unknown_devices(view, survey), view.record.parity
    if may_be_older(view, survey, layouts):
        raise TooManyErasures(
            f"object {survey.key!r} version {layouts[0].version} is there, but may not be the "
            f"newest: {unknown} devices do not answer or were evicted since the last rebuild, "
            f"{parity} are survived, and a newer one may be on them. Bring devices back, or "
            "rebuild if they are gone for good; `hpstore versions` lists what can be read even so.",
            key=survey.key,
        )


def require_writable(view: View, survey: Survey) -> None:
    """Before a version is written: a reader must be able to tell that it is the newest.

    Raises TooFewDevices when more than m are unknown.
    """
    unknown, parity = unknown_devices(view, survey), view.record.parity
    if unknown > parity:
        raise TooFewDevices(
            f"{survey.key!r} cannot be written now: {unknown} devices do not answer or were "
            f"evicted since the last rebuild, {parity} are survived. Nothing was changed, and what "
            "can be read still is. Bring devices back, or rebuild if they are gone for good.",
            key=survey.key,
        )


def too_many(key: str, layout: Layout, valid: int, corrupt: int, unknown: int) -> TooManyErasures:
    """The error for data that may be there but cannot be read."""
    error = unreadable(
        f"object {key!r} version {layout.version}: {valid} of the {layout.data} units needed are "
        f"readable ({corrupt} damaged, {unknown} devices did not answer or left). Nothing was "
        "deleted; bring a missing device back.",
        key,
        unknown > 0,
    )
    error.damaged = corrupt > 0 and unknown == 0
    return error


def unreadable(text: str, key: str, away: bool) -> TooManyErasures:
    """The error of an object. `away`: devices that cannot be read now may have what is missing."""
    error = TooManyErasures(text, key=key)
    error.away = away
    return error
