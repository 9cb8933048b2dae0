"""Opening a pool's members: who answers, which record is newest, who belongs (PROTOCOL 14)."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from hpstore.config import PoolConfig
from hpstore.devices.base import Device
from hpstore.devices.opener import (
    OpenedDevice,
    Opener,
    Proof,
    identify_all,
    is_denied,
    prove,
    same_form,
)
from hpstore.devices.unused_places import holds_nothing
from hpstore.errors import DeviceForeign, DeviceReadOnly, PoolKeyError, TooFewDevices
from hpstore.format.records import PoolRecord
from hpstore.membership.members import newest_of
from hpstore.membership.survival import too_few_devices
from hpstore.objects.context import View
from hpstore.runtime.lacks import lacks_total, naming_lacks
from hpstore.runtime.scheduler import Scheduler

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A pool's membership and the members that answered; why the others did not, by URL.

    `read_only`: members that refuse writes, by device id. `denied`: URLs on which this user has no
    rights, or may not write.
    """

    view: View
    problems: Mapping[str, str]
    denied: frozenset[str]
    read_only: Mapping[str, DeviceReadOnly]


def open_members(
    config: PoolConfig, opener: Opener, scheduler: Scheduler, *, read_only: bool
) -> Opened:
    """Open a pool's devices; needs answers from all members but m (PROTOCOL 14).

    Raises TooFewDevices that names what is missing and why.
    """
    deadline, before = config.settings.open_deadline_seconds, lacks_total()
    opened, failed = identify_all(
        config.devices, opener, scheduler, deadline, config.key, open_a_pool
    )
    problems = {url: str(error) for url, error in failed.items()}
    denied = frozenset(url for url, error in failed.items() if is_denied(error))
    try:
        opened |= _open_unlisted(config, opened, opener, scheduler)
        with naming_lacks(before):
            found = _choose_view(
                config, opened, problems, scheduler, read_only=read_only, denied=denied
            )
    except BaseException:
        for one in opened.values():
            one.device.close()
        raise
    for problem in problems.values():
        _log.warning("pool %s opens without a device: %s", config.name, problem)
    return found


def open_a_pool(opened: Mapping[str, OpenedDevice]) -> bool:
    """Whether these devices are enough to open their pool (PROTOCOL 14), with those that were
    evicted and not made up for counted as missing, too."""
    if not any(found.record is not None for found in opened.values()):
        return False
    pool_id = _majority_pool(opened)
    ours = [found for found in opened.values() if belongs(found, pool_id)]
    records = [found.record for found in ours if found.record is not None]
    ids = {found.identity.device_id for found in ours}
    return bool(records) and suffice(newest_of(records), ids)


def suffice(record: PoolRecord, present: Collection[str]) -> bool:
    """Whether all that was acknowledged shows on these devices."""
    missing = {m.device_id for m in record.members} - set(present)
    return record.opens_without(missing | record.unhealed())


def _open_unlisted(
    config: PoolConfig, opened: Mapping[str, OpenedDevice], opener: Opener, scheduler: Scheduler
) -> dict[str, OpenedDevice]:
    """Members that the settings of this host do not list, at the places in the membership record:
    a pool that has gained devices opens by a pool.toml from before."""
    if not opened:
        return {}
    pool_id = _majority_pool(opened)
    ours = [found for found in opened.values() if belongs(found, pool_id)]
    records = [found.record for found in ours if found.record is not None]
    if not records:
        return {}
    urls = unlisted(config, newest_of(records), {found.identity.device_id for found in ours})
    deadline = config.settings.open_deadline_seconds
    found, _ = identify_all(urls, opener, scheduler, deadline, config.key)
    for url in found:
        _log.info("pool %s: %s is not listed in %s, but a member", config.name, url, config.path)
    return found


def unlisted(config: PoolConfig, record: PoolRecord, found: Collection[str]) -> list[str]:
    """Places in the record of members that are not among the `found` ids, nor in the settings.

    Paths, and URLs of a protocol that the settings use, too: a record says nothing of others. None
    where the settings list as many places as there are members: this host has them elsewhere.
    """
    if len(config.devices) >= len(record.members):
        return []
    known = {same_form(url) for url in config.devices}
    return [
        m.url
        for m in record.members
        if m.device_id not in found and same_form(m.url) not in known and trusted(config, m.url)
    ]


def trusted(config: PoolConfig, url: str) -> bool:
    """Whether a place that a record names is looked at: a path, or of a protocol that the settings
    use, too. A record comes from a device, and may have this host ask any server of its network."""
    return _protocol(url) in {_protocol(listed) for listed in config.devices} | {""}


def _protocol(url: str) -> str:
    return url.partition("://")[0] if "://" in url else ""


