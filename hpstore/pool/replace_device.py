"""Put a new disk in the place of an old one, and find out when the old one can be taken out."""

from __future__ import annotations

from dataclasses import dataclass

from hpstore.devices.disk_location import Location, Opener, locate, openers
from hpstore.devices.opener import same_form
from hpstore.errors import HpstoreError, MembershipError
from hpstore.format.records import Member
from hpstore.maintenance.rebuild import ProgressCallback, RebuildReport
from hpstore.pool.pool import Pool

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
    DeviceError, LockTimeout: the message of an eviction that is refused says that the new device
    stays a member.
    """
    member = pool.admin.devices.find(old)
    if member.left:
        raise MembershipError(
            f"{old} has left the pool already; `hpstore add` takes {new} in. Nothing was changed."
        )
    place = same_form(new)
    answers = _answers(pool, member.device_id)
    if answers and place == pool.admin.devices.places.get(member.device_id):
        raise MembershipError(
            f"{old} is still at {new} and answers. Nothing was changed. Mount the new disk at a "
            "place of its own, or evict the old one, unmount it and mount the new one there."
        )
    location = locate(pool.admin.devices.places.get(member.device_id, member.url))
    added = _added(pool, member, new, domain or member.domain, allow_root_disk=allow_root_disk)
    try:
        if answers:
            moved = pool.drain(
                member.device_id, progress=progress, rate_bytes_per_second=rate_bytes_per_second
            )
            report = None
        else:
            pool.evict(member.device_id)
            moved = 0
            report = pool.rebuild(progress=progress, rate_bytes_per_second=rate_bytes_per_second)
    except HpstoreError as error:
        raise type(error)(
            f"{new} is a member now and stays one, {old} is not out yet: {error} Run it again when "
            "that is mended."
        ) from error
    return Replaced(old=member, new=added, moved=moved, report=report, location=location)


def _added(pool: Pool, old: Member, new: str, domain: str, *, allow_root_disk: bool) -> str:
    """The id of the device at a place, added unless it is a member since a run before this one."""
    for device, url in pool.admin.devices.places.items():
        if same_form(url) == same_form(new) and device != old.device_id:
            return device
    return pool.add_device(new, domain, allow_root_disk=allow_root_disk)


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
