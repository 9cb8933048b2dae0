"""A process that has imported what ranks need, and forks them: transformers costs each 2 s.

It is forked from multiprocessing's server and belongs to the process that runs the tests, which
has one for each set of imports. Nothing that it imports may start a thread.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import NamedTuple


class Call(NamedTuple):
    """What a process is to do. It leaves by os._exit()."""

    function: Callable[..., None]
    args: tuple[object, ...]


class RankServer:
    """The end that tests talk to."""

    def __init__(self, imports: tuple[str, ...]) -> None:
        context = multiprocessing.get_context("forkserver")
        self._requests, theirs = context.Pipe()
        # not a daemon: ranks start processes of their own
        context.Process(target=_serve, args=(theirs, imports)).start()
        theirs.close()
        atexit.register(self.close)  # ahead of multiprocessing's, which joins

    def run(self, calls: Sequence[Call], seconds: float) -> list[int | None]:
        """Exit codes of a process for each call; None for one that was killed after `seconds`."""
        try:
            self._requests.send((calls, seconds))
            codes: list[int | None] = self._requests.recv()
        except BaseException:
            self.close()  # it kills its processes
            rank_server.cache_clear()
            raise
        return codes

    def close(self) -> None:
        """It ends when nobody can ask."""
        self._requests.close()


@functools.cache
def rank_server(imports: tuple[str, ...]) -> RankServer:
    """The server of this process with these imports."""
    return RankServer(imports)


def _serve(requests: Connection, imports: tuple[str, ...]) -> None:
    for name in imports:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    try:
        while True:
            calls, seconds = requests.recv()
            requests.send(_codes([_fork(requests, call) for call in calls], requests, seconds))
    except (EOFError, OSError):
        return


def _fork(requests: Connection, call: Call) -> int:
    pid = os.fork()
    if not pid:
        try:
            requests.close()
            call.function(*call.args)
        finally:
            os._exit(1)
    return pid


def _codes(pids: Sequence[int], requests: Connection, seconds: float) -> list[int | None]:
    """Wait for processes; those left are killed, at once when the tests are gone."""
    deadline = time.monotonic() + seconds
    codes: dict[int, int] = {}
    running = {os.pidfd_open(pid): pid for pid in pids}
    while running and time.monotonic() < deadline:
        ended = wait([*running, requests], deadline - time.monotonic())
        if requests in ended:
            break
        for descriptor in ended:
            assert isinstance(descriptor, int)
            pid = running.pop(descriptor)
            os.close(descriptor)
            codes[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    for descriptor, pid in running.items():
        os.close(descriptor)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return [codes.get(pid) for pid in pids]