def _choose_view(
    config: PoolConfig,
    opened: dict[str, OpenedDevice],
    problems: dict[str, str],
    scheduler: Scheduler,
    *,
    read_only: bool,
    denied: frozenset[str],
) -> Opened:
    """The view of the newest record, from devices of one pool that prove to work."""
    _require_key(config, opened.values())
    if not any(o.record is not None for o in opened.values()):
        reasons = _reasons(problems | {url: one.lacks for url, one in opened.items()})
        hint = ""
        if not problems and _hold_nothing(opened, scheduler, config):
            hint = (
                " If `hpstore create` was cut off, nothing is stored yet: delete this file, and "
                "hpstore.json on the devices, and create the pool again."
            )
        raise TooFewDevices(
            f"pool {config.name!r} ({config.path}): no device answers with a membership "
            "record. Objects are not touched; one device of the pool with a whole pool.json opens "
            f"it again. {reasons}{hint}"
        )
    pool_id = _majority_pool(opened)
    for url, found in list(opened.items()):
        if not belongs(found, pool_id):
            problems[url] = foreign(url)
            opened.pop(url).device.close()
    known = [o.record for o in opened.values() if o.record is not None]
    proof = prove(
        opened,
        scheduler,
        write=not read_only,
        deadline_seconds=config.settings.open_deadline_seconds,
        enough=lambda ids: bool(known) and suffice(newest_of(known), ids),
    )
    for url, error in proof.failed.items():
        problems[url] = str(error)
        opened.pop(url)
    records = [o.record for o in opened.values() if o.record is not None]
    if not records:
        raise TooFewDevices(f"pool {config.name!r}: no device works. " + _reasons(problems))
    record = newest_of(records)
    view = make_view(record, opened.values(), problems)
    if not record.opens_without(view.missing):
        raise too_few_devices(config, view, problems)
    return Opened(
        view=view,
        problems=problems,
        read_only=refusing(opened, proof),
        denied=denied | proof.denied,
    )


def _hold_nothing(
    opened: Mapping[str, OpenedDevice], scheduler: Scheduler, config: PoolConfig
) -> bool:
    """Whether these devices have neither records, damaged ones included, nor objects: the file of
    settings has the only key of those that do."""
    looks = {url: partial(holds_nothing, one.device) for url, one in opened.items()}
    answers = scheduler.gather_once(looks, config.settings.open_deadline_seconds)
    return all(answer is True for answer in answers.values())


def _require_key(config: PoolConfig, opened: Collection[OpenedDevice]) -> None:
    """Raise PoolKeyError where most devices are of a pool whose key the settings do not have.

    A membership with the MAC of the settings' key proves the key. One without a key proves nothing:
    any device can make it, to take a pool back to a time without keys.
    """
    proven = config.key is not None and any(found.record is not None for found in opened)
    others = [found.lacks for found in opened if found.other_key]
    if proven or not others or 2 * len(others) < len(opened):
        return
    why = (
        "it has no key"
        if config.key is None
        else "its key is not that of this pool, or this pool has none"
    )
    raise PoolKeyError(
        f"{config.path} does not open this pool: {why} ({others[0]}). Nothing was read or changed. "
        "The line `key = ...` of any other pool.toml of the pool, or of a copy, opens it. If there "
        'is none left, `key = "lost"` lets objects be read, and nothing be written; what is read '
        "then is believed as it lies on the devices, without any check."
    )


def require_key_to_write(config: PoolConfig, *, read_only: bool) -> None:
    """Raise PoolKeyError for settings that give the key up for lost, unless opened read-only."""
    if config.key is None or not config.key.lost:
        return
    if not read_only:
        raise PoolKeyError(
            f"{config.path} gives the pool's key up for lost, so the pool can be read, and not be "
            "written: no file could carry its MAC. Open it read-only, copy what is there into a "
            "new pool, and use that. A copy of the key makes it whole again."
        )
    _log.warning(
        "pool %s is read without its key: damaged and forged bytes go unnoticed", config.name
    )


def refusing(opened: Mapping[str, OpenedDevice], proof: Proof) -> dict[str, DeviceReadOnly]:
    """Devices that refuse writes, by device id."""
    return {opened[url].identity.device_id: error for url, error in proof.read_only.items()}


def belongs(found: OpenedDevice, pool_id: str) -> bool:
    """Whether a device is of this pool, by its identity and its record."""
    record = found.record
    return found.identity.pool_id == pool_id and (record is None or record.pool_id == pool_id)


def copied(url: str) -> str:
    """What is wrong with a device whose identity another one has already."""
    return f"device {url} carries the identity of another device: a copied disk? It is not used."


def foreign(url: str) -> str:
    """What is wrong with a device that does not belong."""
    return str(DeviceForeign(f"device {url} belongs to another pool; nothing was written there"))


def _reasons(problems: Mapping[str, str]) -> str:
    return "; ".join(problems.values())


def _majority_pool(opened: Mapping[str, OpenedDevice]) -> str:
    """The pool that most devices belong to."""
    ids = [o.identity.pool_id for o in opened.values()]
    return max(sorted(set(ids)), key=ids.count)


def make_view(record: PoolRecord, opened: Iterable[OpenedDevice], problems: dict[str, str]) -> View:
    """Members that answered. Of two devices with one identity, a copied disk or one that poses as
    another, the one at the place in the record is used, else the first."""
    homes = {m.device_id: same_form(m.url) for m in record.members}

    def away(found: OpenedDevice) -> bool:
        return same_form(found.device.url) != homes.get(found.identity.device_id)

    devices: dict[str, Device] = {}
    for found in sorted(opened, key=away):
        device_id = found.identity.device_id
        if record.member(device_id) is None:
            found.device.close()
            continue
        if device_id in devices:
            problems[found.device.url] = copied(found.device.url)
            found.device.close()
            continue
        devices[device_id] = found.device
    return View(record=record, devices=devices)
