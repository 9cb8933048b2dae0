"""From URLs to devices: make, open, identify. What is a member is decided elsewhere."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from hpstore.config import Settings
from hpstore.devices.base import READABLE, RELEASED, Device
from hpstore.devices.local import LocalDevice
from hpstore.devices.remote_opener import open_remote
from hpstore.errors import (
    ConfigError,
    DeviceDenied,
    DeviceError,
    DeviceMissing,
    DeviceReadOnly,
    IntegrityError,
    NotAuthentic,
)
from hpstore.format.device_urls import has_secrets, without_secrets
from hpstore.format.host_calls import SCHEME
from hpstore.format.pool_key import PoolKey
from hpstore.format.records import IDENTITY_FILE, MAX_RECORD_BYTES, POOL_FILE, Identity, PoolRecord
from hpstore.format.store_settings import StoreSettings
from hpstore.runtime.deadline_wait import Patience
from hpstore.runtime.mutual_tls import TlsFiles
from hpstore.runtime.scheduler import Scheduler

Opener = Callable[[str], Device]
RELEASED_NOTE = "was released for maintenance"  # in the error of such a device
OPEN_PATIENCE = 2.0  # seconds that a device is waited for without which the pool opens


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedDevice:
    """A device that answered, what it says of itself and what it knows of the pool, or why not."""

    device: Device
    identity: Identity
    record: PoolRecord | None
    lacks: str = ""
    other_key: bool = False  # it lacks a record that pool.toml has the key of


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """How probes of devices ended, by URL.

    `failed` ones do not work. `read_only` ones refuse writes: what they hold can be read.
    """

    failed: Mapping[str, Exception]
    read_only: Mapping[str, DeviceReadOnly]

    @property
    def denied(self) -> frozenset[str]:
        """Those on which this user has no rights, or may not write."""
        errors = {**self.failed, **self.read_only}
        return frozenset(url for url, error in errors.items() if is_denied(error))


def device_opener(
    settings: Settings,
    listed: Callable[[], Collection[str]] = tuple,
    stores: Callable[[], Mapping[str, StoreSettings]] = dict,
) -> Opener:
    """How URLs become devices: a path or file:// is local, hpd:// a disk of another host, any
    other URL is remote.

    `listed`: URLs of the settings, with the passwords that are shown nowhere else. `stores`: those
    that the settings name.
    Raises ConfigError where Python would write names to disk in another encoding than UTF-8.
    """
    _require_utf8_names()

    def open_url(url: str) -> Device:
        if url.startswith(SCHEME):
            return _host_device(url, settings)
        if "://" in url and not url.startswith("file://"):
            whole = {without_secrets(known): known for known in listed()}
            return open_remote(
                url if has_secrets(url) else whole.get(url, url),
                stores(),
                deadline_seconds=settings.device_deadline_seconds,
            )
        path = url.removeprefix("file://")
        if os.path.exists(path) and not os.path.isdir(path):
            raise ConfigError(f"device {path} is not a directory")
        return LocalDevice(
            path,
            direct=settings.direct,
            file_mode=settings.file_mode,
            directory_mode=settings.directory_mode,
            recycle_bytes=settings.recycle_bytes,
            group=settings.group,
        )

    return open_url


def _host_device(url: str, settings: Settings) -> Device:
    """A disk of another host. Raises ConfigError where what that needs is not installed."""
    try:
        from hpstore.devices.host_device import HostDevice
    except ImportError as error:
        raise ConfigError(
            f"device {url} is on another host, which needs {error.name}: install hpstore[hosts]"
        ) from error
    seconds = settings.device_deadline_seconds
    secure = host_security(settings)
    return HostDevice(url, seconds=seconds, secure=secure, plain_bodies=settings.tls == "control")


def host_security(settings: Settings) -> Callable[[socket.socket, str], socket.socket] | None:
    """What makes a connection to a host one of mutual TLS, by this user's certificate; None where
    the settings want it plain. Raises ConfigError."""
    if settings.tls == "plain":
        return None
    return TlsFiles(settings.certificates_path(), server=False).call


def _require_utf8_names() -> None:
    """Names on the devices are UTF-8: in another encoding one process would not see another's."""
    encoding = sys.getfilesystemencoding()
    if encoding != "utf-8":
        raise ConfigError(
            f"Python encodes file names as {encoding} here, and names on devices are UTF-8. "
            "Nothing was opened. Start Python with PYTHONUTF8=1 or in a UTF-8 locale, as C.UTF-8."
        )


def identify(url: str, opener: Opener, pool_key: PoolKey | None) -> OpenedDevice:
    """Open a formatted device and read what it says; nothing is written, see prove().

    Raises DeviceMissing when nothing of ours is there (not mounted, wiped), IntegrityError or
    FormatTooNew for a record that cannot be used.
    """
    device = opener(url)
    try:
        return _identify(without_secrets(url), device, pool_key)
    except BaseException:  # Ctrl-C too: the descriptor would keep its lock
        device.close()
        raise


