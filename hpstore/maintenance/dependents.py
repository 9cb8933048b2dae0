"""What depends on a device that leaves, judged by the names of columns (PROTOCOL 8, 16)."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from hpstore.errors import MembershipError
from hpstore.format.keys import OBJECTS, Kind
from hpstore.format.records import Member
from hpstore.objects.context import PoolContext, View
from hpstore.objects.key_listing import walk
from hpstore.objects.survey import (
    Layout,
    Survey,
    VersionVerdict,
    judge_by_names,
    newest_by_name,
    survey_keys,
    unknown_devices,
)

PUT_WAITS = (0.0, 0.1, 0.2, 0.4, 0.8, 1.6)  # seconds before each further look at what a put began


def lost_without(view: View, layout: Layout, leaving: Collection[str]) -> bool:
    """Whether a layout could no longer be read when devices leave, judged by names."""
    staying = view.devices.keys() - set(leaving)
    rest = {f.name.column for f in layout.files if f.device in staying}
    return len(rest) < layout.data


def endangered(store: PoolContext, leaving: Collection[str], *, emptied: bool) -> list[str]:
    """Keys that would drop below k' without devices that are closed for new columns already.

    A put that is under way may look like one of them: what is young is looked at again, for three
    seconds at most. Raises MembershipError when so many devices are unknown that an object may be
    there unseen, unless they were `emptied` under our eyes.
    """
    catalog = walk(store)
    found = _lost_keys(store, catalog.surveys, leaving)
    for seconds in PUT_WAITS:
        if not found or (seconds and not _may_be_in_progress(store, found)):
            break
        store.clock.wait(seconds)
        found = _lost_keys(store, survey_keys(store, list(found)), leaving)
    away = catalog.unknown | store.view.record.unhealed()
    unknown = away.union(leaving)
    if not found and not emptied and not store.view.record.opens_without(unknown):
        raise MembershipError(
            f"{len(away)} devices do not answer or were evicted since the last rebuild; "
            f"with {len(unknown - away)} more gone, objects could be lost without a trace. "
            "Nothing was changed. "
            "Rebuild, or bring devices back first."
        )
    return sorted(found)


def _lost_keys(
    store: PoolContext, surveys: Mapping[str, Survey], leaving: Collection[str]
) -> dict[str, Layout]:
    """The objects among these that could no longer be read without some devices."""
    found = {}
    for key, survey in surveys.items():
        layout = newest_by_name(store.view, survey)
        if layout is None or layout.kind is Kind.TOMBSTONE:
            continue
        if lost_without(store.view, layout, leaving):
            found[key] = layout
    return found


def _may_be_in_progress(store: PoolContext, layouts: Mapping[str, Layout]) -> bool:
    """Whether a put may be about to publish more columns of one of these: a walk is no snapshot,
    and a put renames one column after another. It sees that the device leaves, and plans anew."""
    oldest = store.clock.wall_ms() - store.settings.put_deadline_seconds * 1000
    return any(layout.version.counter > oldest for layout in layouts.values())


def holds_live_files(view: View, survey: Survey, device_id: str) -> bool:
    """Whether a device has files of a key that are not those of a torn put."""
    unknown = unknown_devices(view, survey)
    return any(
        any(file.device == device_id for file in layout.files)
        and (
            layout.kind is Kind.TOMBSTONE
            or judge_by_names(layout, unknown) is not VersionVerdict.TORN
        )
        for layout in survey.layouts()
    )


def depends_on(view: View, survey: Survey, device_id: str) -> bool:
    """Whether something of a key would be lost with a device, judged by names. Pure.

    That is a column of the newest version, or a copy of a tombstone, that no device which stays
    has; or an older version while the newer is not whole without the device (PROTOCOL 8).
    """
    newest = newest_by_name(view, survey)
    if newest is None:
        return False  # torn puts
    staying = view.staying() - {device_id}
    elsewhere = [file for file in newest.files if file.device in staying]
    if newest.kind is Kind.TOMBSTONE:
        return len({file.device for file in elsewhere}) <= newest.parity
    held = {file.name.column for file in elsewhere}
    mine = {file.name.column for file in newest.files if file.device == device_id}
    older = any(f.device == device_id and f.name.version < newest.version for f in survey.files)
    return not mine <= held or (older and len(held) < newest.width)


def require_room_to_drain(store: PoolContext, member: Member) -> None:
    """Raise MembershipError for a device that holds objects while no other one has room for them:
    it would stay draining, and take new columns no more. One that is read-only is no place for
    them anyway."""
    offers = store.offers({member.device_id})
    left = store.with_room(offers)
    if len(left) > store.view.record.parity or member.device_id in store.refusing:
        return
    full = store.why_full()
    holds = store.each([member.device_id], lambda _, device: bool(device.entries(OBJECTS)))
    if full and len(left) < len(offers) and holds.get(member.device_id) is True:
        raise MembershipError(
            f"what {member.url} holds has nowhere to go: {len(left)} other devices have room. "
            f"Nothing was changed. {full}Add devices, then drain it."
        )
