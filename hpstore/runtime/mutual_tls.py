"""Mutual TLS between hosts: contexts that follow their files, and what a certificate allows.

A directory holds `ca.pem`, `certificate.pem` and `key.pem`. Both sides show a certificate of the
same authority; that of a caller names its role. Files that change are read again with the next
connection, so certificates are renewed without a restart.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import ssl
import stat
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from hpstore.errors import ConfigError
from hpstore.runtime.forks import call_in_children

_log = logging.getLogger(__name__)
AUTHORITY, CERTIFICATE, KEY = "ca.pem", "certificate.pem", "key.pem"
ROLE_URI = "urn:hpstore:role:"  # and a role: a URI among the alternative names of a caller
_REFUSED_SECONDS, _REFUSED_READS, _REFUSED_BYTES = 1.0, 8, 16384  # of what a refused caller sends
_Seen = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """What a verified certificate says: a name, which one that is renewed keeps, roles, and when it
    ends by this machine's monotonic clock."""

    name: str
    roles: tuple[str, ...]
    until_seconds: float


def refuse_passphrase() -> NoReturn:
    """For load_cert_chain, which else asks on the terminal and waits. Raises ConfigError."""
    raise ConfigError(
        "the private key is encrypted, and no passphrase is asked for: give a key without "
        "one (openssl pkey -in KEY -out PLAIN), readable by its user alone"
    )


class TlsFiles:
    """Contexts made of a directory's files. Thread-safe.

    Raises ConfigError when they cannot be used at first. Later ones that cannot, such as half of a
    new pair, are logged, and the old ones go on.
    """

    def __init__(self, directory: str | os.PathLike[str], *, server: bool) -> None:
        self._directory, self._server = Path(directory), server
        self._lock = threading.Lock()  # guards _seen and _context
        call_in_children(self._renew)
        self._seen = self._look()
        self._context = self._load()

    def _look(self) -> _Seen:
        """What changes whenever a file is replaced."""
        try:
            found = [os.stat(self._directory / name) for name in (AUTHORITY, CERTIFICATE, KEY)]
        except OSError as error:
            raise ConfigError(
                f"{self._directory} has no {AUTHORITY}, {CERTIFICATE} and {KEY} that can be read: "
                f"{error.strerror}. `hpstore host init` makes them"
            ) from error
        return tuple((one.st_ino, one.st_mtime_ns, one.st_size) for one in found)

    def _load(self) -> ssl.SSLContext:
        key = self._directory / KEY
        kind = ssl.PROTOCOL_TLS_SERVER if self._server else ssl.PROTOCOL_TLS_CLIENT
        context = ssl.SSLContext(kind)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        if self._server:
            context.num_tickets = 0  # each connection shows its certificate
        try:
            mode = stat.S_IMODE(os.stat(key).st_mode)
            if mode & 0o077:
                raise ConfigError(
                    f"{key} can be read by other users (mode {mode:o}): whoever has it may do what "
                    "its certificate allows. Make a new pair, then `chmod 600`"
                )
            context.load_verify_locations(self._directory / AUTHORITY)
            context.load_cert_chain(self._directory / CERTIFICATE, key, refuse_passphrase)
        except (OSError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"the certificate files in {self._directory} cannot be used: {error}"
            ) from error
        return context

    def _renew(self) -> None:
        """In a forked child: a thread of the parent may have had the lock."""
        self._lock = threading.Lock()

    def context(self) -> ssl.SSLContext:
        """Of the files as they are now, or the last ones that could be used."""
        with self._lock:
            try:
                seen = self._look()
                if seen != self._seen:
                    self._context = self._load()
                    self._seen = seen
                    _log.info("the certificate files in %s were read again", self._directory)
            except ConfigError as error:
                _log.warning("%s. The ones from before go on", error)
            return self._context

    def call(self, sock: socket.socket, host: str) -> socket.socket:
        """The caller's side of a connection; the other one must be that host. Raises OSError."""
        return self.context().wrap_socket(sock, server_hostname=host)

    def answer(self, sock: socket.socket) -> tuple[ssl.SSLSocket, Caller]:
        """The service's side, and who called. Raises OSError."""
        secured = self.context().wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        try:
            secured.do_handshake()
        except ssl.SSLError:
            _let_read(secured)
            raise
        except OSError:
            secured.close()
            raise
        return secured, caller_of(secured.getpeercert() or {})


def _let_read(refused: ssl.SSLSocket) -> None:
    """Close a connection so that the other side reads why it was refused: it has sent its first
    call by then, and where that is left unread, the end of the connection comes before the reason.
    """
    with socket.socket(fileno=refused.detach()) as plain, contextlib.suppress(OSError):
        plain.settimeout(_REFUSED_SECONDS)
        plain.shutdown(socket.SHUT_WR)
        for _ in range(_REFUSED_READS):
            if not plain.recv(_REFUSED_BYTES):
                return


def caller_of(certificate: Mapping[str, object]) -> Caller:
    """Who a verified certificate is for, as ssl describes it. A pure function but for the clock."""
    names: list[str] = []
    subject = certificate.get("subject")
    for group in subject if isinstance(subject, tuple) else ():
        names += [str(value) for kind, value in group if kind == "commonName"]
    others = certificate.get("subjectAltName")
    roles = tuple(
        str(value).removeprefix(ROLE_URI)
        for kind, value in (others if isinstance(others, tuple) else ())
        if kind == "URI" and str(value).startswith(ROLE_URI)
    )
    ends = ssl.cert_time_to_seconds(str(certificate["notAfter"]))
    return Caller(
        name="".join(names),
        roles=roles,
        until_seconds=time.monotonic() + ends - time.time(),
    )
