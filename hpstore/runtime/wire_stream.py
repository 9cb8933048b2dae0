"""A socket of HTTP/1.1 messages: heads are collected, bodies go between socket and memory."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import select
import socket
import ssl
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from hpstore.errors import IntegrityError
from hpstore.runtime.http_heads import END, MOST_HEAD_BYTES
from hpstore.units import KIB

_TIMEVAL = struct.Struct("ll")
_FIRST_BYTES = 16384
_MOST_COLLECTED_BYTES = 256 * KIB  # of a message that is received without waiting
_WAKE_BYTES = 256 * KIB  # of a large body: its receiver is not woken for less
_LENGTH = re.compile(rb"\r\ncontent-length: *([0-9]{1,15})\r\n", re.IGNORECASE)


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
        self._receives, self._sends = -1.0, -1.0  # seconds, as the kernel has them
        self._wakes_at = 1  # bytes
        if not self._tls:
            sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_alive(sock)

    @property
    def certificate(self) -> object:
        """What ssl says of the other side's certificate; None without TLS."""
        return self._sock.getpeercert() if isinstance(self._sock, ssl.SSLSocket) else None

    def fileno(self) -> int:
        """Of the socket."""
        return self._sock.fileno()

    def limit(self, seconds: float) -> None:
        """How long each further call may wait for the other side."""
        seconds = max(seconds, 0.001)
        if seconds != self._seconds and self._tls:
            self._sock.settimeout(seconds)
        self._seconds = seconds

    def _limit_receiving(self) -> None:
        """Before a plain socket receives. Requests and answers that are small take turns with two
        limits, so the kernel keeps both, and neither is set again."""
        if not self._tls and self._receives != self._seconds:
            self._receives = self._seconds
            self._set_limit(socket.SO_RCVTIMEO)

    def _limit_sending(self) -> None:
        """The same before it sends."""
        if self._sends != self._seconds:
            self._sends = self._seconds
            self._set_limit(socket.SO_SNDTIMEO)

    def _set_limit(self, option: int) -> None:
        whole = int(self._seconds)
        value = _TIMEVAL.pack(whole, int((self._seconds - whole) * 1e6))
        self._sock.setsockopt(socket.SOL_SOCKET, option, value)

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

    def arrived(self) -> bool | None:
        """Receive what has come, without waiting. True when head() and fill() of all of a body
        would not wait: a message is there whole, or nothing more comes. None for a message that is
        too large to be collected so, or may be."""
        while not (whole := self._is_whole()):
            if whole is None or len(self._ahead) > _MOST_COLLECTED_BYTES:
                return None
            try:
                data = self._receive_now()
            except (BlockingIOError, ssl.SSLWantReadError):
                return False
            except OSError:
                return True  # receiving says what it is
            if not data:
                return True
            self._ahead += data
        return True

    def _receive_now(self) -> bytes:
        if not self._tls:
            return self._sock.recv(_FIRST_BYTES, socket.MSG_DONTWAIT)
        self._sock.settimeout(0.0)
        try:
            return self._sock.recv(_FIRST_BYTES)
        finally:
            self._sock.settimeout(self._seconds)

    def _is_whole(self) -> bool | None:
        """None for a head that does not say how long its body is, in a form that is known here."""
        end = self._ahead.find(END)
        if end < 0:
            return False
        length = _LENGTH.search(self._ahead, 0, end + len(END))
        return None if length is None else len(self._ahead) >= end + len(END) + int(length[1])

    def _more(self) -> bool:
        self._limit_receiving()
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
        if done == len(target):
            return
        self._limit_receiving()
        until = time.monotonic() + self._seconds
        last = max(done, len(target) - _WAKE_BYTES)  # from there on what comes is less than that
        if last > done and not self._tls:
            self._wake_at(_WAKE_BYTES)
            self._receive(target[done:last], until)
            done = last
        self._receive(target[done:], until)

    def _receive(self, target: memoryview, until: float) -> None:
        done, flags = 0, 0 if self._tls else socket.MSG_WAITALL
        try:
            while done < len(target):
                count = self._sock.recv_into(target[done:], 0, flags)
                if not count:
                    raise ConnectionResetError("closed within a body")
                done += count
                if done < len(target) and time.monotonic() > until:
                    raise TimeoutError("the rest of a body was not received")
        except BlockingIOError as error:
            raise TimeoutError("the rest of a body was not received") from error
        finally:
            self._wake_at(1)

    def _wake_at(self, nbytes: int) -> None:
        """Have the kernel wake the receiver for no fewer bytes; 1 but for large bodies."""
        if self._wakes_at != nbytes:
            self._wakes_at = nbytes
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        """Send all parts back to back."""
        if self._tls:
            for part in parts:
                self._sock.sendall(part)
            return
        self._limit_sending()
        try:
            self._send_all(parts, 0)
        except BlockingIOError as error:
            raise TimeoutError("what was sent is not taken") from error

    def send_now(self, parts: Sequence[bytes | memoryview]) -> None:
        """The same without waiting. Raises OSError where the kernel does not take all of it; the
        other side has no whole message then."""
        if not self._tls:
            self._send_all(parts, socket.MSG_DONTWAIT)
            return
        self._sock.settimeout(0.0)
        try:
            for part in parts:
                self._sock.sendall(part)
        finally:
            self._sock.settimeout(self._seconds)

    def _send_all(self, parts: Sequence[bytes | memoryview], flags: int) -> None:
        views = [memoryview(part) for part in parts if len(part)]
        until = time.monotonic() + self._seconds
        while views:
            sent = self._sock.sendmsg(views[:64], [], flags)
            while views and sent >= len(views[0]):
                sent -= len(views.pop(0))
            if sent:
                views[0] = views[0][sent:]
            if views and time.monotonic() > until:
                raise TimeoutError("what was sent is not taken")

    @property
    def sends_files(self) -> bool:
        """Whether send_file() can be used."""
        return not self._tls

    def send_file(
        self,
        head: bytes,
        file: int,
        offset: int,
        nbytes: int,
        turn: Callable[[], AbstractContextManager[object]],
        *,
        piece_bytes: int,
    ) -> None:
        """Send a head and bytes of a file out of the page cache, which are copied nowhere.

        The file is read within `turn()`, the other side is waited for outside of it: as long as
        limit() says for each `piece_bytes`. Raises OSError in the middle of a message, also where
        the file cannot be read or ends early.
        """
        self._limit_sending()
        done, began = 0, time.monotonic()
        self._sock.sendall(head, socket.MSG_MORE)
        self._sock.setblocking(False)
        try:
            while done < nbytes:
                with turn():
                    count = self._pages_taken(file, offset + done, nbytes - done)
                if count == 0:
                    raise OSError(errno.EIO, "a file ends before its size")
                if count is None:
                    self._wait_for_room(began + self._seconds * (1 + done // piece_bytes))
                done += count or 0
        finally:
            self._sock.setblocking(True)

    def _pages_taken(self, file: int, offset: int, nbytes: int) -> int | None:
        """How much of a file the kernel has taken to be sent; None where it has no room."""
        try:
            return os.sendfile(self._sock.fileno(), file, offset, nbytes)
        except BlockingIOError:
            return None

    def _wait_for_room(self, until: float) -> None:
        poll = select.poll()
        poll.register(self._sock, select.POLLOUT)
        if not poll.poll(1000 * max(0.0, until - time.monotonic())):
            raise TimeoutError("what was sent is not taken")

    def silent(self) -> bool:
        """Whether nothing came between two messages, not even the end of the connection."""
        if self._ahead or self._sock.fileno() < 0:  # closed here
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
    """Have the kernel notice within half a minute that the other host is gone. By the last of these
    where an answer is under way to it: probes are not sent then."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        (socket.TCP_KEEPIDLE, 10),
        (socket.TCP_KEEPINTVL, 5),
        (socket.TCP_KEEPCNT, 4),
        (socket.TCP_USER_TIMEOUT, 30_000),  # ms
    ):
        sock.setsockopt(socket.IPPROTO_TCP, name, value)
