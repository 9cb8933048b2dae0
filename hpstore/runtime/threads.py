"""Threads of a process that may be refused more: a container's pids.max, `ulimit -u`, memory.

Work that only goes faster on threads goes on with those that there are, or on the caller's; what
cannot be done without one raises ThreadsExhausted before it has begun.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, ParamSpec, TypeVar

from hpstore.errors import ThreadsExhausted

T = TypeVar("T")
P = ParamSpec("P")

_log = logging.getLogger(__name__)
_REFUSED = "can't start new thread"  # of CPython; RuntimeError has no other mark
_refusals = itertools.count(1)  # next() is atomic
_refused = [0]


def exhausted_hint() -> str:
    """What it means and what to do."""
    return (
        f"This process has {threading.active_count()} threads and may start no more; nothing is "
        "lost. Raise `ulimit -u` or the container's pids limit, or use fewer threads, and try "
        "again."
    )


def start_thread(thread: threading.Thread) -> threading.Thread:
    """Start it. Raises ThreadsExhausted; it can be thrown away then."""
    try:
        thread.start()
    except RuntimeError as error:
        if _REFUSED not in str(error):
            raise
        _note_refused()
        raise ThreadsExhausted(
            f"thread {thread.name} was not started: {exhausted_hint()}"
        ) from error
    return thread


def start_some(threads: Iterable[threading.Thread]) -> list[threading.Thread]:
    """Start threads that share one queue, in this order: those that could be, at least one.

    Raises ThreadsExhausted when it is none.
    """
    running: list[threading.Thread] = []
    for thread in threads:
        try:
            running.append(start_thread(thread))
        except ThreadsExhausted:
            if not running:
                raise
            break
    return running


class WorkerThreads(ThreadPoolExecutor):
    """A pool of threads that works with as many as it gets; without any, the caller does the work.

    `submit` never leaves a call queued that it has raised for: such a one would run later, on
    buffers that another owns by then.
    """

    def __init__(self, workers: int, name: str) -> None:
        self._any = threading.Event()  # a thread works
        self._left: set[Future[Any]] = set()  # to those that work, when no more could be started
        super().__init__(workers, name, initializer=self._any.set)

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """As of any executor. Where no thread works and none can be started, it returns when the
        call is made."""
        future: Future[T] = Future()
        calls = [partial(fn, *args, **kwargs)]  # whoever takes it makes it; then nothing keeps it

        def run() -> None:
            try:
                call = calls.pop()
            except IndexError:
                return
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = call()
            except BaseException as error:  # noqa: BLE001 (the caller gets it)
                future.set_exception(error)
            else:
                future.set_result(result)

        try:
            queued = super().submit(run)
        except RuntimeError as error:
            if _REFUSED not in str(error):
                raise
            _note_refused()
            if not self._any.is_set():
                run()
                return future
            self._left.add(future)
            future.add_done_callback(self._left.discard)
        else:
            queued.add_done_callback(lambda done: done.cancelled() and future.cancel())
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """As of any executor."""
        if cancel_futures:
            for future in list(self._left):
                future.cancel()
        super().shutdown(wait, cancel_futures=cancel_futures)


def refused_total() -> int:
    """How many threads this process was refused; the first one is logged."""
    return _refused[0]


def _note_refused() -> None:
    number = _refused[0] = next(_refusals)
    if number == 1:
        _log.warning("%s", exhausted_hint())
