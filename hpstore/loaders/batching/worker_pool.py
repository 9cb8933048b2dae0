"""Worker processes for the user's functions, where they are asked for.

Records are read by threads of the loader's own process all the same; a thread sends its batch to a
process and waits for what the functions make of it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import queue
import random
import signal
import threading
import time
import traceback
import weakref
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from hpstore.errors import AlreadyClosed, ConfigError
from hpstore.loaders.batching.transforms import Task, UserTransforms, Worked
from hpstore.loaders.batching.worker_channel import UNSENDABLE, WorkerChannel, survives
from hpstore.runtime.closing import Closing
from hpstore.runtime.threads import start_thread

_WATCH_SECONDS = 1.0  # after which a worker notices that its parent is gone


@dataclass(frozen=True, slots=True)
class Processes:
    """What was asked for: how many, started how ("fork", "spawn", "forkserver").

    `init_fn(number)` is called in each of them first, as torch's worker_init_fn.
    """

    count: int
    method: str
    init_fn: Any  # Any: the user's

    @classmethod
    def asked(cls, context: Any, num_workers: int, init_fn: Any) -> Processes | None:
        """By torch's arguments: a context asks for processes. Raises ConfigError."""
        if context is None:
            return None
        if num_workers <= 0:
            raise ConfigError(
                f"multiprocessing_context with num_workers={num_workers}: it asks for worker "
                "processes; say how many, or leave it out (threads)"
            )
        method = context if isinstance(context, str) else context.get_start_method()
        known = multiprocessing.get_all_start_methods()
        if method not in known:
            raise ConfigError(f"multiprocessing_context {method!r} is none of {', '.join(known)}")
        return cls(num_workers, method, init_fn)


@dataclass(frozen=True, slots=True)
class _Worker:
    """A process, and the parent's end of what leads to it."""

    process: Any  # Any: each context has a class of its own
    connection: Connection

    def run(self, task: Task) -> tuple[bool, Any]:  # Any: what the user's functions return
        """(True, what they return) or (False, what they raise); raises EOFError or ConnectionError
        when it has ended."""
        channel = WorkerChannel(self.connection.fileno())
        channel.send(task)
        multiprocessing.connection.wait([self.connection, self.process.sentinel])
        good, made = channel.receive()
        return good, made


class Workers(Closing):
    """Processes that run the user's functions. run() is thread-safe.

    They end with close(), with this object, and with the process that started them, however that
    ends.
    """

    def __init__(self, asked: Processes, work: UserTransforms, seed: int) -> None:
        self._asked, self._work, self._seed = asked, work, seed
        self._idle = queue.SimpleQueue[_Worker | None]()  # None: they were ended
        self._workers: list[_Worker] = []
        self._end: weakref.finalize[..., Any] | None = None
        self._pid = 0
        self._ended = False  # one of them has, by itself

    @property
    def count(self) -> int:
        """How many."""
        return self._asked.count

    def start(self) -> None:
        """Start them, unless they are there. By the thread that iterates."""
        if self._end is not None and self._pid == os.getpid() and not self._ended:
            return
        self.close()
        self._pid, self._ended, self._idle = os.getpid(), False, queue.SimpleQueue()
        self._workers = []
        self._end = weakref.finalize(self, _stop, self._workers, self._pid)
        for number in range(self._asked.count):
            self._workers.append(self._started(number))
            self._idle.put(self._workers[-1])

    def _started(self, number: int) -> _Worker:
        context: Any = multiprocessing.get_context(self._asked.method)
        ours, theirs = context.Pipe()
        own = np.random.SeedSequence([self._seed, number]).generate_state(1)[0]
        process = context.Process(
            target=_main,
            args=(theirs, self._work, self._asked.init_fn, number, int(own)),
            name=f"hpstore-loader-{number}",
            daemon=True,
        )
        try:
            process.start()
        except UNSENDABLE as error:
            self.close()
            raise ConfigError(
                f"{', '.join(self._work.names)} cannot be sent to worker processes that are "
                f"started by {self._asked.method!r}: {error}. Define functions in a module, not "
                'in other functions, or give multiprocessing_context="fork".'
            ) from error
        finally:
            theirs.close()  # its end alone tells when it is gone
        return _Worker(process, ours)

    def run(self, task: Task) -> Worked:
        """What the functions make of a batch, in one of the processes; waits for one that is free.

        Raises what they raise there; RuntimeError when a process was killed: the batch was not
        handed out, and the next iter() starts others.
        """
        idle = self._idle
        worker = idle.get()
        if worker is None:
            idle.put(None)  # for the next one who waits
            raise AlreadyClosed("the loader's worker processes were ended; iterate anew")
        try:
            good, made = worker.run(task)
        except (EOFError, ConnectionError) as error:
            self._ended = True
            worker.process.join(_WATCH_SECONDS)  # the connection ends a moment before
            raise RuntimeError(
                f"worker process {worker.process.pid} of the DataLoader ended unexpectedly (exit "
                f"code {worker.process.exitcode}), as one does that needs more memory than there "
                "is. The loader stands before this batch. To go on there with other processes, "
                "load state_dict() and iterate anew."
            ) from error
        finally:
            idle.put(worker)
        if not good:
            raise made
        assert isinstance(made, Worked)
        return made

    def close(self) -> None:
        """End them, when they are done with what they do, and wait until they have. Idempotent."""
        end, self._end = self._end, None
        if end is None:
            return
        if self._pid == os.getpid():  # else they are the parent's
            for _ in self._workers:
                self._idle.get()  # nobody else talks to it any more
            self._idle.put(None)
        end()
        if self._pid == os.getpid():
            for worker in self._workers:
                worker.process.join()


