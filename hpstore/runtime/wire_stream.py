"""A socket of HTTP/1.1 messages: heads are collected, bodies go between socket and memory."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import struct
import time
from collections.abc import Sequence

from hpstore.errors import IntegrityError
from hpstore.runtime.http_heads import END, MOST_HEAD_BYTES

_TIMEVAL = struct.Struct("ll")
_FIRST_BYTES = 16384


class Idle(TimeoutError):
    """No message began in time."""


class WireStream:
    """One connection. One thread at a time; raises OSError, of which TimeoutError for silence.

    Plain sockets block with the kernel's own limits of time, so that a body is one system call;
    those of TLS have Python's, which TLS needs.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._tls = sock, isinstance(sock, ssl.SSLSocket)
        self._ahead = bytearray()  # received, and not asked for yet
        self._seconds = -1.0
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_alive(sock)

    @property
    def certificate(self) -> object:
        """What ssl says of the other side's certificate; None without TLS."""
        return self._sock.getpeercert() if isinstance(self._sock, ssl.SSLSocket) else None

    def limit(self, seconds: float) -> None:
        """How long each further call may wait for the other side."""
        seconds = max(seconds, 0.001)
        if seconds == self._seconds:
            return
        self._seconds = seconds
        if self._tls:
            self._sock.settimeout(seconds)
            return
        whole = int(seconds)
        value = _TIMEVAL.pack(whole, int((seconds - whole) * 1e6))
        self._sock.settimeout(None)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)

    def head(self, idle_seconds: float, head_seconds: float) -> bytes | None:
        """The next head; None when the other side has closed between two messages.

        Waits `idle_seconds` for its first byte, and `head_seconds` from there on in all. Raises
        IntegrityError for one that is too long, Idle, or another
        TimeoutError.
        """
        if not self._ahead:
            self.limit(idle_seconds)
            try:
                if not self._more():
                    return None
            except TimeoutError as error:
                raise Idle("no message began") from error
        until = 0.0
        while (end := self._ahead.find(END)) < 0:
            if len(self._ahead) > MOST_HEAD_BYTES:
                raise IntegrityError(f"a head is longer than {MOST_HEAD_BYTES} bytes")
            until = until or time.monotonic() + head_seconds
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError("a head does not end")
            self.limit(left)
            if not self._more():
                raise ConnectionResetError("closed within a head")
        head = bytes(self._ahead[: end + len(END)])
        del self._ahead[: end + len(END)]
        return head

    def _more(self) -> bool:
        try:
            data = self._sock.recv(_FIRST_BYTES)
        except BlockingIOError as error:  # SO_RCVTIMEO
            raise TimeoutError("nothing was received") from error
        self._ahead += data
        return bool(data)

    def fill(self, target: memoryview) -> None:
        """Receive so many bytes. Raises ConnectionResetError when the other side ends before."""
        done = min(len(target), len(self._ahead))
        target[:done] = self._ahead[:done]
        del self._ahead[:done]
        flags = 0 if self._tls else socket.MSG_WAITALL
        until = time.monotonic() + self._seconds
        while done < len(target):
            try:
                count = self._sock.recv_into(target[done:], 0, flags)
            except BlockingIOError as error:
                raise TimeoutError("the rest of a body was not received") from error
            if not count:
                raise ConnectionResetError("closed within a body")
            done += count
            if done < len(target) and time.monotonic() > until:
                raise TimeoutError("the rest of a body was not received")

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        """Send all parts back to back."""
        if self._tls:
            for part in parts:
                self._sock.sendall(part)
            return
        views = [memoryview(part) for part in parts if len(part)]
        until = time.monotonic() + self._seconds
        while views:
            try:
                sent = self._sock.sendmsg(views[:64])
            except BlockingIOError as error:
                raise TimeoutError("what was sent is not taken") from error
            while views and sent >= len(views[0]):
                sent -= len(views.pop(0))
            if sent:
                views[0] = views[0][sent:]
            if views and time.monotonic() > until:
                raise TimeoutError("what was sent is not taken")

    def silent(self) -> bool:
        """Whether nothing came between two messages, not even the end of the connection."""
        if self._ahead:
            return False
        if isinstance(self._sock, ssl.SSLSocket) and self._sock.pending():
            return False
        poll = select.poll()  # not select(), which cannot watch descriptors above 1,024
        poll.register(self._sock, select.POLLIN)
        return not poll.poll(0)

    def hang_up(self) -> None:
        """Wake a thread that waits in here; it closes. Any thread."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Idempotent."""
        with contextlib.suppress(OSError):
            self._sock.close()


def keep_alive(sock: socket.socket) -> None:
    """Have the kernel notice within half a minute that the other host is gone."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        (socket.TCP_KEEPIDLE, 10),
        (socket.TCP_KEEPINTVL, 5),
        (socket.TCP_KEEPCNT, 4),
    ):
        sock.setsockopt(socket.IPPROTO_TCP, name, value)
