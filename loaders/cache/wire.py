"""Messages between the processes of a node that share a cache: a few numbers as JSON, and bytes.

Sockets are abstract: they have no file, and end with their processes. Both sides check that the
other runs as the same user.
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

from hpstore.codec.galois import Bytes
from hpstore.errors import ConfigError
from hpstore.loaders.layout import Int64s

_HEAD = struct.Struct("<III")  # bytes of the facts, bytes after them, descriptors
MOST_FDS = 8
MOST_BYTES = 1 << 31


@dataclass(slots=True)
class Message:
    """`facts`: a dict of plain values (Any: what JSON has). `raw`: uint8."""

    facts: dict[str, Any]
    raw: Bytes = field(default_factory=lambda: np.empty(0, np.uint8))
    fds: list[int] = field(default_factory=list)

    def numbers(self) -> Int64s:
        """The raw bytes as int64."""
        return self.raw.view(np.int64)


class Lost(Exception):
    """The other process is gone, or does not speak as it should."""


def address(name: str) -> bytes:
    """The abstract address of a cache's owner."""
    return b"\0" + f"hpstore-cache-{os.getuid()}-{name}".encode()


def check_peer(connection: socket.socket) -> None:
    """Raises Lost when another user is on the other side."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", raw)
    if uid != os.getuid():
        raise Lost(f"user {uid} is on the other side")


def send(
    connection: socket.socket, facts: dict[str, Any], parts: Sequence[Bytes] = (),
    fds: Sequence[int] = (),
) -> None:  # fmt: skip
    """Send one message. Raises Lost."""
    text = json.dumps(facts).encode()
    length = sum(part.nbytes for part in parts)
    if length >= MOST_BYTES:
        raise ConfigError(f"a message of {length} bytes is too long for a shared cache")
    try:
        head = _HEAD.pack(len(text), length, len(fds))
        # descriptors travel with the first byte
        sent = socket.send_fds(connection, [head], list(fds)) if fds else connection.send(head)
        connection.sendall(head[sent:] + text)
        for part in parts:
            connection.sendall(part.data)
    except OSError as error:
        raise Lost(str(error)) from error


def receive(connection: socket.socket) -> Message:
    """The next message. Raises Lost, also at the end of the connection."""
    fds: list[int] = []
    try:
        head, fds, _, _ = socket.recv_fds(connection, _HEAD.size, MOST_FDS)
        head += bytes(_exactly(connection, _HEAD.size - len(head)))
        facts_bytes, raw_bytes, fd_count = _HEAD.unpack(head)
        if raw_bytes >= MOST_BYTES or facts_bytes > 1 << 20 or fd_count != len(fds):
            raise Lost("a message that makes no sense")
        facts = json.loads(bytes(_exactly(connection, facts_bytes)))
        return Message(facts, _exactly(connection, raw_bytes), fds)
    except (OSError, ValueError, Lost) as error:
        for fd in fds:
            os.close(fd)
        raise Lost(str(error)) from error


def _exactly(connection: socket.socket, count: int) -> Bytes:
    data = np.empty(count, np.uint8)
    at = 0
    while at < count:
        got = connection.recv_into(data[at:].data)
        if not got:
            raise Lost("the connection ended")
        at += got
    return data


def as_bytes(numbers: Int64s) -> Bytes:
    """Numbers as a message's bytes."""
    return np.ascontiguousarray(numbers, np.int64).view(np.uint8)


__all__ = ["Lost", "Message", "address", "as_bytes", "check_peer", "receive", "send"]