def _stop(workers: list[_Worker], pid: int) -> None:
    """Called once, when nobody talks to them: they are closed or dropped, or the process ends."""
    for worker in workers:
        if pid == os.getpid():  # else they are the parent's
            with contextlib.suppress(OSError):  # it has ended
                WorkerChannel(worker.connection.fileno()).stop()
        worker.connection.close()


# Any below: the user's functions and what they return
def _main(
    connection: Connection, work: UserTransforms, init_fn: Any, number: int, seed: int
) -> None:
    """Main function of a process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this one
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not what a forked parent does about it
    start_thread(threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True))
    torch.set_num_threads(1)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    failed: Exception | None = None
    if init_fn is not None:
        try:
            init_fn(number)
        except Exception as error:  # noqa: BLE001 (told to whoever asks for a batch)
            error.add_note(f"hpstore: in worker_init_fn of worker process {number}")
            failed = error
    channel = WorkerChannel(connection.fileno())
    while True:
        try:
            task = channel.receive()
        except (EOFError, ConnectionError):
            return
        answer = (False, _sendable(failed)) if failed is not None else _answer(work, task)
        try:
            channel.send(answer)
        except ConnectionError:
            return
        except Exception as error:  # noqa: BLE001 (whatever the user's values do when pickled)
            error.add_note("hpstore: what worker processes make must be of a kind that pickles")
            channel.send((False, _sendable(error)))


def _answer(work: UserTransforms, task: Task) -> tuple[bool, Any]:
    try:
        return True, work(task)
    except Exception as error:  # noqa: BLE001 (raised again by who waits for the batch)
        return False, _sendable(error)


def _sendable(error: Exception) -> Exception:
    """The error, or one that says the same where it does not survive the way to the parent; with
    where it was raised, as a traceback does not survive it."""
    told = error
    if not survives(error):
        told = RuntimeError(f"{type(error).__name__}: {error}")
        for note in getattr(error, "__notes__", ()):
            told.add_note(note)
    lines = traceback.format_exception(error)
    told.add_note("hpstore: in a worker process:\n" + "".join(lines))
    return told


def _end_with_parent(parent: int) -> None:
    """A parent that was killed tells nobody where forked siblings hold its end of the connection.

    Behind a fork server they do not, and the end of the connection is enough.
    """
    while os.getppid() == parent:
        time.sleep(_WATCH_SECONDS)
    os._exit(1)
