"""Answers of HTTP that end by a deadline as a whole: a socket's own timeout begins again with every
byte that comes."""

from __future__ import annotations

import http.client
import io
import socket
import time
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


class _Timely(io.RawIOBase):
    """What a socket receives, until a time. Closing it closes `received`."""

    def __init__(self, sock: socket.socket, received: io.RawIOBase, until: float) -> None:
        self._sock, self._received, self._until = sock, received, until

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int | None:
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError("its answer did not end in time")
        self._sock.settimeout(left)
        return self._received.readinto(buffer)

    def close(self) -> None:
        if not self.closed:
            self._received.close()
        super().close()


class _Answer(http.client.HTTPResponse):
    def __init__(self, sock: socket.socket, *given: object, until: float, **named: object) -> None:
        super().__init__(sock, *given, **named)  # type: ignore[arg-type]
        self.fp.close()
        received = sock.makefile("rb", buffering=0)
        self.fp = io.BufferedReader(_Timely(sock, received, until))


def end_by(connection: http.client.HTTPConnection, until: float) -> None:
    """Have the next answer of a connection end by a time, head and body.

    What is read behind it raises TimeoutError, at once or from the wait for a byte.

    Parameters
    ----------
    connection
        Of which one answer at a time is read.
    until
        As time.monotonic() counts.
    """
    connection.response_class = partial(_Answer, until=until)  # type: ignore[assignment]
