"""SIGTERM as a notice: all ranks of a job agree on the step at which they save and stop.

A rank that gets the signal says so in the job's store. Then every rank notes there how many steps
it has completed, and holds its trainer at the end of the step that it is in until rank 0 has
collected the notes. The first step after all that were noted is the one: each rank stops there, no
rank before its peers. None of this is a collective call: threads beside the trainer do it.
"""

from __future__ import annotations

import logging
import os
import queue
import secrets
import signal
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch.distributed as dist

from hpstore.checkpoint.ranks.collectives import RankChannel, Ranks
from hpstore.checkpoint.ranks.sigterm import (
    Notice,
    SigtermHandler,
    handler_in_front,
    require_handling,
)
from hpstore.errors import CheckpointError, ThreadsExhausted
from hpstore.runtime.closing import Closing, call_at_exit
from hpstore.runtime.threads import start_thread

_log = logging.getLogger(__name__)
ON_SIGTERM = ("finish", "save")
EXIT_CODE = 128 + signal.SIGTERM  # as shells have it: launchers and managers start such a job again
LOOK_SECONDS = 1.0  # between two looks at the store: 4,096 ranks are as many requests a second
WAIT_SECONDS = 0.05  # between two looks while ranks agree
_JOIN_SECONDS = 5.0


class Preempted(SystemExit):
    """The process was told to end by SIGTERM and has saved; its exit status is 143.

    A SystemExit, so that `except Exception` does not train on.
    """

    def __init__(self, text: str = "") -> None:
        super().__init__(text)
        self.code = EXIT_CODE


