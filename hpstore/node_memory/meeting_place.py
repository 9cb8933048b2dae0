"""Where loaders meet the keeper of a user: a socket in a directory of this user alone."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hpstore.config import Settings
from hpstore.runtime.local_messages import Lost, check_peer

SOCKET, LOCK, LOG = "keeper.sock", "keeper.lock", "keeper.log"
VERSION = 1  # of the messages and of the layout of segments
ANSWER_SECONDS = 1.0  # a keeper that takes longer is done without
MOST_MESSAGE_BYTES = 1 << 20


def keeper_directory(settings: Settings) -> Path:
    """Of the keeper for pools with these settings."""
    return settings.run_path("memory")


@contextmanager
def socket_path(directory: Path) -> Iterator[str]:
    """A short path of the socket: a longer one than 107 bytes has no address."""
    opened = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{opened}/{SOCKET}"
    finally:
        os.close(opened)


def connect(directory: Path) -> socket.socket:
    """A connection to the keeper, of this user. Raises Lost when there is none."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    made.settimeout(ANSWER_SECONDS)
    try:
        with socket_path(directory) as path:
            made.connect(path)
        check_peer(made)
    except (OSError, Lost) as error:
        made.close()
        raise Lost(f"no keeper answers in {directory}: {error}") from error
    return made
