"""Put a new disk in the place of an old one, and find out when the old one can be taken out."""

from __future__ import annotations

from dataclasses import dataclass

from hpstore.devices.disk_location import Location, Opener, locate, openers
from hpstore.devices.opener import same_form
from hpstore.errors import HpstoreError, MembershipError, without_promise
from hpstore.format.records import DeviceState, Member
from hpstore.maintenance.rebuild import ProgressCallback, RebuildReport
from hpstore.membership.device_places import checked_place
from hpstore.pool.pool import Pool

_STANDS = {
    DeviceState.EVICTED: "has left, what it held is not all made again",
    DeviceState.HEALED: "has left, and nothing of it is missed",
}
_LOOK_SECONDS = 0.5  # between two looks at who has a disk open


@dataclass(frozen=True, slots=True, kw_only=True)
class Replaced:
    """What came of it. `moved`: objects that were copied off the old device; `report`: of the
    rebuild that made up for one that did not answer."""

    old: Member
    new: str  # id of the new device
    moved: int
    report: RebuildReport | None
    location: Location  # of the old disk


def replace_device(
    pool: Pool,
    old: str,
    new: str,
    *,
    domain: str | None = None,
    rate_bytes_per_second: float | None = None,
    progress: ProgressCallback | None = None,
    allow_root_disk: bool = False,
) -> Replaced:
    """Add the device at `new`, move everything off `old` where that answers, else evict it and
    rebuild what it held. The new one takes the old one's failure domain unless one is given.

    Stopped or killed anywhere, it is gone on with by running it again. Raises MembershipError,
    DeviceError, LockTimeout: the message says that the new device stays a member, and whether the
    old one has left.
    """
    new = checked_place(new)
    member = pool.admin.devices.find(old)
    place = same_form(new)
    there = _device_at(pool, new, member.device_id)
    if member.left and (there is None or member.state is DeviceState.HEALED):
        raise MembershipError(
            f"{old} has left the pool already; `hpstore add` takes {new} in. Nothing was changed."
        )
    answers = not member.left and _answers(pool, member.device_id)
    if answers and place == pool.admin.devices.places.get(member.device_id):
        raise MembershipError(
            f"{old} is still at {new} and answers. Nothing was changed. Mount the new disk at a "
            "place of its own, or evict the old one, unmount it and mount the new one there."
        )
    location = locate(pool.admin.devices.places.get(member.device_id, member.url))
    domain = domain or member.domain
    added = there or pool.add_device(new, domain, allow_root_disk=allow_root_disk)
    moved, report = 0, None
    try:
        if answers:
            moved = pool.drain(
                member.device_id, progress=progress, rate_bytes_per_second=rate_bytes_per_second
            )
        else:
            if not member.left:
                pool.evict(member.device_id)
            report = pool.rebuild(progress=progress, rate_bytes_per_second=rate_bytes_per_second)
    except HpstoreError as error:
        stands = _STANDS.get(pool.admin.devices.find(member.device_id).state, "is not out yet")
        raise type(error)(
            f"{new} is a member now and stays one, {old} {stands}: {without_promise(error)} Run it "
            "again when that is mended."
        ) from error
    return Replaced(old=member, new=added, moved=moved, report=report, location=location)


def _device_at(pool: Pool, place: str, other: str) -> str | None:
    """The id of the member that is open at a place, added by a run before; not the `other` one."""
    for device, url in pool.admin.devices.places.items():
        if same_form(url) == same_form(place) and device != other:
            return device
    return None


def _answers(pool: Pool, device: str) -> bool:
    """Whether a device is open and a probe of it succeeds, or says that it is full or read-only."""
    found = pool.admin.devices.probe({device})
    if device not in found:
        return False
    try:
        found[device].result(pool.config.settings.device_deadline_seconds)
    except (HpstoreError, OSError, TimeoutError):
        return False
    return True


def wait_released(pool: Pool, member: Member, seconds: float) -> list[Opener]:
    """Who still has a device open that has left the pool or was released, after this process and
    others had time to let it go. Raises MembershipError for another member: it is in use."""
    pool.admin.refresh()
    if not member.left and member.device_id in pool.admin.devices.places:
        raise MembershipError(
            f"{member.url} ({member.device_id[:8]}) is a member and in use. Nothing was changed. "
            "For a while, `hpstore health maintenance` first; for good, drain or evict it first. "
            "`hpstore readmit` takes a disk back, with what is still good of its files."
        )
    path = member.url.removeprefix("file://")
    until = pool.admin.clock.monotonic() + seconds
    while (found := openers(path)) and pool.admin.clock.monotonic() < until:
        pool.admin.clock.wait(_LOOK_SECONDS)
    return found