class Preemption(Closing):
    """Of one checkpointer: the constructor and close() are calls of all `ranks`.

    `seconds`: what a rank that has got the signal waits at most for the agreed step. Then it ends
    as it would have without a notice, as it does at a second signal. `required`: raise where this
    process cannot handle signals; otherwise that is logged, and it learns of those of its peers.
    """

    def __init__(
        self, ranks: Ranks, seconds: float, *, alone: bool = False, required: bool = True
    ) -> None:
        self._ranks, self._seconds = ranks, seconds
        self._notice = Notice()
        self._changed = threading.Condition()  # guards the four below
        self._completed = -1  # the step that the trainer was last at
        self._deciding = False  # the trainer is held
        self._after: int | None = None  # the agreed step is the first one after this
        self._reached = False
        self._closed = self._left = False
        store, fault = None, ""
        try:
            _require_all_ranks(alone=alone)
            store = _store() if ranks.world > 1 else None
            if required:
                require_handling()
        except CheckpointError as error:
            fault = str(error)
        nonce = _agreed_nonce(ranks, fault)
        self._board = Board(store, f"hpstore/preemption/{nonce}", ranks.rank, ranks.world)
        self._handler: SigtermHandler | None = None
        try:
            self._handler = handler_in_front()
            self._handler.add_notice(self._notice)
        except CheckpointError as error:
            _log.warning("a SIGTERM to this process is no notice: %s", error)
        thread = threading.Thread(target=self._watch, name="hpstore-sigterm", daemon=True)
        try:
            self._thread = start_thread(thread)
        except ThreadsExhausted:
            self._forget()
            raise
        call_at_exit(self._stop_watching)

    # --- the trainer's thread -----------------------------------------------------------------

    @property
    def reached(self) -> bool:
        """Whether the agreed step has come."""
        return self._reached

    def at(self, step: int) -> bool:
        """`step` steps are completed: True, on all ranks, from the agreed one on.

        Every rank calls it after the same steps. Waits while the ranks agree.
        """
        with self._changed:
            while self._deciding:
                self._changed.wait()
            if self._ranks.world == 1 and self._notice.told:
                self._reached = True
            self._reached |= self._after is not None and step > self._after
            self._completed = step
            return self._reached

    def close(self) -> None:
        """Put the handler from before back. A SIGTERM that the trainer has not heard of is
        delivered to it; what that one raised at the first signal is raised now. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._stop_watching()
        self._board.leave(self._completed)
        default = self._handler is not None and self._handler.before is signal.SIG_DFL
        self._forget()
        raised, self._notice.raised = self._notice.raised, None
        if raised is not None:
            raise raised
        if self._notice.told and not self._reached and default:
            os.kill(os.getpid(), signal.SIGTERM)

    def _stop_watching(self) -> None:
        self._left = True
        self._notice.wakes.put(None)
        self._thread.join(_JOIN_SECONDS)

    def _forget(self) -> None:
        handler, self._handler = self._handler, None
        if handler is not None:
            handler.remove(self._notice)

    # --- the watcher's thread -------------------------------------------------------------------

    def _watch(self) -> None:
        """Wait for a signal, here or on another rank; agree; see to the deadline."""
        while not self._notice.told and not self._board.told():
            try:
                self._notice.wakes.get(timeout=LOOK_SECONDS)
            except queue.Empty:
                continue
            if self._left:
                return
        began = self._notice.at_seconds or time.monotonic()
        _log.warning(
            "SIGTERM has come to %s: the job saves and stops after %s step",
            "this process" if self._notice.told else "another rank",
            "this" if self._ranks.world == 1 else "an agreed",
        )
        if self._ranks.world > 1:
            self._agree(began + self._seconds)
        self._end_in_time()

    def _agree(self, until: float) -> None:
        with self._changed:
            self._deciding, completed = True, self._completed
        after, problem = None, ""
        try:
            after = self._board.agree(completed, until, self)
        except (RuntimeError, ValueError) as error:  # of torch's stores
            problem = str(error).splitlines()[0]
        if after is None and not self._left:
            _log.error(
                "the ranks did not agree on a step to stop at%s: this one saves nothing now. What "
                "is committed stays so, the next job goes on from the newest of it",
                f" ({problem})" if problem else "",
            )
        with self._changed:
            self._after, self._deciding = after, False
            self._changed.notify_all()

    @property
    def closed(self) -> bool:
        """Whether the trainer has left its loop."""
        return self._left

    def _end_in_time(self) -> None:
        """A process that was signalled itself ends at the deadline, if its trainer has not come to
        the agreed step."""
        while not self._left and not self._reached:
            signalled = self._notice.at_seconds
            if signalled is not None and time.monotonic() > signalled + self._seconds:
                _log.error(
                    "the trainer did not come to the agreed step within %.0f s of SIGTERM: the "
                    "process ends without a save. The newest committed step is still current",
                    self._seconds,
                )
                self._notice.expired = True
                os.kill(os.getpid(), signal.SIGTERM)
                return
            time.sleep(WAIT_SECONDS)


class Trainer(Protocol):
    """Whose loop the ranks agree about."""

    @property
    def closed(self) -> bool:
        """Whether it has left its loop."""


class Board:
    """What the ranks write down for each other in the job's store; of one rank alone, nothing.

    <root>/told       one of them has got the signal
    <root>/at/<rank>  the step that a rank has completed, its trainer being held or gone
    <root>/agreed     by rank 0: the last step of all of them; empty when it does not know
    """

    # Any: torch's stores have no public base that can be named in torch 2.6
    def __init__(self, store: Any, root: str, rank: int, world: int) -> None:
        self._store, self._root, self._rank, self._world = store, root, rank, world

    def told(self) -> bool:
        """Whether any rank has got the signal. A job whose store is gone is ending: False."""
        try:
            return self._store is not None and bool(self._store.check([f"{self._root}/told"]))
        except (RuntimeError, ValueError) as error:
            _log.debug("the job's store does not answer: %s", error)
            return False

    def agree(self, completed: int, until: float, trainer: Trainer) -> int | None:
        """The last step that any rank has completed; None when there is no answer in time."""
        self._store.set(f"{self._root}/told", "1")
        self._store.set(f"{self._root}/at/{self._rank}", str(completed))
        if self._rank == 0:
            notes = [f"{self._root}/at/{rank}" for rank in range(self._world)]
            there = self._wait(notes, until, trainer)
            steps = [int(self._store.get(note)) for note in notes] if there else []
            self._store.set(f"{self._root}/agreed", str(max(steps)) if steps else "-")
        answered = self._wait([f"{self._root}/agreed"], until + LOOK_SECONDS, trainer)
        answer = self._store.get(f"{self._root}/agreed") if answered else b"-"
        return None if answer == b"-" else int(answer)

    def _wait(self, keys: Sequence[str], until: float, trainer: Trainer) -> bool:
        while not self._store.check(list(keys)):
            if time.monotonic() > until or trainer.closed:
                return False
            time.sleep(WAIT_SECONDS)
        return True

    def leave(self, completed: int) -> None:
        """This rank's trainer has left its loop: others need not wait for it."""
        if self._store is None:
            return
        try:
            self._store.set(f"{self._root}/at/{self._rank}", str(completed))
            if self._rank == 0:
                self._store.compare_set(f"{self._root}/agreed", "", "-")
        except (RuntimeError, ValueError) as error:
            _log.debug("the job's store does not answer: %s", error)


def _require_all_ranks(*, alone: bool) -> None:
    if alone and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise CheckpointError(
            'on_sigterm="save" with group="alone": the other ranks of this job would not stop at '
            'the same step. Make the Checkpointer on all ranks without group="alone", or use '
            'on_sigterm="finish"'
        )


def _store() -> Any:
    """A connection of its own to the job's store where it is a server: a call that waits there
    keeps others on the same connection waiting."""
    try:
        c10d: Any = dist  # it does not export its stores
        store = bare = c10d.distributed_c10d._get_default_store()
        while isinstance(bare, c10d.PrefixStore):
            bare = bare.underlying_store
        server = isinstance(bare, c10d.TCPStore) and hasattr(bare, "clone")  # torch 2.7
        return store.clone() if server else store
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(
            f'on_sigterm="save" needs the store of torch.distributed, which is not there: {error}'
        ) from error


def _agreed_nonce(ranks: Ranks, fault: str) -> str:
    """A name unique to this job, the same on all ranks. An error of one rank is raised on all."""
    heard = ranks.all_gather((fault or f"={secrets.token_hex(8)}").encode(), RankChannel.TRAINER)
    faults = {rank: said.decode() for rank, said in enumerate(heard) if not said.startswith(b"=")}
    if faults:
        rank, text = next(iter(faults.items()))
        raise CheckpointError(text if ranks.world == 1 else f"rank {rank}: {text}")
    return heard[0][1:].decode()
