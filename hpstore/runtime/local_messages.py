"""Messages between processes of one user on a node: a few numbers as JSON, bytes, descriptors.

Both sides check that the other runs as the same user. What comes is bounded before memory is taken
for it, and a message that makes no sense ends the connection.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from hpstore.codec.galois import Bytes
from hpstore.errors import ConfigError
from hpstore.format.untrusted_bytes import MOST

Int64s = npt.NDArray[np.int64]
_HEAD = struct.Struct("<III")  # bytes of the facts, bytes after them, descriptors
MOST_FDS = 8
MOST_BYTES = 1 << 31
_FIRST_BYTES = 32 << 20


@dataclass(slots=True)
class Message:
    """`facts`: a dict of plain values (Any: what JSON has). `raw`: uint8."""

    facts: dict[str, Any]
    raw: Bytes = field(default_factory=lambda: np.empty(0, np.uint8))
    fds: list[int] = field(default_factory=list)

    def numbers(self) -> Int64s:
        """The raw bytes as int64. Raises Lost."""
        if self.raw.size % 8:
            raise Lost(f"{self.raw.size} bytes are not numbers")
        return self.raw.view(np.int64)

    def count(self, name: str) -> int:
        """A fact that is a whole number, not negative. Raises Lost."""
        found = self.facts.get(name)
        if type(found) is not int or not 0 <= found <= MOST:
            raise Lost(f"a message whose {name} is {str(found)[:40]}")
        return found


class Lost(Exception):
    """The other process is gone, or does not speak as it should."""


class Stranger(Lost):
    """A process of another user is on the other side."""


def check_peer(connection: socket.socket) -> None:
    """Raises Stranger when another user is on the other side."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", raw)
    if uid != os.getuid():
        raise Stranger(f"user {uid} is on the other side")


def send(
    connection: socket.socket,
    facts: dict[str, Any],
    parts: Sequence[Bytes] = (),
    fds: Sequence[int] = (),
) -> None:
    """Send one message. Raises Lost."""
    text = json.dumps(facts).encode()
    length = sum(part.nbytes for part in parts)
    if length >= MOST_BYTES:
        raise ConfigError(f"a message of {length} bytes is too long for one")
    try:
        head = _HEAD.pack(len(text), length, len(fds))
        # descriptors travel with the first byte
        sent = socket.send_fds(connection, [head], list(fds)) if fds else connection.send(head)
        connection.sendall(head[sent:] + text)
        for part in parts:
            connection.sendall(part.data)
    except OSError as error:
        raise Lost(str(error)) from error


def receive(connection: socket.socket, most_bytes: int = MOST_BYTES) -> Message:
    """The next message, of fewer than `most_bytes`. Raises Lost, also when the connection ends."""
    fds: list[int] = []
    try:
        head, fds, _, _ = socket.recv_fds(connection, _HEAD.size, MOST_FDS)
        head += bytes(_exactly(connection, _HEAD.size - len(head)))
        facts_bytes, raw_bytes, fd_count = _HEAD.unpack(head)
        if raw_bytes >= most_bytes or facts_bytes > 1 << 20 or fd_count != len(fds):
            raise Lost("a message that makes no sense")
        facts = json.loads(bytes(_exactly(connection, facts_bytes)))
        if not isinstance(facts, dict):
            raise Lost("a message that makes no sense")
        return Message(facts, _exactly(connection, raw_bytes), fds)
    except (OSError, ValueError, RecursionError, Lost) as error:
        for fd in fds:
            os.close(fd)
        raise Lost(str(error)) from error


def _exactly(connection: socket.socket, count: int) -> Bytes:
    """So many bytes. Memory is taken as they come: a length alone takes little."""
    data, at = np.empty(min(count, _FIRST_BYTES), np.uint8), 0
    while at < count:
        if at == len(data):
            more = np.empty(min(count, 2 * at), np.uint8)
            more[:at] = data
            data = more
        got = connection.recv_into(data[at:].data)
        if not got:
            raise Lost("the connection ended")
        at += got
    return data


def as_bytes(numbers: Int64s) -> Bytes:
    """Numbers as a message's bytes."""
    return np.ascontiguousarray(numbers, np.int64).view(np.uint8)
