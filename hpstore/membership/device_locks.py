"""Locks and writes on the registers of a pool's devices, side by side, none waited for too long.

What a device that hangs has of them is let go when its call has ended, and it is not asked again
before. A hold is released on the lane of its device: closing a file of some filesystems waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from hpstore.devices.base import Device, Hold
from hpstore.devices.host_disks import begin_finish, begin_hold, host_disk
from hpstore.errors import (
    AlreadyClosed,
    DeviceTimeout,
    LockTimeout,
    RegistersUnavailable,
    ThreadsExhausted,
)
from hpstore.objects.context import PoolContext
from hpstore.objects.shared_looks import is_known
from hpstore.runtime.deadline_wait import QUICK_SECONDS, no_answer, wait_awake
from hpstore.runtime.scheduler import outcome
from hpstore.runtime.split_calls import Sent, SplitCall, Unfinished
from hpstore.runtime.threads import start_thread

T = TypeVar("T")
_GATE_SECONDS = 1.0  # for the first device; it is only there to keep contenders in one order
_GRACE_SECONDS = 0.25  # for those that a majority has left behind, or 8 times what that took
POLL_SECONDS = (0.001, 0.05)  # between two tries: the first pause, the longest


def majority(members: Collection[object]) -> int:
    """More than half."""
    return len(members) // 2 + 1


@dataclass(slots=True)
class LockAttempt:
    """What came of one attempt to lock a range."""

    holds: dict[str, Hold] = field(default_factory=dict)  # locked
    busy: dict[str, Hold] = field(default_factory=dict)  # another one has it
    failed: dict[str, Exception] = field(default_factory=dict)
    newest: int = 0  # generation that any of them knows
    blocked: bool = False  # the first device was busy, and no other was asked


class _Taking:
    """A lock of one range of the registers, taken device by device. `live`: locks that are held."""

    def __init__(self, store: PoolContext, live: set[Hold], offset: int, nbytes: int) -> None:
        self._store, self._live, self._range = store, live, (offset, nbytes)
        self._members = store.view.devices
        self.mine: list[Hold] = []  # locked here
        self.given_up = threading.Event()  # a call that ends later keeps nothing

    def on(self, device_id: str, device: Device) -> Callable[[], tuple[int, Hold]]:
        """The call that does it on a device; the generation that this knows, and the hold."""

        def whole() -> tuple[int, Hold]:
            return self._noted(device_id, device, device.hold(*self._range))

        def begin() -> Sent[tuple[int, Hold]] | None:
            sent = begin_hold(device, *self._range)
            return None if sent is None else sent.then(partial(self._soon, device_id, device))

        return whole if host_disk(device) is None else SplitCall(begin, whole)

    def _soon(self, device_id: str, device: Device, hold: Hold) -> tuple[int, Hold]:
        at_once = hold.record is not None and is_known(self._store, device_id, hold.record)
        if device_id in self._members and not at_once:
            raise Unfinished(partial(self._noted, device_id, device, hold))
        return self._noted(device_id, device, hold)

    def _noted(self, device_id: str, device: Device, hold: Hold) -> tuple[int, Hold]:
        generation = 0
        try:
            if device_id in self._members:  # as of after the lock: who changes it holds that, too
                generation = self._store.generation_of(device_id, device, hold.record)
        except BaseException:
            hold.release()
            raise
        if hold.taken:
            self._live.add(hold)
            self.mine.append(hold)
        if self.given_up.is_set():
            hold.release()
            self._live.discard(hold)
        return generation, hold


class DeviceLocks:
    """Of the devices of an open pool. Thread-safe."""

    def __init__(self, store: PoolContext) -> None:
        self._store = store
        self._lock = threading.Lock()  # guards _late
        self._late: dict[str, Future[object]] = {}  # calls that were not waited for to the end
        self._live: set[Hold] = set()  # what a forked child has copies of

    def after_fork(self) -> None:
        """In the child: drop copies of descriptors, so that the parent's end ends its locks."""
        self._lock, self._late = threading.Lock(), {}
        live, self._live = self._live, set()
        for hold in live:
            hold.forget()

    def late(self) -> set[str]:
        """Devices that have not answered an earlier call yet."""
        with self._lock:
            self._late = {d: f for d, f in self._late.items() if not f.done()}
            return set(self._late)

    def attempt(
        self, devices: Mapping[str, Device], offset: int, nbytes: int, need: int
    ) -> LockAttempt:
        """Try all once: the first that answers alone, so that contenders do not share them out."""
        found = LockAttempt()
        late = self.late() & devices.keys()
        for device in late:
            text = f"device {devices[device].url} has not answered an earlier call yet"
            found.failed[device] = DeviceTimeout(text, device=device)
        rest = sorted(devices.keys() - late)
        while rest and not found.holds:
            gate = rest.pop(0)
            self.ask({gate: devices[gate]}, offset, nbytes, 1, _GATE_SECONDS, found)
            if found.busy:
                found.blocked = True
                return found
        if rest:
            limit = self._store.settings.device_deadline_seconds
            wanted = {device: devices[device] for device in rest}
            self.ask(wanted, offset, nbytes, need - 1, limit, found)
        return found

    def ask(
        self,
        devices: Mapping[str, Device],
        offset: int,
        nbytes: int,
        need: int,
        limit_seconds: float,
        found: LockAttempt,
    ) -> None:
        """Try these side by side, and note in `found` what comes of it; `need` answers do."""
        taking = _Taking(self._store, self._live, offset, nbytes)

        def drop(_: str, future: Future[tuple[int, Hold]]) -> None:
            future.add_done_callback(self._drop_answer)

        calls = {d: taking.on(d, device) for d, device in devices.items()}
        try:
            answers = self._gather(calls, need, limit_seconds, drop, brief="lock")
        except BaseException:
            taking.given_up.set()
            for hold in (*taking.mine, *found.holds.values()):
                self._let_go(hold)
            raise
        for device, answer in answers.items():
            if isinstance(answer, Exception):
                found.failed[device] = answer
                continue
            generation, hold = answer
            found.newest = max(found.newest, generation)
            (found.holds if hold.taken else found.busy)[device] = hold

    def _gather(
        self,
        calls: Mapping[str, Callable[[], T]],
        need: int,
        limit_seconds: float,
        late: Callable[[str, Future[T]], None],
        *,
        brief: str,
        into: dict[str, Future[T]] | None = None,
    ) -> dict[str, T | Exception]:
        """One call on each device; those that `need` others leave behind are not waited for.

        Nothing more is asked of them here before they answer; `late` sees to what comes of it.
        `brief` and `into` as Scheduler.start has them.
        """
        futures = self._store.scheduler.start(calls, brief=brief, into=into)
        elapsed = wait_awake(futures.values(), min(QUICK_SECONDS, limit_seconds))
        limit, decided = limit_seconds, False
        while (pending := [f for f in futures.values() if not f.done()]) and elapsed < limit:
            good = sum(f.done() and f.exception() is None for f in futures.values())
            if good >= need and not decided:
                decided, limit = True, min(limit, elapsed + max(_GRACE_SECONDS, 8 * elapsed))
            elapsed += wait_awake(pending, limit - elapsed, first=True)
        results: dict[str, T | Exception] = {}
        for device, future in futures.items():
            if future.done():
                answer = outcome(future, device, elapsed)
                results[device] = answer
            else:
                results[device] = no_answer(device, elapsed)
                self._store.metrics.count("register_device_late_total")
                with self._lock:
                    self._late[device] = future  # type: ignore[assignment]  # they are invariant
                late(device, future)
        return results

    def _drop_answer(self, future: Future[tuple[int, Hold]]) -> None:
        if future.exception() is None:
            self._let_go(future.result()[1])

    def _let_go(self, hold: Hold) -> None:
        hold.release()
        self._live.discard(hold)

    def _let_go_after(self, hold: Hold, _: Future[object]) -> None:
        self._let_go(hold)

    def release(self, holds: Mapping[str, Hold]) -> None:
        """On their lanes: closing a file of some filesystems waits for them."""
        futures = []
        for device, hold in holds.items():
            try:
                future = self._store.scheduler.submit(device, lambda h=hold: self._let_go(h))  # type: ignore[misc]
            except AlreadyClosed:
                self._let_go(hold)
                continue
            if future.done() and isinstance(future.exception(), DeviceTimeout):
                with self._lock:
                    hung = self._late.get(device)
                if hung is not None:  # at once, if it has ended by now
                    hung.add_done_callback(partial(self._let_go_after, hold))
                    continue
                release = threading.Thread(
                    target=self._let_go, args=(hold,), name="hpstore-release", daemon=True
                )
                try:
                    start_thread(release)
                except ThreadsExhausted:  # to close it could wait for ever
                    continue
            else:
                futures.append(future)
        wait_awake(futures, _GRACE_SECONDS)

    def write(
        self, holds: dict[str, Hold], data: Mapping[str, tuple[int, bytes]], need: int
    ) -> set[str]:
        """Write, and go on when `need` have; those that have it. A late one is taken out of
        `holds`, and released when its write has ended."""

        def late(device: str, future: Future[None]) -> None:
            hold = holds.pop(device)
            future.add_done_callback(lambda _: self._let_go(hold))

        calls = {d: _writing(holds[d], *where) for d, where in data.items()}
        limit = self._store.settings.device_deadline_seconds
        begun: dict[str, Future[None]] = {}
        try:
            results = self._gather(calls, need, limit, late, brief="write", into=begun)
        except BaseException:  # Ctrl-C: a lock stays while its write is made
            for device in _under_way(begun) & holds.keys():
                late(device, begun[device])
            raise
        return {d for d, result in results.items() if not isinstance(result, Exception)}

    def _finishing(
        self, device: Device | None, hold: Hold, offset: int, copy: bytes
    ) -> Callable[[], None]:
        """Write and release as a call."""

        def call() -> None:
            try:
                hold.finish(offset, copy)
            finally:
                self._live.discard(hold)

        def begin() -> Sent[None] | None:
            sent = begin_finish(device, hold, offset, copy)
            return None if sent is None else sent.with_finish(partial(ended, sent))

        def ended(sent: Sent[None]) -> None:
            try:
                sent.finish()
            except Unfinished:
                raise
            except Exception as error:
                raise Unfinished(partial(self._released, hold, error)) from error
            self._live.discard(hold)

        return call if device is None or host_disk(device) is None else SplitCall(begin, call)

    def _released(self, hold: Hold, error: Exception) -> None:
        self._let_go(hold)
        raise error

    def finish(
        self,
        holds: Mapping[str, Hold],
        data: Mapping[str, tuple[int, bytes]],
        members: Collection[str],
        name: str,
    ) -> None:
        """Write, and release each device when it has it, in one call on it."""

        devices = self._store.view.devices
        calls = {d: self._finishing(devices.get(d), holds[d], *where) for d, where in data.items()}
        limit = self._store.settings.device_deadline_seconds
        begun: dict[str, Future[None]] = {}
        try:
            results = self._gather(
                calls,
                majority(members),
                limit,
                lambda *_: None,
                brief="write and unlock",
                into=begun,
            )
        except BaseException:
            for device in holds.keys() - _under_way(begun):  # those let go when they have written
                self._let_go(holds[device])
            raise
        ended = holds.keys() - self.late()
        self.release({d: holds[d] for d in ended if holds[d].taken})  # never came to its lane
        done = [d for d, result in results.items() if not isinstance(result, Exception)]
        if len(done) < majority(members):
            raise RegistersUnavailable(
                f"register {name} was written on {len(done)} of {len(members)} devices, more than "
                "half are needed to be certain: it may count or not. Objects are untouched; bring "
                "devices back and try again."
            )


