"""Which versions of an object are on the devices, for people who look for an older one."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import groupby

from hpstore.errors import ConfigError
from hpstore.format.keys import ContentId, Kind
from hpstore.objects.context import PATIENCE, PoolContext
from hpstore.objects.object_info import version_token
from hpstore.objects.survey import (
    Layout,
    VersionVerdict,
    judge_by_names,
    stable_survey,
    unknown_devices,
)
from hpstore.objects.survey_limits import may_be_older, require_known


class VersionStanding(StrEnum):
    """What can be said of a version, by the names of its files."""

    READABLE = "readable"
    UNCLEAR = "unclear"  # it may have been acknowledged, and cannot be read before devices are back
    TORN = "torn"  # it was never acknowledged, and cannot be read
    DELETED = "deleted"  # a tombstone: what is older was deleted


_STANDINGS = {
    VersionVerdict.SERVES: VersionStanding.READABLE,
    VersionVerdict.UNCLEAR: VersionStanding.UNCLEAR,
    VersionVerdict.TORN: VersionStanding.TORN,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionInfo:
    """One version. `current`: it decides what a read without a version gets. None is while a newer
    one may be hidden.

    `columns` of it were found, `needed` are enough to read it. `written`: about when, by the clock
    of its writer, seconds since 1970.
    """

    version: str
    standing: VersionStanding
    current: bool
    columns: int
    needed: int
    written: float

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


def key_versions(store: PoolContext, key: str) -> list[VersionInfo]:
    """Versions of a key on the devices that answer, newest first.

    Raises TooManyErasures when none is found and one may be there.
    """
    survey = stable_survey(store, key, patience=PATIENCE)
    if not survey.files:
        require_known(store.view, survey)
    unknown = unknown_devices(store.view, survey)
    found: list[VersionInfo] = []
    current = True
    for content, layouts in groupby(survey.layouts(), lambda layout: layout.version.content):
        group = list(layouts)
        standing, best = max(
            ((_standing(layout, unknown), layout) for layout in group),
            key=lambda item: (item[0] is not VersionStanding.TORN, len(item[1].columns)),
        )
        decides = current and standing is not VersionStanding.TORN
        current = current and not decides
        found.append(
            VersionInfo(
                version=version_token(*content),
                standing=standing,
                current=decides and not may_be_older(store.view, survey, group),
                columns=len(best.columns),
                needed=best.data,
                written=content[0] / 1000,
            )
        )
    return found


def _standing(layout: Layout, unknown: int) -> VersionStanding:
    if layout.kind is Kind.TOMBSTONE:
        return VersionStanding.DELETED
    return _STANDINGS[judge_by_names(layout, unknown)]


def parse_token(text: str) -> ContentId:
    """Inverse of version_token(). Raises ConfigError."""
    known = isinstance(text, str)
    match = re.fullmatch(r"([0-9a-f]{16})-([0-9a-f]{16})", text) if known else None
    if match is None:
        raise ConfigError(
            f"{text!r} is not a version of an object: two numbers of 16 hexadecimal digits with a "
            "- between them, as stat() and versions() give it"
        )
    return (int(match[1], 16), int(match[2], 16))
