"""Many devices: a bounded queue and a few workers for each, so that one hung device holds no other.

A lane is the queue of one device. Calls run on the lane's threads, those in two halves on the
caller's while they are answered soon. A caller that gives up on a deadline leaves its call running,
and the memory that it writes into (PROTOCOL 21). After a fork the child starts its own lanes.
"""

from __future__ import annotations

import itertools
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from hpstore.errors import AlreadyClosed, DeviceTimeout
from hpstore.runtime.call_tours import Tour, Tours, join, run_all, settle
from hpstore.runtime.deadline_wait import (
    Patience,
    no_answer,
    still_owes,
    wait_awake,
    wait_for_enough,
)
from hpstore.runtime.split_calls import are_split, make_together
from hpstore.runtime.threads import WorkerThreads, start_some

T = TypeVar("T")
_log = logging.getLogger(__name__)
_Job = tuple["Future[object]", Callable[[], object]]
_SOON, _BULK, _LAST = range(3)  # what is taken first


class _Lane:
    """The workers of one device."""

    def __init__(self, device: str, workers: int) -> None:
        self.device = device
        self._jobs: queue.PriorityQueue[tuple[int, int, _Job | None]] = queue.PriorityQueue()
        self._number = itertools.count()  # of a job: equals are taken in their order
        self.pending = 0
        self.busy_since: dict[int, float] = {}  # worker -> when its call began
        self.ended = False  # takes no more jobs
        self.at_end: Callable[[], None] | None = None  # run by the last worker that stops
        self.unanswered: Future[Any] | None = None  # a call made elsewhere, or the only one
        self.lock = threading.Lock()  # guards all of the above
        threads = [
            threading.Thread(
                target=self._work, args=(i,), name=f"hpstore-{device[:8]}-{i}", daemon=True
            )
            for i in range(workers)
        ]
        with self.lock:  # which a worker that ends takes
            self.threads = start_some(threads)
            self.alive = len(self.threads)

    def _work(self, worker: int) -> None:
        while (job := self._jobs.get()[2]) is not None:
            future, call = job
            self.busy_since[worker] = time.monotonic()
            settle = _run(call) if future.set_running_or_notify_cancel() else _nothing
            with self.lock:  # before the answer, so that whoever has it finds the place free
                self.busy_since.pop(worker)
                self.pending -= 1
            settle(future)
            settle = _nothing
            del job, future, call  # an idle worker must not keep buffers alive
        with self.lock:
            self.alive -= 1
            last = self.at_end if self.alive == 0 else None
        if last is not None:
            last()

    def put(self, priority: int, job: _Job, depth: int) -> bool | None:
        """Queue a job. False when `depth` of them are there, None when the lane has ended."""
        with self.lock:
            if self.ended:
                return None
            if self.pending >= depth:
                return False
            self.pending += 1
            self._jobs.put((priority, next(self._number), job))
        return True

    def end(self, at_end: Callable[[], None] | None = None) -> None:
        """Stop the workers when all jobs are done; the last one runs `at_end`."""
        with self.lock:
            self.ended, self.at_end = True, at_end
            for _ in self.threads:
                self._jobs.put((_LAST, next(self._number), None))

    def stuck_seconds(self) -> float:
        """How long all workers have been in their calls; 0 while one is free."""
        with self.lock:
            if len(self.busy_since) < len(self.threads):
                return 0.0
            return time.monotonic() - max(self.busy_since.values())

    def silent(self, limit_seconds: float) -> bool:
        """Whether nothing more is asked of it before it answers."""
        if self.unanswered is not None and not self.unanswered.done():
            return True
        return self.stuck_seconds() > limit_seconds


def _run(call: Callable[[], object]) -> Callable[[Future[object]], None]:
    """Make the call; returns what puts its outcome into a future."""
    try:
        result = call()
    except BaseException as error:  # noqa: BLE001 (handed to whoever waits, crashes too)
        caught = error
        return lambda future: future.set_exception(caught)
    return lambda future: future.set_result(result)


def _run_all_after(ends: list[Callable[[], None]], _: Future[Any]) -> None:
    run_all(ends)


def _nothing(_: object) -> None:
    """The call was cancelled: its future knows."""


def _no_end() -> None:
    """Nothing is to be done when a lane ends."""


