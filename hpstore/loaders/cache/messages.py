"""Addresses of the caches that processes of a node share.

Sockets are abstract: they have no file, and end with their processes. Both sides check that the
other runs as the same user.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket

from hpstore.errors import ConfigError
from hpstore.runtime.clock import Clock
from hpstore.runtime.local_messages import Lost, Stranger, check_peer

_log = logging.getLogger(__name__)
TURNS = 16
ANSWER_SECONDS = 25.0  # of an owner: it waits for turns, and for what others fetch, for less
_TRIES, _TRY_SECONDS = 25, 0.02


def address(name: str, turn: int = 0) -> bytes:
    """The abstract address of a cache's owner: the first; the others are for when another user has
    taken those before."""
    return b"\0" + f"hpstore-cache-{os.getuid()}-{name}{f'-{turn}' if turn else ''}".encode()


def connect(name: str) -> socket.socket:
    """A connection to the owner of a cache, of this user. Raises Lost when there is none."""
    problems = []
    for turn in range(TURNS):
        try:
            return _connected(name, turn)
        except Lost as error:
            problems.append(str(error))
    raise Lost("; ".join(dict.fromkeys(problems)))


def _connected(name: str, turn: int) -> socket.socket:
    """A connection to one address, which waits for no answer longer than ANSWER_SECONDS: the owner
    may have been stopped. Raises Stranger, Lost."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    made.settimeout(ANSWER_SECONDS)
    try:
        made.connect(address(name, turn))
        check_peer(made)
    except Lost:
        made.close()
        raise
    except OSError as error:
        made.close()
        raise Lost(str(error)) from error
    return made


def listen(name: str, most_connections: int, clock: Clock) -> socket.socket | None:
    """Become the owner of the name; None when a process of this user is. Addresses that another
    user has taken are passed over. Raises ConfigError when all are taken."""
    with contextlib.suppress(Lost):
        connect(name).close()
        return None
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    for turn in range(TURNS):
        try:
            made.bind(address(name, turn))
        except OSError:
            if _is_ours(name, turn, clock):
                made.close()
                return None
            _log.warning(
                "another user has taken an address of the shared cache %r: passed over", name
            )
        else:
            made.listen(most_connections)
            return made
    made.close()
    raise ConfigError(
        f"another user has taken all {TURNS} addresses of the shared cache {name!r}: give share= "
        "another name. Nothing was reserved"
    )


def _is_ours(name: str, turn: int, clock: Clock) -> bool:
    """Whether who has taken an address is of this user; it may have taken it this moment, and not
    listen yet."""
    for _ in range(_TRIES):
        try:
            _connected(name, turn).close()
        except Stranger:
            return False
        except Lost:
            clock.wait(_TRY_SECONDS)
        else:
            return True
    return False
