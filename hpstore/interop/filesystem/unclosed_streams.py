"""Write streams that are never closed: put when they are collected, or when the process ends.

A collector may run on any thread, in the midst of the pool's own work and while that holds a lock.
The put is therefore made by a thread of its own; who drops a stream waits for it, with a limit.
"""

from __future__ import annotations

import atexit
import io
import logging
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, BinaryIO, Protocol

from hpstore.interop.filesystem.write_buffer import Spool

_log = logging.getLogger(__name__)
WAIT_SECONDS = 30.0  # for a put that may need a lock which the dropping thread holds


class Closable(Protocol):
    """A stream whose bytes wait."""

    path: str

    @property
    def closed(self) -> bool: ...

    @property
    def unfinished(self) -> bool: ...

    def close(self) -> None: ...

    def discard(self) -> None: ...


_open: weakref.WeakSet[Any] = weakref.WeakSet()  # Any: Closable; a protocol has no weak references
_hooked = threading.Event()


def remember(stream: Closable) -> None:
    """It may still be open when the process ends. Called after its pool was opened, so that the
    hook runs before the one that closes pools."""
    _open.add(stream)
    if not _hooked.is_set():
        _hooked.set()
        atexit.register(_at_exit)


def _at_exit() -> None:
    """Close what is open; after an exception that ended the program nothing is stored. At a prompt,
    as in a notebook, an exception ends nothing, however long ago it was."""
    failed = getattr(sys, "last_value", None) is not None and not hasattr(sys, "ps1")
    # text first: it is written into the stream below
    for stream in sorted(_open, key=lambda one: not isinstance(one, io.TextIOBase)):
        if stream.closed or not stream.unfinished:
            continue
        if failed:
            _log.warning(
                "the stream to %s was never closed, and an exception ended the program: "
                "nothing was stored",
                stream.path,
            )
            stream.discard()
            continue
        _log.warning("the stream to %s was never closed: it is stored now", stream.path)
        try:
            stream.close()
        except Exception:  # noqa: BLE001 (logged)
            _log.exception("the stream to %s could not be stored", stream.path)


def put_aside(path: str, spool: Spool, put: Callable[[BinaryIO], object]) -> str:
    """Put the bytes of a stream that was dropped, on another thread; waits for it for a while.
    Returns what became of them, in words."""
    problems: list[Exception] = []

    def store() -> None:
        try:
            put(spool.file)
        except Exception as error:  # noqa: BLE001 (told below)
            problems.append(error)
            _log.warning("the stream to %s could not be stored: %s", path, error)
        finally:
            spool.close()

    thread = threading.Thread(target=store, name="hpstore-forgotten-stream")
    try:
        thread.start()
    except RuntimeError as error:  # the interpreter ends, or there are no more threads
        spool.close()
        return f"nothing was stored: {error}"
    thread.join(WAIT_SECONDS)
    if thread.is_alive():
        return "it is still being stored"
    if problems:
        return f"it could not be stored when it was collected: {problems[0]}"
    return "it was stored when it was collected"