class Scheduler:
    """Runs device calls on lanes and pure work on a compute pool.

    A lane whose workers have all been in one call for `stuck_seconds` refuses further ones at once
    with DeviceTimeout, so that a hung device costs its deadline a few times, not at every call.

    With `threads=False` every call runs at once on the caller's thread: tests that count
    operations are then deterministic.
    """

    def __init__(
        self,
        *,
        workers_per_device: int,
        queue_depth: int,
        compute_threads: int,
        threads: bool,
        stuck_seconds: float = 30.0,
    ) -> None:
        self._stuck_seconds = stuck_seconds
        self._workers, self._depth = workers_per_device, queue_depth
        self._compute_threads, self._threads = compute_threads, threads
        self._lanes: dict[str, _Lane] = {}
        self._compute: WorkerThreads | None = None
        self._late: dict[str, tuple[Future[Any], float]] = {}  # an unanswered call, its beginning
        self._lock = threading.Lock()  # guards _lanes, _compute, _late, _closed, _pid
        self._tours = Tours()
        self._closed = False
        self._pid = os.getpid()

    def after_fork(self) -> None:
        """Forget the parent's threads. Called in the child."""
        self._lock = threading.Lock()
        self._lanes, self._compute, self._late, self._pid = {}, None, {}, os.getpid()
        self._tours = Tours()

    def submit(self, device: str, call: Callable[[], T], *, bulk: bool = False) -> Future[T]:
        """Run `call` on the lane of a device; the future fails at once when its queue is full.

        `bulk`: it may wait for all calls that are not, as somebody waits for those. Raises
        AlreadyClosed.
        """
        if not self._threads:
            return at_once(call)
        future: Future[T] = Future()
        job: _Job = (future, call)  # type: ignore[assignment]  # futures are invariant
        taken: bool | None = None
        while taken is None:  # else the lane was given up in between: there is a fresh one now
            lane = self._lane(device)
            if lane.silent(self._stuck_seconds):
                text = f"device {device} has not answered for {self._stuck_seconds:.0f} s"
                future.set_exception(DeviceTimeout(text, device=device))
                return future
            taken = lane.put(_BULK if bulk else _SOON, job, self._depth)
        if not taken:
            text = f"{self._depth} calls already wait for device {device}"
            future.set_exception(DeviceTimeout(text, device=device))
        return future

    def _require_open(self) -> None:
        if self._closed:
            raise AlreadyClosed("the pool is closed: it starts no more threads")

    def _lane(self, device: str) -> _Lane:
        with self._lock:
            self._require_open()
            lane = self._lanes.get(device)
            if lane is None:
                lane = self._lanes[device] = _Lane(device, self._workers)
            return lane

    def gather(
        self,
        calls: Mapping[str, Callable[[], T]],
        deadline_seconds: float,
        *,
        patience: Patience | None = None,
        brief: str = "",
        ask_late: bool = False,
    ) -> dict[str, T | Exception]:
        """Run one call per device at the same time; results or errors by device.

        A device that does not answer in time gets a DeviceTimeout; its call goes on. With
        `patience`, one that can be done without is waited for no longer than that says, and not
        asked at all, unless `ask_late`, while it owes the answer to an earlier such call for as
        long. `brief`: the kind of calls that may take less time than a thread takes to wake up;
        they are made in turn where that is quicker for this kind.
        """
        late = set() if patience is None or ask_late else self.late(calls, patience.seconds)
        if patience is not None and not patience.spare(late):
            late = set()  # all of them are needed
        asked = {d: call for d, call in calls.items() if d not in late}
        results: dict[str, T | Exception] = {device: still_owes(device) for device in late}
        began = time.monotonic()
        futures: dict[str, Future[T]] = {}
        left = self._together(brief, asked, futures)
        tour = None if left is not None else self._begin_tour(brief, asked)
        if tour is not None and self._is_over(tour):
            results |= tour.results()
        else:
            self._side_by_side(asked if left is None else left, tour, futures)
            if patience is None:
                wait_awake(futures.values(), deadline_seconds)
            else:
                wait_for_enough(futures, deadline_seconds, patience, late)
                self.note_late(futures, began)
            waited = min(deadline_seconds, time.monotonic() - began)
            for device, future in futures.items():
                answer = outcome(future, device, waited)
                results[device] = answer
        measured = brief and asked and left is None
        if measured and not any(isinstance(r, DeviceTimeout) for r in results.values()):
            seconds = (time.monotonic() - began) / len(asked)
            self._tours.note(brief, in_turn=tour is not None, seconds=seconds)
        return results

    def start(
        self,
        calls: Mapping[str, Callable[[], T]],
        *,
        brief: str = "",
        into: dict[str, Future[T]] | None = None,
    ) -> dict[str, Future[T]]:
        """Begin one call per device, for a caller that waits in its own way.

        `brief` as for gather: those that were made in turn have their answers on return. `into` is
        what is returned; the calls that were begun are there when it is interrupted, too.
        """
        futures: dict[str, Future[T]] = {} if into is None else into
        began = time.monotonic()
        if (left := self._together(brief, calls, futures)) is not None:
            return self._side_by_side(left, None, futures)
        tour = self._begin_tour(brief, calls)
        if tour is None or not self._is_over(tour, futures):
            self._side_by_side(calls, tour, futures)
            if brief:
                self._note_round(brief, futures.values(), began, in_turn=tour is not None)
            return futures
        for device, answer in tour.answers.items():
            settle(futures.setdefault(device, Future()), answer)
        if calls:
            seconds = (time.monotonic() - began) / len(calls)
            self._tours.note(brief, in_turn=True, seconds=seconds)
        return futures

    def _together(
        self, kind: str, calls: Mapping[str, Callable[[], T]], futures: dict[str, Future[T]]
    ) -> Mapping[str, Callable[[], T]] | None:
        """As make_together, of calls that are brief. None where they are made otherwise."""
        if not kind or not self._threads or not are_split(calls):
            return None
        with self._lock:
            self._require_open()
            lanes = {device: self._lanes.get(device) for device in calls}
        silent = {d for d, lane in lanes.items() if lane and lane.silent(self._stuck_seconds)}
        return make_together(calls, silent, futures)

    def _note_round(
        self, kind: str, futures: Collection[Future[T]], began: float, *, in_turn: bool
    ) -> None:
        """When the last of these calls has answered, and none has failed: what they took."""
        arrivals = itertools.count(1)  # next() is atomic

        def arrived(_: Future[T]) -> None:
            if next(arrivals) < len(futures):
                return
            if not any(future.cancelled() or future.exception() for future in futures):
                seconds = (time.monotonic() - began) / len(futures)
                self._tours.note(kind, in_turn=in_turn, seconds=seconds)

        for future in futures:
            future.add_done_callback(arrived)

    def _begin_tour(self, kind: str, calls: Mapping[str, Callable[[], T]]) -> Tour | None:
        """None also when calls are of no kind, or a lane refuses them: then it does so at once."""
        lanes = [self._lanes.get(device) for device in calls] if kind else []
        silent = any(lane and lane.silent(self._stuck_seconds) for lane in lanes)
        return None if not kind or not self._threads or silent else self._tours.begin(kind, calls)

    def _is_over(self, tour: Tour, begun: dict[str, Future[Any]] | None = None) -> bool:
        try:
            return tour.over()
        except BaseException:  # Ctrl-C: nobody waits for the remaining calls; raised again
            left = self._tours.leave(tour)
            if begun is not None:
                begun |= left.answers
            for ends in left.ends.values():
                run_all(ends)
            raise

    def _side_by_side(
        self,
        calls: Mapping[str, Callable[[], T]],
        tour: Tour | None,
        futures: dict[str, Future[T]],
    ) -> dict[str, Future[T]]:
        """Make the calls on their lanes, into `futures`; of a tour that is left, those that it has
        not begun."""
        ends: dict[str, list[Callable[[], None]]] = {}
        if tour is not None:
            answers, calls, ends = self._tours.leave(tour)
            futures |= answers
        try:
            for device, call in calls.items():
                futures[device] = self.submit(device, call)
        finally:
            for device, waiting in ends.items():
                if device in futures:
                    futures[device].add_done_callback(partial(_run_all_after, waiting))
                else:
                    run_all(waiting)
        return futures

    def late(self, devices: Iterable[str], seconds: float) -> set[str]:
        """Those of these devices that have owed the answer to a call with patience for so long."""
        now = time.monotonic()
        with self._lock:
            for device in [d for d, (call, _) in self._late.items() if call.done()]:
                del self._late[device]
            since = {d: self._late[d][1] for d in devices if d in self._late}
        return {d for d, began in since.items() if now - began >= seconds}

    def note_late(self, futures: Mapping[str, Future[T]], began: float) -> None:
        """Devices whose calls, begun at that monotonic time, are not waited for any longer owe the
        answer until it is there."""
        with self._lock:
            for device, future in futures.items():
                if not future.done():
                    self._late.setdefault(device, (future, began))

    def gather_once(
        self,
        calls: Mapping[str, Callable[[], T]],
        deadline_seconds: float,
        late: Callable[[str, Future[T]], None] | None = None,
        *,
        patience: Patience | None = None,
    ) -> dict[str, T | Exception]:
        """As gather, on lanes that end with their calls. For names that are no devices' ids.

        A call that does not answer in time keeps its lane, which refuses others until it has ended:
        however often a place that hangs is asked, it holds one call. `late(name, future)` is then
        called by the lane's thread, to dispose of what came of it.
        """
        began = time.monotonic()
        futures = {name: self.submit(name, call) for name, call in calls.items()}
        if patience is None:
            wait_awake(futures.values(), deadline_seconds)
        else:
            wait_for_enough(futures, deadline_seconds, patience, ())
        waited = min(deadline_seconds, time.monotonic() - began)
        results: dict[str, T | Exception] = {}
        for name, future in futures.items():
            if future.done():
                answer = outcome(future, name, deadline_seconds)
                results[name] = answer
                if self.answers(name):  # else it was refused: an earlier call has the lane
                    self.forget(name, _no_end)
                continue
            results[name] = no_answer(name, waited)
            self.note_unanswered(name, future)
            future.add_done_callback(partial(self._ended_late, name, late))
        return results

    def _ended_late(
        self, name: str, late: Callable[[str, Future[T]], None] | None, future: Future[T]
    ) -> None:
        self.forget(name, _no_end)
        if late is not None:
            late(name, future)

    def compute(self, call: Callable[[], T]) -> Future[T]:
        """Run CPU work (encoding, checksums) on the compute pool."""
        if not self._threads:
            return at_once(call)
        with self._lock:
            self._require_open()
            if self._compute is None:
                self._compute = WorkerThreads(self._compute_threads, "hpstore-compute")
            workers = self._compute
        try:
            return workers.submit(call)  # it may run here, and ask this scheduler
        except RuntimeError:
            with self._lock:
                self._require_open()
            raise

    def answers(self, device: str) -> bool:
        """False while submit() would refuse a call because earlier ones have not ended."""
        return not self._threads or not self._lane(device).silent(self._stuck_seconds)

    def note_unanswered(self, device: str, call: Future[T]) -> None:
        """A call made elsewhere has missed its deadline: refuse others until it is done."""
        if self._threads:
            self._lane(device).unanswered = call

    def queued(self, device: str) -> int:
        """Calls that wait for or run on a device."""
        lane = self._lanes.get(device)
        return 0 if lane is None else lane.pending

    def forget(self, device: str, at_end: Callable[[], None]) -> None:
        """Drop the lane of a device that left; `at_end` runs when no call uses it any more.

        Hung threads die with the process, and `at_end` is then never run.
        """
        with self._lock:
            lane = self._lanes.pop(device, None)
            self._late.pop(device, None)
        self._tours.forget(device)
        self._end(device, lane, at_end)

    def _end(self, device: str, lane: _Lane | None, at_end: Callable[[], None]) -> None:
        """Run `at_end` when neither the lane nor a tour uses the device any more."""
        unused = partial(self._tours.when_none_uses, device, at_end)
        if lane is None:
            unused()
        else:
            lane.end(unused)

    def close(
        self, limit_seconds: float = 5.0, at_end: Mapping[str, Callable[[], None]] | None = None
    ) -> None:
        """Stop the workers; a thread hung on a device is left behind after the limit, logged.

        `at_end`: what is run for each device when no call uses it any more, as in forget().
        """
        at_end = at_end or {}
        with self._lock:
            self._closed = True
            lanes, self._lanes = self._lanes, {}
            compute, self._compute = self._compute, None
        if self._pid != os.getpid():
            lanes, compute, self._tours = {}, None, Tours()  # threads of the parent
        until = time.monotonic() + limit_seconds
        self._tours.close()
        for device in at_end.keys() | lanes.keys():
            self._end(device, lanes.get(device), at_end.get(device, _no_end))
        for lane in lanes.values():
            join(lane.threads, until, f"device {lane.device}")
        join(self._tours.threads, until, "a tour of the devices")
        if compute is not None:
            compute.shutdown(wait=True)


def at_once(call: Callable[[], T]) -> Future[T]:
    """Call on this thread; a crash goes up, an error into the future."""
    future: Future[T] = Future()
    try:
        future.set_result(call())
    except Exception as error:  # noqa: BLE001 (the future carries it)
        future.set_exception(error)
    return future


def outcome(future: Future[T], device: str, deadline_seconds: float) -> T | Exception:
    """A future's result or error; DeviceTimeout when it is not done. Crashes are re-raised."""
    if not future.done():
        return no_answer(device, deadline_seconds)
    error = future.exception()
    if error is None:
        return future.result()
    if not isinstance(error, Exception):
        raise error
    return error