def _under_way(calls: Mapping[str, Future[None]]) -> set[str]:
    """Devices whose calls have not ended."""
    return {device for device, call in calls.items() if not call.done()}


def _writing(hold: Hold, offset: int, data: bytes) -> Callable[[], None]:
    return lambda: hold.write(offset, data)


def lock_timeout(
    store: PoolContext, what: str, limit_seconds: float, found: LockAttempt, holder: str = ""
) -> LockTimeout:
    """The error for a lock that another process has."""
    devices = store.view.devices
    where = ", ".join(devices[d].url for d in sorted(found.busy) if d in devices)
    return LockTimeout(
        f"{what}: {holder or 'another process'} holds its lock on {where or 'the devices'} for "
        f"more than {limit_seconds:.1f} s. Nothing was changed. Try again; if that process is "
        "stopped for good, end it: its locks go with it."
    )


def unavailable(
    what: str, answering: int, need: int, members: int, found: LockAttempt
) -> RegistersUnavailable:
    """The error for too few devices that can be locked."""
    reasons = "; ".join(str(error) for error in found.failed.values())
    return RegistersUnavailable(
        f"{what}: {answering} of {members} devices can be locked, {need} are needed. Nothing was "
        f"changed, and reading goes on. Bring devices back, or make them writable for this user "
        f"(file_mode): {reasons or 'they are missing'}"
    )
