"""A loader's end of a keeper: connects, starts one where there is none, maps segments.

No call waits without a bound. Once the keeper does not answer, the session is over for good: its
loader goes on with what it has mapped, and with memory of its own.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hpstore.config import private_directory
from hpstore.errors import HpstoreError
from hpstore.node_memory.meeting_place import MOST_MESSAGE_BYTES, VERSION, connect
from hpstore.node_memory.segment_shape import ENTRY_BYTES, SegmentShape
from hpstore.runtime.closing import Closing
from hpstore.runtime.forks import call_in_children
from hpstore.runtime.local_messages import Lost, Message, as_bytes, receive, send

_log = logging.getLogger(__name__)
Int64s = npt.NDArray[np.int64]
START_SECONDS = 15.0  # for a keeper to start, on a node where all ranks do
_MOST_REASON = 300
_LOOK_SECONDS, _LAUNCH_SECONDS = 0.05, 10.0
_CODE = (  # the child of a child: init is its parent, and no process waits for it
    "import os, sys; os.fork() and os._exit(0); sys.path[:] = {path!r}; "
    "from hpstore.node_memory.keeper_process import main; main({directory!r})"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentUse:
    """A segment that a session uses. `table`: int64 (pages,), 0 or the slot + 1; it is changed by
    the keeper. `descriptor`: of the file; it is closed with this object."""

    number: int
    shape: SegmentShape
    descriptor: int
    table: Int64s


class KeeperSession(Closing):
    """The connection of one loader. Thread-safe; belongs to the process that made it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._connection: socket.socket | None = None
        self._end: weakref.finalize[..., Any] | None = None
        self._closed = threading.Event()
        self._pid = os.getpid()
        self.reason = "no keeper runs"  # why it is not used
        self.over = False
        self.taken_bytes = 0  # of all that was kept when it connected
        # one question and its answer at a time, for at most ANSWER_SECONDS each
        self._turn = threading.Lock()
        call_in_children(self._let_go)

    @property
    def connected(self) -> bool:
        """Whether a keeper answers."""
        return self._connection is not None

    def connect(self) -> bool:
        """Connect to the keeper that there is. Returns at once where there is none."""
        if self.over or self.connected:
            return self.connected
        try:
            made = connect(self._directory)
        except Lost:
            return False
        self._connection = made
        self._end = weakref.finalize(self, made.close)
        try:
            answer = self._ask({"op": "room"})
            if answer.facts.get("version") != VERSION:
                raise self._lose("the keeper is of another version of hpstore")
            self.taken_bytes = answer.count("taken")
        except Lost:
            return False
        return True

    def start(self) -> bool:
        """Connect; where no keeper runs, start one. For a thread that may wait: START_SECONDS."""
        if self.over or self.connect():
            return self.connected
        try:
            private_directory(self._directory)
            self._launch()
        except (OSError, subprocess.SubprocessError, HpstoreError) as error:
            self._lose(f"a keeper cannot be started: {error}")
            return False
        for _ in range(int(START_SECONDS / _LOOK_SECONDS)):
            if self.connect() or self.over or self._closed.wait(_LOOK_SECONDS):
                return self.connected
        self._lose(f"no keeper has answered within {START_SECONDS:.0f} s of its start")
        return False

    def _launch(self) -> None:
        path = [os.path.abspath(entry) for entry in sys.path if isinstance(entry, str)]
        code = _CODE.format(path=path, directory=os.path.abspath(self._directory))
        subprocess.run(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
            timeout=_LAUNCH_SECONDS,
            check=True,
        )

    # --- segments -----------------------------------------------------------------------------

    def attach(
        self,
        key: str,
        *,
        name: str,
        pool: str,
        shape: SegmentShape,
        bound_bytes: int,
        keep_seconds: float,
    ) -> SegmentUse | None:
        """The segment of a key; None where there is no room for it or no keeper: see `reason`."""
        facts = {
            "op": "attach",
            "key": key,
            "name": name,
            "pool": pool,
            "pages": shape.pages,
            "page_bytes": shape.page_bytes,
            "bound": bound_bytes,
            "keep_milliseconds": int(keep_seconds * 1000),
        }
        try:
            answer = self._ask(facts)
            if "refused" in answer.facts:
                self.reason = str(answer.facts["refused"])[:_MOST_REASON]
                _log.warning("pages are kept in this process's own memory: %s", self.reason)
                return None
            number = answer.count("segment")
        except Lost:
            return None
        try:
            made = _use(number, shape, answer.fds)
        except (OSError, ValueError, Lost) as error:
            self._lose(f"the keeper's memory cannot be mapped: {error}")
            return None
        return made

    def claim(self, use: SegmentUse, pages: Int64s) -> Int64s:
        """Slots for pages that this process is to read; -1 for those that another one reads, or
        has read. Raises Lost."""
        answer = self._ask({"op": "claim", "segment": use.number}, pages)
        slots = answer.numbers()
        if len(slots) != len(pages) or ((slots < -1) | (slots >= use.shape.slots)).any():
            raise self._lose("the keeper's answer makes no sense")
        return slots

    def publish(self, use: SegmentUse, pages: Int64s) -> None:
        """Pages that were claimed are complete and verified. Not waited for."""
        self._say({"op": "publish", "segment": use.number}, pages)

    def release(self, use: SegmentUse, pages: Int64s) -> None:
        """Pages that were claimed are not read; nothing writes there any more. Not waited for."""
        self._say({"op": "release", "segment": use.number}, pages)

    def ask(self, facts: dict[str, Any]) -> dict[str, Any]:
        """The answer to a question without bytes, for people. Raises Lost."""
        return self._ask(facts).facts

    # --- the connection -----------------------------------------------------------------------

    def _ask(self, facts: dict[str, Any], numbers: Int64s | None = None) -> Message:
        return self._exchange(facts, numbers, receive_answer)

    def _say(self, facts: dict[str, Any], numbers: Int64s) -> None:
        with contextlib.suppress(Lost):  # pages stay this process's own
            self._exchange(facts, numbers, lambda _: Message({}))

    def _exchange(
        self,
        facts: dict[str, Any],
        numbers: Int64s | None,
        hear: Callable[[socket.socket], Message],
    ) -> Message:
        with self._turn:
            connection = self._connection
            if connection is None or self._pid != os.getpid():
                raise Lost(self.reason)
            try:
                send(connection, facts, [] if numbers is None else [as_bytes(numbers)])
                return hear(connection)
            except Lost as error:
                raise self._lose(f"the keeper does not answer ({error})") from error

    def _lose(self, reason: str) -> Lost:
        """The session is over. Logged once."""
        if not self.over and not self._closed.is_set():
            _log.warning("%s: pages that are missing are kept in this process's own memory", reason)
        self.over, self.reason = True, reason
        self._hang_up()
        return Lost(reason)

    def _hang_up(self) -> None:
        self._connection = None
        if self._end is not None:
            self._end()

    def _let_go(self) -> None:
        """In a forked child: it closes its copy of the connection, or the keeper would take the
        parent for alive as long as the child lives."""
        self.over = True
        self.reason = "a forked process has memory of its own"
        self._hang_up()

    def hurry(self) -> None:
        """Do not wait any longer for a keeper to start. Idempotent."""
        if not self._closed.is_set():
            self._closed.set()

    def close(self) -> None:
        """Leave. What is mapped stays. Idempotent."""
        self.hurry()
        if not self.over:
            self.reason = "the loader was closed"
        self.over = True
        self._hang_up()


def receive_answer(connection: socket.socket) -> Message:
    """An answer of a keeper. Raises Lost."""
    return receive(connection, MOST_MESSAGE_BYTES)


def _use(number: int, shape: SegmentShape, descriptors: list[int]) -> SegmentUse:
    """What a keeper has sent, mapped. Raises OSError, ValueError, Lost."""
    if len(descriptors) != 1:
        for descriptor in descriptors:
            os.close(descriptor)
        raise Lost(f"{len(descriptors)} descriptors")
    descriptor = descriptors[0]
    try:
        os.set_inheritable(descriptor, False)
        if os.fstat(descriptor).st_size != shape.file_bytes:
            raise Lost("a file of another size")
        table = mmap.mmap(descriptor, shape.pages * ENTRY_BYTES, prot=mmap.PROT_READ)
    except BaseException:
        os.close(descriptor)
        raise
    made = np.frombuffer(table, np.int64)
    end = weakref.finalize(made, os.close, descriptor)
    end.atexit = False
    return SegmentUse(number=number, shape=shape, descriptor=descriptor, table=made)