def _identify(url: str, device: Device, pool_key: PoolKey | None) -> OpenedDevice:
    try:
        identity = Identity.decode(
            device.read_small(IDENTITY_FILE, MAX_RECORD_BYTES), where=f"{url}/{IDENTITY_FILE}"
        )
    except FileNotFoundError as error:
        raise DeviceMissing(
            f"device {url} has no {IDENTITY_FILE}: not mounted, wiped, or never part of a pool. "
            "Nothing was written there.",
            device=url,
        ) from error
    if is_released(device):
        raise DeviceMissing(
            f"device {url} {RELEASED_NOTE}; `hpstore readmit` takes it back.",
            device=url,
        )
    try:
        record = PoolRecord.decode(
            device.read_small(POOL_FILE, MAX_RECORD_BYTES),
            where=f"{url}/{POOL_FILE}",
            pool_key=pool_key,
        )
    except (FileNotFoundError, IntegrityError) as error:
        # the other devices know; this one is brought up to date
        lacks = f"{url} has no {POOL_FILE}" if isinstance(error, FileNotFoundError) else str(error)
        return OpenedDevice(
            device=device,
            identity=identity,
            record=None,
            lacks=lacks,
            other_key=isinstance(error, NotAuthentic),
        )
    return OpenedDevice(device=device, identity=identity, record=record)


def is_released(device: Device) -> bool:
    """Whether an operator wants all processes to close a device, so that it can be unmounted. Never
    of a store."""
    return device.mode != "remote" and device.stamp(RELEASED) is not None


def identify_all(
    urls: Iterable[str],
    opener: Opener,
    scheduler: Scheduler,
    deadline_seconds: float,
    pool_key: PoolKey | None,
    enough: Callable[[Mapping[str, OpenedDevice]], bool] = lambda opened: False,
) -> tuple[dict[str, OpenedDevice], dict[str, Exception]]:
    """Identify devices side by side; those that answered and what went wrong, both by URL as it may
    be shown.

    A device that hangs costs the deadline once, not its neighbours' time, and no more than
    OPEN_PATIENCE where those that answered are `enough`; it is not asked again before it has
    answered, and is closed then. Raises FormatTooNew.
    """
    answered: dict[str, OpenedDevice] = {}

    def ask(url: str) -> OpenedDevice:
        found = identify(url, opener, pool_key)
        answered[without_secrets(url)] = found
        return found

    def late(_: str, future: Future[OpenedDevice]) -> None:
        if future.exception() is None:
            future.result().device.close()

    calls = {without_secrets(url): partial(ask, url) for url in urls}
    patience = Patience(OPEN_PATIENCE, lambda _: enough(dict(answered)))
    opened: dict[str, OpenedDevice] = {}
    failed: dict[str, Exception] = {}
    fatal: Exception | None = None
    results = scheduler.gather_once(calls, deadline_seconds, late, patience=patience)
    for url, result in results.items():
        if not isinstance(result, Exception):
            opened[url] = result
            continue
        failed[url] = result
        if not isinstance(result, (DeviceError, IntegrityError, ConfigError)):
            fatal = result
    if fatal is not None:
        for found in opened.values():
            found.device.close()
        raise fatal
    return opened, failed


def prove(
    opened: Mapping[str, OpenedDevice],
    scheduler: Scheduler,
    *,
    write: bool,
    deadline_seconds: float,
    enough: Callable[[Collection[str]], bool],
) -> Proof:
    """Probe devices of this pool side by side: write, sync, read back. No longer than OPEN_PATIENCE
    is waited for those that do not answer where the others, by device id, are `enough`.

    Those that failed are closed; one that hangs, when its call has ended. A full or read-only one
    has not failed: it can be read, and takes no new columns.
    """
    devices = {url: found.device for url, found in opened.items()}

    def late(url: str, _: Future[None]) -> None:
        devices[url].close()

    calls = {url: partial(_probe, device, write) for url, device in devices.items()}
    ids = {url: found.identity.device_id for url, found in opened.items()}

    def spare(silent: set[str]) -> bool:
        return enough({ids[url] for url in ids.keys() - silent})

    patience = Patience(OPEN_PATIENCE, spare)
    results = scheduler.gather_once(calls, deadline_seconds, late, patience=patience)
    errors = {url: result for url, result in results.items() if isinstance(result, Exception)}
    failed = {url: error for url, error in errors.items() if not isinstance(error, READABLE)}
    read_only = {url: error for url, error in errors.items() if isinstance(error, DeviceReadOnly)}
    return Proof(failed=failed, read_only=read_only)


def _probe(device: Device, write: bool) -> None:
    """Probe it; it is closed when it fails."""
    try:
        device.probe(write=write)
    except READABLE:
        raise
    except BaseException:  # Ctrl-C too: the descriptor would keep its lock
        device.close()
        raise


def is_denied(error: Exception) -> bool:
    """Whether a device did not open, or takes no writes, for want of this user's rights."""
    return isinstance(error, DeviceDenied) or isinstance(error.__cause__, DeviceDenied)


def same_form(url: str) -> str:
    """A URL without its secrets, a path made absolute: equal for equal places."""
    return without_secrets(url) if "://" in url else os.path.abspath(url)
