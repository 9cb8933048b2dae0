"""A port of a host's service: accepts connections, so many at most, and gives each a thread."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable

from hpstore.errors import ConfigError, ThreadsExhausted
from hpstore.hosts.host_limits import HostLimits
from hpstore.runtime.threads import start_thread

_log = logging.getLogger(__name__)
_PAUSE_SECONDS = 0.1  # after an accept that failed: descriptors may be short
_BACKLOG = 256
Replace = Callable[[socket.socket], None]
Serve = Callable[[socket.socket, str, Replace], None]


class Listener:
    """Listens at once; start() accepts. Thread-safe.

    `serve(sock, address, replace)` serves a connection on its own thread, and returns when that has
    ended; `replace` notes the socket that has taken its place, such as one of TLS. What it raises
    of OSError is logged. Raises ConfigError where the address cannot be used.
    """

    def __init__(self, host: str, port: int, limits: HostLimits, serve: Serve) -> None:
        self._limits, self._serve = limits, serve
        self._live: dict[threading.Thread, tuple[str, socket.socket]] = {}
        self._refused = 0
        self._lock = threading.Lock()  # guards _live and _refused
        self._over = False
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._socket = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        except (OSError, UnicodeError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"the host's service cannot listen on {host}:{port}: {reason}. Choose another "
                "address with --listen, or another --data-port"
            ) from error
        host, port = self._socket.getsockname()[:2]
        self.address = (str(host), int(port))
        self._accepting = threading.Thread(
            target=self._accept, name="hpstore-host-accept", daemon=True
        )

    def start(self) -> None:
        """Accept connections from now on."""
        start_thread(self._accepting)

    def _accept(self) -> None:
        while not self._over:
            try:
                sock, address = self._socket.accept()
            except OSError as error:
                if not self._over:
                    _log.warning("a connection could not be accepted: %s", error)
                    time.sleep(_PAUSE_SECONDS)
                continue
            self._begin(sock, str(address[0]))

    def _begin(self, sock: socket.socket, address: str) -> None:
        thread = threading.Thread(
            target=self._run, args=(sock, address), name=f"hpstore-host-{address}", daemon=True
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

    def _run(self, sock: socket.socket, address: str) -> None:
        def replace(other: socket.socket) -> None:
            with self._lock:
                self._live[threading.current_thread()] = (address, other)

        try:
            self._serve(sock, address, replace)
        except OSError as error:  # of a handshake; a refused certificate is one, too
            _log.info("a connection of %s was refused: %s", address, error)
        finally:
            with self._lock:
                _, last = self._live.pop(threading.current_thread())
            last.close()

    def close(self) -> None:
        """Accept no more and end all connections. Idempotent."""
        self._over = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with self._lock:
            live = list(self._live.values())
        for _, sock in live:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def join(self, until: float) -> None:
        """After close(): wait for its threads, until a monotonic time. A thread that hangs on its
        disk is left behind."""
        with self._lock:
            live = list(self._live)
        for thread in (self._accepting, *live):
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))
