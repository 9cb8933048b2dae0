"""What processes of other hosts hold open here, and when they are taken to be gone.

A session is the connections of one process to this service. It ends with the last of them: the
kernel closes those of a process that dies, and its keep-alive those of a host that is gone, without
any clock of ours. A process that is stopped keeps its locks, as it does on a local disk.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from hpstore.errors import DeviceError, HpstoreError

_log = logging.getLogger(__name__)
_MOST_GIVEN_UP = 4096  # handles of a session that were given up before they were held: the newest


class UnknownHandle(DeviceError):
    """No such handle in this session."""


@dataclass(slots=True, eq=False)
class HeldFile:
    """An open file, a new one, or a range of registers, and how it is given up.

    `shared`: several threads may use it at once; else calls wait for each other.
    """

    item: object
    disk: int
    give_up: Callable[[], None]
    shared: bool = False
    users: int = 0
    over: bool = False
    turn: threading.Lock = field(default_factory=threading.Lock)


class CallerSession:
    """Handles of one process, by number."""

    def __init__(self) -> None:
        self.connections = 0
        self.until_seconds = -math.inf  # the last of its certificates ends then, monotonic
        self.handles: dict[str, HeldFile] = {}
        self.given_up: dict[str, None] = {}  # before they were held here: the call is under way


class CallerSessions:
    """All sessions of a service. Thread-safe."""

    def __init__(self, most_handles: int) -> None:
        self._most, self._count = most_handles, 0
        self._sessions: dict[tuple[str, str], CallerSession] = {}
        self._holders: dict[str, tuple[str, str]] = {}  # session of each handle
        self._lock = threading.Lock()  # guards all sessions, their handles, users and over

    def join(self, key: tuple[str, str], until_seconds: float = math.inf) -> None:
        """A connection belongs to a session from now on: of a peer, by the name it has there.
        `until_seconds`: when its certificate ends, by the monotonic clock."""
        with self._lock:
            session = self._sessions.setdefault(key, CallerSession())
            session.connections += 1
            session.until_seconds = max(session.until_seconds, until_seconds)

    def leave(self, key: tuple[str, str]) -> None:
        """A connection has ended; with the last one goes all that the session holds."""
        with self._lock:
            session = self._sessions[key]
            session.connections -= 1
            if session.connections:
                return
            del self._sessions[key]
            left = list(session.handles.values())
            self._count -= len(left)
            for handle in session.handles:
                del self._holders[handle]
        for held in left:
            self._end(held)

    def holds(self, key: tuple[str, str]) -> bool:
        """Whether a session holds anything."""
        with self._lock:
            return bool(self._sessions[key].handles)

    def keep(self, key: tuple[str, str], handle: str, held: HeldFile) -> None:
        """Hold something for a session, under a handle that the caller has drawn: so it can give up
        what it never had an answer about.

        Raises DeviceError where there are too many, or the handle is there or given up; what should
        be held is given up then.
        """
        with self._lock:
            handles, given_up = self._sessions[key].handles, self._sessions[key].given_up
            known = handle in self._holders or handle in given_up
            room = self._count < self._most
            if room and not known:
                self._count += 1
                handles[handle], self._holders[handle] = held, key
                return
        self._end(held)
        if known:
            raise DeviceError("the handle is in use, or was given up")
        raise DeviceError(
            f"{self._most} files are open here for other hosts, which is the limit of this "
            "service: close some, or raise --handles"
        )

    @contextlib.contextmanager
    def use(self, key: tuple[str, str], handle: str, disk: int) -> Iterator[object]:
        """What a handle stands for, which is not given up inside. Raises UnknownHandle."""
        with self._lock:
            session = self._sessions.get(key)  # gone, where a handle alone was shown
            held = None if session is None else session.handles.get(handle)
            if held is None or held.disk != disk:
                raise UnknownHandle(
                    "no such handle: the service was restarted, or had lost the process it was for"
                )
            held.users += 1
        try:
            with contextlib.nullcontext() if held.shared else held.turn:
                yield held.item
        finally:
            with self._lock:
                held.users -= 1
                last = held.over and not held.users
            if last:
                self._let_go(held)

    def holder(self, handle: str, disk: int) -> tuple[str, str]:
        """The session that holds a handle of a disk, for a caller who shows no more than that.
        Raises UnknownHandle."""
        with self._lock:
            key = self._holders.get(handle)
            if key is None or self._sessions[key].handles[handle].disk != disk:
                raise UnknownHandle("no such handle is open here")
            if time.monotonic() > self._sessions[key].until_seconds:
                raise UnknownHandle("the certificate of who opened this handle has ended")
            return key

    def drop(self, key: tuple[str, str], handle: str) -> None:
        """Give a handle up; an unknown one is fine, and is not held later."""
        with self._lock:
            session = self._sessions[key]
            held = session.handles.pop(handle, None)
            if held is None:
                session.given_up[handle] = None
                if len(session.given_up) > _MOST_GIVEN_UP:
                    del session.given_up[next(iter(session.given_up))]
                return
            self._count -= 1
            del self._holders[handle]
        self._end(held)

    def _end(self, held: HeldFile) -> None:
        """Give it up now, or when the last call that uses it returns."""
        with self._lock:
            held.over = True
            busy = held.users > 0
        if not busy:
            self._let_go(held)

    def _let_go(self, held: HeldFile) -> None:
        try:
            held.give_up()
        except (HpstoreError, OSError) as error:
            _log.info("what a session held was not given up in order: %s", error)
