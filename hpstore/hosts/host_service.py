"""The service of a host: its disks, what callers hold of them, and the ports they call."""

from __future__ import annotations

import socket
import time

from hpstore.devices.local import LocalDevice
from hpstore.errors import ConfigError, ThreadsExhausted
from hpstore.hosts.admission import Admit, admit_all
from hpstore.hosts.caller_sessions import CallerSessions
from hpstore.hosts.data_connection import DataConnection
from hpstore.hosts.exported_disk import ExportedDisk
from hpstore.hosts.host_limits import HostLimits
from hpstore.hosts.host_looks import HostLooks
from hpstore.hosts.listener import Listener, Replace
from hpstore.hosts.record_file import RecordFile
from hpstore.hosts.served_connection import ServedConnection, Shared
from hpstore.runtime.budget import ByteBudget
from hpstore.runtime.buffers import BufferPool
from hpstore.runtime.closing import Closing
from hpstore.runtime.open_file_limit import may_open
from hpstore.runtime.wire_stream import WireStream

_CLOSE_SECONDS = 5.0


class HostService(Closing):
    """Exports local devices. close() ends all connections; what they held is given up.

    Parameters
    ----------
    host, port
        Where it listens; port 0 for any free one.
    admit
        Makes an accepted socket one of mutual TLS, and says who called and what they may do.
    limits
        What it takes from callers.
    records
        Where it keeps registers of pools; it stays the caller's to close.
    data_port
        Where it also takes bodies of open files without TLS, by their handles; 0 for any free one.

    Raises
    ------
    ConfigError
        The address cannot be used.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        admit: Admit = admit_all,
        limits: HostLimits | None = None,
        records: RecordFile | None = None,
        data_port: int | None = None,
    ) -> None:
        self._admit, self._limits = admit, limits or HostLimits()
        may_open(self._limits.handles + 2 * self._limits.connections + 256)
        self._disks: dict[int, ExportedDisk] = {}
        self._listeners = [Listener(host, port, self._limits, self._serve)]
        if data_port is not None:
            try:
                self._listeners.append(Listener(host, data_port, self._limits, self._serve_bodies))
            except ConfigError:
                self._listeners[0].close()
                raise
        try:
            looks = HostLooks(self._disks)
        except ThreadsExhausted:
            for listener in self._listeners:
                listener.close()
            raise
        self._shared = Shared(
            disks=self._disks,
            sessions=CallerSessions(self._limits.handles),
            arena=BufferPool(ByteBudget(self._limits.arena_bytes)),
            limits=self._limits,
            looks=looks,
            records=records,
            data_port=None if data_port is None else self._listeners[1].address[1],
        )
        for listener in self._listeners:
            listener.start()

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens."""
        return self._listeners[0].address

    def export(self, device: LocalDevice) -> int:
        """Let callers use a device; its number there. It stays the caller's to close."""
        number = len(self._disks)
        self._disks[number] = ExportedDisk(number, device, self._limits.calls_of_disk)
        return number

    def _serve(self, sock: socket.socket, address: str, replace: Replace) -> None:
        sock.settimeout(self._limits.head_seconds)
        admitted = self._admit(sock, address)
        replace(admitted.sock)
        ServedConnection(self._shared, WireStream(admitted.sock), admitted).serve()

    def _serve_bodies(self, sock: socket.socket, address: str, _: Replace) -> None:
        DataConnection(self._shared, WireStream(sock), admit_all(sock, address)).serve()

    def close(self) -> None:
        """Stop. Idempotent. A thread that hangs on its disk is left behind."""
        for listener in self._listeners:
            listener.close()
        until = time.monotonic() + _CLOSE_SECONDS
        for listener in self._listeners:
            listener.join(until)
        self._shared.looks.close()
