"""Prepare directories and stores that are not devices yet, and claim them for a pool.

Two processes may want the same place at once, of two pools: a claim is made under a lock of the
device, or, in a store, by a write under a condition.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Protocol, runtime_checkable

from hpstore.config import Settings
from hpstore.devices.ballast import BALLAST
from hpstore.devices.base import DIRECTORIES, REGISTERS, RELEASED, TMP, Device, Hold, denied
from hpstore.devices.file_handles import ESCAPED_NAMES
from hpstore.devices.horizon_guard import HORIZON, MARK
from hpstore.errors import ConfigError, DeviceError, DeviceInUse, DeviceMissing
from hpstore.format.keys import OBJECTS
from hpstore.format.records import IDENTITY_FILE, MAX_RECORD_BYTES, POOL_FILE, Identity

_log = logging.getLogger(__name__)
_CLAIM_AT = 1 << 25  # of the registers' locks, behind all that the registers use


@runtime_checkable
class Preparable(Protocol):
    """A device whose root is made ready, once, before it is used."""

    def prepare(self) -> None:
        """Make the directories of a device root."""


@runtime_checkable
class Comparing(Protocol):
    """A device that can write a file where there is none."""

    def write_new(self, path: str, data: bytes) -> bool:
        """Write a small file, durable on return; False where another one is there."""


_OURS = {*DIRECTORIES, BALLAST, ESCAPED_NAMES, HORIZON, MARK, POOL_FILE, REGISTERS, RELEASED}
_HARMLESS = {"lost+found", ".snapshot", ".zfs", "System Volume Information"}
_TRASH = ".Trash-"  # and a user's number: a desktop makes it on each disk


def holds_nothing(device: Device) -> bool:
    """Whether a device has neither a record nor objects. Raises DeviceError."""
    names = {entry.name for entry in device.entries("")}
    return POOL_FILE not in names and not (OBJECTS in names and device.entries(OBJECTS))


def require_unused(device: Device) -> None:
    """Raise DeviceInUse unless a place can become a device: nothing is there, or what a claim that
    failed has left."""
    names = _require_no_other_use(device)
    # not tmp/: another process that looks at the place probes there, one that died leaves files
    mine = [name for name in DIRECTORIES if name != TMP]
    taken = [name for name in mine if name in names and device.entries(name)]
    if taken:
        raise DeviceInUse(
            f"device {device.url} holds {', '.join(sorted(taken))} but no {IDENTITY_FILE}: "
            "leftovers of a pool? Choose an empty directory.",
            device=device.url,
        )


def _require_no_other_use(device: Device) -> set[str]:
    """What there is. Raises DeviceInUse for a device of a pool, and for files that hpstore did not
    make."""
    if device.stamp(IDENTITY_FILE) is not None:
        advice = (
            f"It has no {POOL_FILE} and no objects, which is what `hpstore create` leaves when it "
            f"is cut off: then delete {IDENTITY_FILE} there"
            if holds_nothing(device)
            else "If you no longer need that pool, delete its files there first"
        )
        raise DeviceInUse(
            f"device {device.url} already belongs to a pool ({IDENTITY_FILE} is there). {advice}.",
            device=device.url,
        )
    names = {entry.name for entry in device.entries("")}
    strange = sorted(n for n in names - _OURS - _HARMLESS if not n.startswith(_TRASH))
    if strange:
        more = f" and {len(strange) - 3} more" if len(strange) > 3 else ""
        raise DeviceInUse(
            f"device {device.url} holds {', '.join(strange[:3])}{more}, which hpstore did not "
            "make. Nothing was changed there. Give an empty directory, such as "
            f"{device.url.rstrip('/')}/hpstore.",
            device=device.url,
        )
    return names


@contextmanager
def alone(device: Device) -> Iterator[None]:
    """Keep others from making the same place into a device, and make it ready for that.

    Raises DeviceInUse if another process is claiming the place, if it belongs to some pool already,
    or if it holds files that are not hpstore's. Where locks do not work, the first to write its
    identity wins, as far as the place can compare.
    """
    _require_no_other_use(device)
    # prepare() makes the file of the locks, with the rights of the pool. If it exists, another
    # process may be claiming the place, so nothing is changed without the lock
    hold = _lock(device) if device.stamp(REGISTERS) is not None else None
    try:
        if isinstance(device, Preparable):
            device.prepare()
        hold = hold or _lock(device)
        require_unused(device)
        yield
    finally:
        if hold is not None:
            hold.release()


def _lock(device: Device) -> Hold | None:
    """The lock of those who claim it; None where locks do not work. Raises DeviceInUse."""
    try:
        hold = device.hold(_CLAIM_AT, 1)
    except DeviceError as error:
        if type(error) is not DeviceError:  # it is away, full, denied: not without locks
            raise
        _log.debug("%s is claimed without a lock: %s", device.url, error)
        return None
    if not hold.taken:
        raise _taken(device)
    return hold


def _taken(device: Device) -> DeviceInUse:
    return DeviceInUse(
        f"device {device.url} is being made into a device by another process, which goes on. Wait "
        "until it ends. Then try again, or give another place.",
        device=device.url,
    )


def claim(device: Device, identity: Identity) -> None:
    """Make an unused place into a device of a pool. Durable on return.

    Raises as alone() and mark().
    """
    with alone(device):
        mark(device, identity)


def mark(device: Device, identity: Identity) -> None:
    """Write the identity of a device of a pool. The caller is alone(). Durable on return.

    Raises DeviceInUse when another process was faster, DeviceError when the device does not work.
    """
    device.probe(write=True)
    data = identity.encode()
    if isinstance(device, Comparing):
        if not device.write_new(IDENTITY_FILE, data):
            raise _taken(device)
    else:
        device.write_small(IDENTITY_FILE, data)
    if device.read_small(IDENTITY_FILE, MAX_RECORD_BYTES) != data:
        raise _taken(device)


def make_place(url: str, settings: Settings) -> bool:
    """Create the directory of a new local device when only its last component is missing; whether
    it was."""
    if "://" in url and not url.startswith("file://"):
        return False
    path = url.removeprefix("file://")
    if os.path.lexists(path) and not os.path.isdir(path):
        raise ConfigError(f"device {path} is not a directory")
    if os.path.isdir(path):
        return False
    try:
        os.mkdir(path, settings.directory_mode)
    except PermissionError as error:
        raise denied(error, path, "making of the directory") from error
    except OSError as error:
        raise DeviceMissing(
            f"device {path} cannot be made: {error.strerror}. Only the last directory of a path is "
            "made, so that a mistyped mount does not end up on another disk.",
            device=path,
        ) from error
    return True


def remove_place(url: str) -> None:
    """Remove the directory that make_place() made, if it is still empty."""
    with suppress(OSError):
        os.rmdir(url.removeprefix("file://"))
