"""Every repetition of every contender in a process of its own, one at a time.

A fork server that has imported torch and nothing else starts them, so a session costs no import and
inherits no memory, threads or page tables of the one before. The process that asks holds the
ballast (ballast.py); a session asks it through its pipe for warm memory before each section.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from hpstore.benchmarks.harness.memory_ballast import MemoryBallast
from hpstore.errors import HpstoreError

_log = logging.getLogger(__name__)
SESSION_SECONDS = 600.0  # a session that is silent for so long has hung
# Any: what a session is told and what it found, picklable
Found = dict[str, Any]


class Sections:
    """A session's side of the pipe."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def warm(self, nbytes: int) -> None:
        """Before what is timed, and before what takes much memory: so many free bytes are warm.

        Lasts for some seconds. What the section before left is taken back first.
        """
        self._connection.send(("warm", nbytes))
        self._connection.recv()


Session = Callable[[Sections, Any], Found]


def _in_session(connection: Connection, session: Session, spec: object) -> None:
    """Runs in the new process. torch's warnings about how it is called are not for our user; what
    libraries print belongs beside the progress, not into the JSON.
    """
    os.dup2(2, 1)
    warnings.filterwarnings("ignore", module="torch")
    try:
        connection.send(("found", session(Sections(connection), spec)))
    except BaseException as error:  # noqa: BLE001 (raised again where it was asked for)
        connection.send(("failed", f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))


@contextmanager
def progress(total: int) -> Iterator[Progress]:
    """A bar over sessions, on standard error when that is a terminal."""
    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bar:
        bar.add_task("checkpoint", total=total)
        yield bar


class SessionFailed(HpstoreError):
    """A session of a benchmark raised or died; its traceback is in the message."""


class Sessions:
    """Starts sessions and serves their ballast. `preload`: a module that all of them import."""

    def __init__(
        self,
        ballast: MemoryBallast,
        *,
        preload: str = "hpstore.benchmarks.checkpoint.checkpoint_sessions",
        silent_seconds: float = SESSION_SECONDS,
    ) -> None:
        self._ballast, self._silent_seconds = ballast, silent_seconds
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([preload])

    def run(self, session: Session, spec: object) -> Found:
        """What a session found. Raises SessionFailed."""
        here, there = self._context.Pipe()
        process = self._context.Process(target=_in_session, args=(there, session, spec))
        began = time.perf_counter()
        process.start()
        there.close()
        try:
            return self._serve(here)
        finally:
            _log.debug("%s: %.1f s", session, time.perf_counter() - began)
            process.join(10.0)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
            here.close()
            self._ballast.hold(self._ballast.nbytes)  # what it freed is still warm

    def _serve(self, connection: Connection) -> Found:
        while True:
            if not connection.poll(self._silent_seconds):
                raise SessionFailed(f"a session was silent for {self._silent_seconds:.0f} s")
            try:
                kind, value = connection.recv()
            except EOFError as error:
                raise SessionFailed("a session died without a word: out of memory?") from error
            if kind == "found":
                found: Found = value
                return found
            if kind == "failed":
                raise SessionFailed(value)
            began = time.perf_counter()
            self._ballast.regain()
            self._ballast.hold(value)
            self._ballast.release(value)
            _log.debug("%d bytes warm after %.1f s", value, time.perf_counter() - began)
            connection.send(None)
