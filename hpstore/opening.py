"""From URLs to devices: make, open, identify. What is a member is decided elsewhere."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hpstore.config import Settings
from hpstore.devices.base import DIRECTORIES, Device
from hpstore.devices.local import LocalDevice
from hpstore.devices.remote import RemoteDevice
from hpstore.errors import (
    ConfigError,
    DeviceError,
    DeviceInUse,
    DeviceMissing,
    DeviceTimeout,
    FormatTooNew,
    IntegrityError,
)
from hpstore.records import IDENTITY_FILE, MAX_RECORD_BYTES, POOL_FILE, Identity, PoolRecord
from hpstore.scheduler import Scheduler
from hpstore.units import GIB

Opener = Callable[[str], Device]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedDevice:
    """A device that answered, what it says of itself and what it knows of the pool."""

    device: Device
    identity: Identity
    record: PoolRecord | None


def device_opener(settings: Settings) -> Opener:
    """How URLs become devices: a path or file:// is local, any other URL goes through fsspec."""

    def open_url(url: str) -> Device:
        if "://" in url and not url.startswith("file://"):
            return RemoteDevice(url)
        path = url.removeprefix("file://")
        if os.path.exists(path) and not os.path.isdir(path):
            raise ConfigError(f"device {path} is not a directory")
        return LocalDevice(
            path,
            direct=settings.direct,
            file_mode=settings.file_mode,
            directory_mode=settings.directory_mode,
            recycle_bytes=settings.recycle_bytes,
        )

    return open_url


def identify(url: str, opener: Opener, *, read_only: bool) -> OpenedDevice:
    """Open a formatted device and prove that it works.

    Raises DeviceMissing when nothing of ours is there (not mounted, wiped), IntegrityError or
    FormatTooNew for a record that cannot be used, DeviceError when the probe fails.
    """
    device = opener(url)
    try:
        identity = Identity.decode(
            device.read_small(IDENTITY_FILE, MAX_RECORD_BYTES), where=f"{url}/{IDENTITY_FILE}"
        )
    except FileNotFoundError as error:
        device.close()
        raise DeviceMissing(
            f"device {url} has no {IDENTITY_FILE}: not mounted, wiped, or never part of a pool. "
            "Nothing was written there.",
            device=url,
        ) from error
    try:
        record = PoolRecord.decode(
            device.read_small(POOL_FILE, MAX_RECORD_BYTES), where=f"{url}/{POOL_FILE}"
        )
    except (FileNotFoundError, IntegrityError):
        record = None  # the other devices know; this one is brought up to date
    device.probe(write=not read_only)
    return OpenedDevice(device=device, identity=identity, record=record)


def identify_all(
    urls: Mapping[str, str], opener: Opener, scheduler: Scheduler, *, read_only: bool,
    deadline_seconds: float,
) -> tuple[dict[str, OpenedDevice], dict[str, Exception]]:  # fmt: skip
    """Identify devices side by side; those that answered and what went wrong, both by URL.

    A device that hangs costs the deadline once, not its neighbours' time.
    """
    results = scheduler.gather(
        {url: lambda u=url: identify(u, opener, read_only=read_only) for url in urls},  # type: ignore[misc]
        deadline_seconds,
    )
    opened, failed = {}, {}
    for url, result in results.items():
        if isinstance(result, Exception):
            failed[url] = result
            if isinstance(result, FormatTooNew):
                raise result
            if not isinstance(result, (DeviceTimeout, DeviceError, IntegrityError, ConfigError)):
                raise result
        else:
            opened[url] = result
    return opened, failed


def claim(device: Device, identity: Identity) -> None:
    """Make an unused place into a device of a pool. Durable on return.

    Raises DeviceInUse when it belongs to some pool already, DeviceError when it does not work.
    """
    if device.stamp(IDENTITY_FILE) is not None:
        raise DeviceInUse(
            f"device {device.url} already belongs to a pool ({IDENTITY_FILE} is there). If that "
            "pool is of no use any more, delete its files there first.",
            device=device.url,
        )
    taken = {entry.name for entry in device.entries("")} & set(DIRECTORIES)
    if taken:
        raise DeviceInUse(
            f"device {device.url} holds {', '.join(sorted(taken))} but no {IDENTITY_FILE}: "
            "leftovers of a pool? Choose an empty directory.",
            device=device.url,
        )
    if isinstance(device, LocalDevice):
        device.prepare()
    device.probe(write=True)
    device.write_small(IDENTITY_FILE, identity.encode())


def make_place(url: str, settings: Settings) -> None:
    """Create the directory of a new local device when only its last component is missing."""
    if "://" in url and not url.startswith("file://"):
        return
    path = url.removeprefix("file://")
    if os.path.lexists(path) and not os.path.isdir(path):
        raise ConfigError(f"device {path} is not a directory")
    try:
        os.makedirs(path, settings.directory_mode, exist_ok=True)
    except OSError as error:
        raise DeviceMissing(
            f"device {path} cannot be made: {error.strerror}", device=path
        ) from error


def shares_filesystem(urls: list[str]) -> list[str]:
    """Local paths that lie on the filesystem of another one: one disk's death takes them all."""
    seen: dict[int, str] = {}
    shared = []
    for url in urls:
        path = url.removeprefix("file://")
        if "://" in path or not os.path.isdir(path):
            continue
        if seen.setdefault(os.stat(path).st_dev, path) != path:
            shared.append(path)
    return shared


def below_reserve(device: Device) -> bool:
    """Whether a device is too full for new columns: less than 1 % or 1 GiB left, the smaller."""
    usage = device.usage()
    return usage.free < min(usage.total // 100, GIB)


__all__ = ["OpenedDevice", "Opener", "below_reserve", "claim", "device_opener", "identify",
           "identify_all", "make_place", "shares_filesystem"]  # fmt: skip
