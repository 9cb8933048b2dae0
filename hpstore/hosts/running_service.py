"""A host's service as a process of its own: opens its disks, serves them until it is ended."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from hpstore.config import Settings
from hpstore.devices.local import LocalDevice
from hpstore.devices.opener import device_opener
from hpstore.devices.unused_places import make_place
from hpstore.errors import ConfigError
from hpstore.hosts.admission import Admit, admit_all, admit_certified
from hpstore.hosts.host_limits import HostLimits
from hpstore.hosts.host_service import HostService
from hpstore.hosts.record_file import RecordFile
from hpstore.runtime.mutual_tls import TlsFiles

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def serving(
    host: str,
    port: int,
    disks: Sequence[str],
    settings: Settings,
    limits: HostLimits,
    *,
    registers: Path | None = None,
    data_port: int | None = None,
) -> Iterator[HostService]:
    """Serve these directories, in their order, with `settings` for TLS, modes and kept files.

    `registers`: a directory in which it keeps registers of pools. `data_port`: for bodies without
    TLS, where the settings' `tls` is "control"; by default the next one.

    Raises ConfigError, DeviceError.
    """
    opener = device_opener(settings)
    admit: Admit = admit_all
    if settings.tls != "plain":
        admit = admit_certified(TlsFiles(settings.certificates_path(), server=True))
    with contextlib.ExitStack() as stack:
        devices = []
        for disk in disks:
            make_place(disk, settings)
            device = opener(disk)
            if not isinstance(device, LocalDevice):
                raise ConfigError(f"{disk} is no directory of this host: give local paths")
            stack.callback(device.close)
            devices.append(device)
        records = None
        if registers is not None:
            records = RecordFile(registers)
            stack.callback(records.close)
        service = stack.enter_context(
            HostService(
                host,
                port,
                admit=admit,
                limits=limits,
                records=records,
                data_port=_data_port(port, data_port) if settings.tls == "control" else None,
            )
        )
        for device in devices:
            service.export(device)
        if settings.tls == "control":
            _log.warning(
                "bytes of columns go without TLS: every process on their way may read and change "
                "them"
            )
        if settings.tls == "plain":
            _log.warning(
                "without TLS: every process that can connect to %s:%d may read, change and remove "
                "what is stored here",
                *service.address,
            )
        yield service


def _data_port(port: int, wanted: int | None) -> int:
    if wanted is not None:
        return wanted
    return port + 1 if port else 0


def run_until_ended(began: Callable[[], None]) -> None:
    """Wait for SIGTERM or Ctrl-C, after calling `began`. On the main thread."""
    ended = threading.Event()
    before = {
        number: signal.signal(number, lambda *_: ended.set())
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        began()
        while not ended.wait(3600):
            pass
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def default_certificates(directory: Path | None) -> str:
    """As a setting: "" for this user's own."""
    return "" if directory is None else str(directory.absolute())
