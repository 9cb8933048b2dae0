"""The keeper's process: answers loaders until nothing is kept. It imports neither torch nor pools.

A loader that is killed is a connection that ends. A message that makes no sense ends the one
connection that it came over.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import selectors
import signal
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpstore.config import private_directory
from hpstore.node_memory.keeper import Keeper, Refused
from hpstore.node_memory.meeting_place import (
    ANSWER_SECONDS,
    LOCK,
    LOG,
    MOST_MESSAGE_BYTES,
    SOCKET,
    VERSION,
    socket_path,
)
from hpstore.node_memory.segment_shape import SegmentShape
from hpstore.runtime.local_messages import Lost, Message, as_bytes, check_peer, receive, send

_log = logging.getLogger(__name__)
MOST_SESSIONS = 256
TICK_SECONDS = 1.0
LINGER_SECONDS = 10.0  # without anything to keep
_LOCK_TRIES, _LOCK_SECONDS = 20, 0.1
_MOST_TEXT = 4096
_MOST_KEEP_SECONDS = 30 * 86400.0


class KeeperServer:
    """A keeper and the connections of loaders, on one thread."""

    def __init__(self, listener: socket.socket, keeper: Keeper, clock: Callable[[], float]) -> None:
        self._listener, self.keeper, self._clock = listener, keeper, clock
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._sessions: dict[socket.socket, int] = {}
        self._next = 0
        self._busy = clock()
        self._answers: dict[str, Callable[[socket.socket, int, Message], None]] = {
            "room": self._room,
            "attach": self._attach,
            "claim": self._claim,
            "publish": self._publish,
            "release": self._release,
            "list": self._list,
            "free": self._free,
        }

    def run(self, reachable: Callable[[], bool]) -> None:
        """Serve until nothing has been kept for a while, or no loader can find this keeper."""
        ticked = self._clock()
        while True:
            for key, _ in self._selector.select(TICK_SECONDS):
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    assert isinstance(key.fileobj, socket.socket)
                    self._serve(key.fileobj)
            now = self._clock()
            if now - ticked >= TICK_SECONDS:
                ticked = now
                self.keeper.tick()
                if self._sessions or not self.keeper.empty:
                    self._busy = now
                if now - self._busy >= LINGER_SECONDS:
                    return
                if not self._sessions and not reachable():
                    return

    def _accept(self) -> None:
        with contextlib.suppress(OSError, Lost):
            connection, _ = self._listener.accept()
            try:
                check_peer(connection)
                if len(self._sessions) >= MOST_SESSIONS:
                    raise Lost("too many")
            except Lost:
                connection.close()
                return
            connection.settimeout(ANSWER_SECONDS)
            self._next += 1
            self._sessions[connection] = self._next
            self._selector.register(connection, selectors.EVENT_READ)

    def _serve(self, connection: socket.socket) -> None:
        """One message."""
        session = self._sessions[connection]
        try:
            message = receive(connection, MOST_MESSAGE_BYTES)
            for descriptor in message.fds:
                os.close(descriptor)
            answer = self._answers.get(str(message.facts.get("op")))
            if answer is None:
                raise Lost("an unknown message")
            try:
                answer(connection, session, message)
            except Refused as error:
                send(connection, {"refused": str(error)})
        except Lost:
            self._end(connection)
        except Exception:  # noqa: BLE001 (one process must not end what others keep)
            _log.exception("a process is cut off")
            self._end(connection)

    def _end(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        connection.close()
        self.keeper.leave(self._sessions.pop(connection))
        self._busy = self._clock()

    # --- messages -----------------------------------------------------------------------------

    def _room(self, connection: socket.socket, _: int, __: Message) -> None:
        send(connection, {"version": VERSION, "taken": self.keeper.taken_bytes()})

    def _attach(self, connection: socket.socket, session: int, message: Message) -> None:
        shape = SegmentShape(pages=message.count("pages"), page_bytes=message.count("page_bytes"))
        if not shape.is_sane():
            raise Refused("there can be no such segment")
        keep = message.count("keep_milliseconds") / 1000
        segment = self.keeper.attach(
            session,
            _process(connection),
            key=_text(message, "key"),
            name=_text(message, "name"),
            pool=_text(message, "pool"),
            shape=shape,
            bound_bytes=message.count("bound"),
            keep_seconds=min(keep, _MOST_KEEP_SECONDS),
        )
        send(connection, {"segment": segment.number}, fds=[segment.descriptor])

    def _claim(self, connection: socket.socket, session: int, message: Message) -> None:
        slots = self.keeper.claim(session, message.count("segment"), message.numbers())
        send(connection, {}, [as_bytes(slots)])

    def _publish(self, _: socket.socket, session: int, message: Message) -> None:
        """Without an answer: the reader of a page does not wait for it."""
        with contextlib.suppress(Refused):
            self.keeper.publish(session, message.count("segment"), message.numbers())

    def _release(self, _: socket.socket, session: int, message: Message) -> None:
        """Without an answer, too."""
        with contextlib.suppress(Refused):
            self.keeper.release(session, message.count("segment"), message.numbers())

    def _list(self, connection: socket.socket, _: int, __: Message) -> None:
        send(connection, {"process": os.getpid(), "datasets": self.keeper.listing()})

    def _free(self, connection: socket.socket, _: int, message: Message) -> None:
        name = None if message.facts.get("all") is True else _text(message, "name")
        freed, later = self.keeper.free(name)
        send(connection, {"freed": freed, "later": later})


def _text(message: Message, name: str) -> str:
    found = message.facts.get(name)
    if not isinstance(found, str) or len(found) > _MOST_TEXT:
        raise Lost(f"a message without {name}")
    return found


def _process(connection: socket.socket) -> int:
    # Any: what struct makes of three ints
    found: tuple[Any, ...] = struct.unpack(
        "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    )
    return int(found[0])


def serve(place: Path, keeper: Keeper, wanted: Callable[[], bool] = lambda: True) -> None:
    """Be the keeper that loaders find in a directory: until nothing is kept, or another one is
    there, or it is not `wanted`, and no process uses it."""
    with contextlib.suppress(FileNotFoundError):
        (place / SOCKET).unlink()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as listener:
        with socket_path(place) as path:
            listener.bind(path)
        listener.listen(MOST_SESSIONS)
        ours = os.stat(place / SOCKET).st_ino

        def reachable() -> bool:
            try:
                return wanted() and os.stat(place / SOCKET).st_ino == ours
            except OSError:
                return False

        KeeperServer(listener, keeper, time.monotonic).run(reachable)
        if reachable():
            with contextlib.suppress(OSError):
                (place / SOCKET).unlink()


def main(directory: str) -> None:
    """Be the keeper of a directory until nothing is kept; return at once where there is one.

    SIGTERM ends it, and with it what no process has mapped.
    """
    place = private_directory(Path(directory))
    os.umask(0o077)
    for ignored in (signal.SIGINT, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    lock = os.open(place / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if not _locked(lock):
        return
    logging.basicConfig(
        filename=place / LOG, filemode="w", level=logging.INFO, format="%(asctime)s %(message)s"
    )
    _log.info("process %d keeps the memory of user %d", os.getpid(), os.getuid())
    serve(place, Keeper(time.monotonic))


def _locked(lock: int) -> bool:
    """Whether this process is the keeper; one that ends at this moment is waited for."""
    for _ in range(_LOCK_TRIES):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            time.sleep(_LOCK_SECONDS)
        else:
            return True
    return False
