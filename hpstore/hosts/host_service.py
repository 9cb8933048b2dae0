"""The service of a host: listens, and gives each connection a thread."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections import Counter

from hpstore.devices.local import LocalDevice
from hpstore.errors import ConfigError, ThreadsExhausted
from hpstore.hosts.admission import Admit, admit_all
from hpstore.hosts.caller_sessions import CallerSessions
from hpstore.hosts.exported_disk import ExportedDisk
from hpstore.hosts.host_limits import HostLimits
from hpstore.hosts.served_connection import ServedConnection, Shared
from hpstore.runtime.budget import ByteBudget
from hpstore.runtime.buffers import BufferPool
from hpstore.runtime.closing import Closing
from hpstore.runtime.open_file_limit import may_open
from hpstore.runtime.threads import start_thread
from hpstore.runtime.wire_stream import WireStream

_log = logging.getLogger(__name__)
_CLOSE_SECONDS = 5.0
_PAUSE_SECONDS = 0.1  # after an accept that failed: descriptors may be short
_BACKLOG = 256


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

    Raises
    ------
    ConfigError
        The address cannot be used.
    """

    def __init__(
        self, host: str, port: int, *, admit: Admit = admit_all, limits: HostLimits | None = None
    ) -> None:
        self._admit, self._limits = admit, limits or HostLimits()
        may_open(self._limits.handles + 2 * self._limits.connections + 256)
        self._disks: dict[int, ExportedDisk] = {}
        self._shared = Shared(
            disks=self._disks,
            sessions=CallerSessions(self._limits.handles),
            arena=BufferPool(ByteBudget(self._limits.arena_bytes)),
            limits=self._limits,
        )
        self._live: dict[threading.Thread, tuple[str, socket.socket]] = {}
        self._refused = 0
        self._lock = threading.Lock()  # guards _live and _refused
        self._over = False
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        except (OSError, UnicodeError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"the host's service cannot listen on {host}:{port}: {reason}. Choose another "
                "address with --listen"
            ) from error
        self._accepting = threading.Thread(
            target=self._accept, name="hpstore-host-accept", daemon=True
        )
        start_thread(self._accepting)

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens."""
        host, port = self._listener.getsockname()[:2]
        return str(host), int(port)

    def export(self, device: LocalDevice) -> int:
        """Let callers use a device; its number there. It stays the caller's to close."""
        number = len(self._disks)
        self._disks[number] = ExportedDisk(number, device, self._limits.calls_of_disk)
        return number

    def _accept(self) -> None:
        while not self._over:
            try:
                sock, address = self._listener.accept()
            except OSError as error:
                if not self._over:
                    _log.warning("a connection could not be accepted: %s", error)
                    time.sleep(_PAUSE_SECONDS)
                continue
            self._begin(sock, str(address[0]))

    def _begin(self, sock: socket.socket, address: str) -> None:
        thread = threading.Thread(
            target=self._serve, args=(sock, address), name=f"hpstore-host-{address}", daemon=True
        )
        with self._lock:
            peers = Counter(peer for peer, _ in self._live.values())
            full = (
                self._over
                or len(self._live) >= self._limits.connections
                or peers[address] >= self._limits.connections_of_peer
            )
            if not full:
                self._live[thread] = (address, sock)
            else:
                self._refused += 1
                first = self._refused == 1
        if full:
            sock.close()
            if first:
                _log.warning("connections of %s are refused: there are too many", address)
            return
        try:
            start_thread(thread)
        except ThreadsExhausted as error:
            _log.warning("a connection of %s was refused: %s", address, error)
            with self._lock:
                del self._live[thread]
            sock.close()

    def _serve(self, sock: socket.socket, address: str) -> None:
        try:
            sock.settimeout(self._limits.head_seconds)
            admitted = self._admit(sock, address)
            with self._lock:
                self._live[threading.current_thread()] = (address, admitted.sock)
            ServedConnection(self._shared, WireStream(admitted.sock), admitted).serve()
        except OSError as error:  # of a handshake; a refused certificate is one, too
            _log.info("a connection of %s was refused: %s", address, error)
        finally:
            with self._lock:
                _, last = self._live.pop(threading.current_thread())
            last.close()

    def close(self) -> None:
        """Stop. Idempotent. A thread that hangs on its disk is left behind."""
        self._over = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            live = dict(self._live)
        for _, sock in live.values():
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        until = time.monotonic() + _CLOSE_SECONDS
        for thread in (self._accepting, *live):
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))
