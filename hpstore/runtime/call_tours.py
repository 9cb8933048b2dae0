"""One worker asks many devices in turn, where that is quicker than to ask them side by side.

A call that looks something up in a cached directory takes some ten microseconds; to wake a worker
for it, and then its caller, takes longer, and that for each device. Workers side by side also
take the interpreter from each other at every system call. So one worker asks all devices. A
caller whose tour stands still leaves it: it has the answers there are, and asks the rest side by
side on their lanes, so that a device that hangs delays no other. Which way is quicker is measured
for each kind of call: to write a small file takes its time on a disk, and none in memory.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

from hpstore.errors import ThreadsExhausted
from hpstore.runtime.threads import start_thread

_log = logging.getLogger(__name__)
STILL_SECONDS = 0.005  # after which a tour is left
WORKERS = 4
_FIRST = 4  # rounds of either way, before one is known to be quicker
_TRY_EVERY = 32  # rounds after that, one is made the way that was slower
_SMOOTH = 1 / 8  # of a new measurement
Call = Callable[[], Any]
End = Callable[[], None]  # run when a device is used no more


class Left(NamedTuple):
    """What there is of a tour that was left."""

    answers: dict[str, Future[Any]]  # that of the call under way is to come
    calls: dict[str, Call]  # not made
    ends: dict[str, list[End]]  # to be run after these calls were made elsewhere


class Tour:
    """Calls on devices that one worker makes in turn; the answer of each, errors as well."""

    def __init__(self, calls: Mapping[str, Call]) -> None:
        self.answers: dict[str, Any] = {}
        self._todo = deque(calls.items())
        self._owed: Future[Any] | None = None  # for who has left: of the call that is being made
        self._at = ""
        self._using = ""  # the device whose call is made, or whose answer is being handed over
        self._ends: dict[str, list[End]] = {}  # run after the call on a device
        self._lock = threading.Lock()  # guards _todo, _at, _using, _owed, _ends
        self._under_way = threading.Lock()
        self._under_way.acquire()

    def run(self) -> None:
        """By the worker."""
        while True:
            with self._lock:
                if not self._todo:
                    break
                self._at, call = self._todo.popleft()
                self._using = self._at
            try:
                answer = call()
            except BaseException as error:  # noqa: BLE001 (handed to whoever waits, crashes too)
                answer = error
            with self._lock:
                self.answers[self._at] = answer
                owed = self._owed
            if owed is not None:
                settle(owed, answer)  # what waits for it may use the device
            with self._lock:
                self._using, ends = "", self._ends.pop(self._at, [])
            run_all(ends)
            del call, answer, owed  # whoever is asked next may take long
        self._under_way.release()

    def over(self) -> bool:
        """Wait for its end, by the caller; False when it stands still, or is slow."""
        return self._under_way.acquire(timeout=STILL_SECONDS)

    def results(self) -> dict[str, Any]:
        """All answers, once it is over. Crashes are re-raised."""
        for answer in self.answers.values():
            if isinstance(answer, BaseException) and not isinstance(answer, Exception):
                raise answer
        return self.answers

    def leave(self) -> Left:
        """Make no further call."""
        with self._lock:
            left = dict(self._todo)
            self._todo.clear()
            ends = {device: self._ends.pop(device) for device in left if device in self._ends}
            futures: dict[str, Future[Any]] = {}
            for device, answer in self.answers.items():
                settle(futures.setdefault(device, Future()), answer)
            if self._at and self._at not in self.answers:
                self._owed = futures[self._at] = Future()
                self._owed.set_running_or_notify_cancel()  # as one on a lane: it is being made
        return Left(futures, left, ends)

    def when_unused(self, device: str, then: End) -> bool:
        """Run `then` after the call on a device; False when none is under way or to come."""
        with self._lock:
            if device != self._using and all(device != name for name, _ in self._todo):
                return False
            self._ends.setdefault(device, []).append(then)
        return True


def settle(future: Future[Any], answer: object) -> None:
    """Put the outcome of a call into its future."""
    if isinstance(answer, BaseException):
        future.set_exception(answer)
    else:
        future.set_result(answer)


class Quicker:
    """Which of two ways takes less time for a device: in turn, or side by side."""

    def __init__(self) -> None:
        self._seconds = [0.0, 0.0]  # side by side, in turn; 0: not known yet
        self._noted = [0, 0]
        self._rounds = 0

    def in_turn(self) -> bool:
        """How the next round is made."""
        self._rounds += 1
        if self._rounds <= 2 * _FIRST:
            return self._rounds % 2 == 1
        quicker = not self._seconds[False] or self._seconds[True] <= self._seconds[False]
        return quicker != (self._rounds % _TRY_EVERY == 0)

    def note(self, *, in_turn: bool, seconds: float) -> None:
        """What a round took, for a device. One slow round says little: the first ones least."""
        known = self._seconds[in_turn]
        self._noted[in_turn] += 1
        if self._noted[in_turn] <= _FIRST:
            self._seconds[in_turn] = min(known, seconds) if known else seconds
        else:
            self._seconds[in_turn] = known + _SMOOTH * (min(seconds, 4 * known) - known)


class Tours:
    """A few workers for tours, started when they are needed. Thread-safe."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Tour | None] = queue.SimpleQueue()
        self.threads: list[threading.Thread] = []
        self._idle = 0
        self._quicker: defaultdict[str, Quicker] = defaultdict(Quicker)  # by kind of call
        self._under_way: set[Tour] = set()
        self._owing: dict[str, set[Future[Any]]] = {}  # device -> calls in which tours stood still
        self._closed = False
        self._lock = threading.Lock()  # guards all of the above

    def begin(self, kind: str, calls: Mapping[str, Call]) -> Tour | None:
        """A tour under way; None when these calls are to be made side by side: that is quicker for
        their kind, a device stood still and has not answered yet, or no worker is free."""
        with self._lock:
            if self._closed or len(calls) < 2 or any(d in self._owing for d in calls):
                return None
            if not self._quicker[kind].in_turn():
                return None
            if self._idle:
                self._idle -= 1
            elif len(self.threads) < WORKERS:
                name = f"hpstore-tour-{len(self.threads)}"
                thread = threading.Thread(target=self._work, name=name, daemon=True)
                try:
                    start_thread(thread)
                except ThreadsExhausted:  # the lanes have theirs
                    return None
                self.threads.append(thread)
            else:
                return None
            tour = Tour(calls)
            self._under_way.add(tour)
            self._jobs.put(tour)
        return tour

    def note(self, kind: str, *, in_turn: bool, seconds: float) -> None:
        """What a round of such calls took, for a device."""
        with self._lock:
            self._quicker[kind].note(in_turn=in_turn, seconds=seconds)

    def _work(self) -> None:
        while (tour := self._jobs.get()) is not None:
            tour.run()
            with self._lock:
                self._under_way.discard(tour)
                self._idle += 1
            del tour  # an idle worker must not keep buffers alive

    def leave(self, tour: Tour) -> Left:
        """As Tour.leave; the device that it stands at is in no tour before it has answered."""
        found = tour.leave()
        owing = {device: future for device, future in found.answers.items() if not future.done()}
        with self._lock:
            for device, future in owing.items():
                self._owing.setdefault(device, set()).add(future)
        for device, future in owing.items():
            future.add_done_callback(partial(self._answered, device))
        return found

    def _answered(self, device: str, future: Future[Any]) -> None:
        with self._lock:
            calls = self._owing.get(device, set())
            calls.discard(future)
            if not calls:
                self._owing.pop(device, None)

    def forget(self, device: str) -> None:
        """A device left: what has its id next owes nothing."""
        with self._lock:
            self._owing.pop(device, None)

    def when_none_uses(self, device: str, then: End) -> None:
        """Run `then` once the tours that are under way make no call on a device any more."""
        with self._lock:
            under_way = list(self._under_way)
        left, lock = 1 + len(under_way), threading.Lock()  # guards left

        def one_less() -> None:
            nonlocal left
            with lock:
                left -= 1
                last = left == 0
            if last:
                then()

        for tour in under_way:
            if not tour.when_unused(device, one_less):
                one_less()
        one_less()

    def close(self) -> None:
        """End the workers, once each has ended its tour."""
        with self._lock:
            self._closed = True
            for _ in self.threads:
                self._jobs.put(None)


def run_all(ends: Iterable[End]) -> None:
    """Run what waits for the end of a device; one that fails keeps no other, and no worker."""
    for end in ends:
        try:
            end()
        except Exception:  # noqa: BLE001 (logged)
            _log.exception("a device that left could not be closed")


def join(threads: Iterable[threading.Thread], until: float, what: str) -> None:
    """Wait for threads to end, until a monotonic time; others are left behind, logged."""
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
        if thread.is_alive():
            _log.warning("a thread is still waiting for %s", what)
