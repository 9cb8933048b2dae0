"""Processes over the same memory devices that run in turns: stopped before any device operation."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from hpstore.devices.base import Device
from hpstore.devices.wrappers import DeviceWrapper
from hpstore.pool.pool import Pool
from hpstore.testing.memory_pool import FakeClock, Harness

T = TypeVar("T")
_LIMIT_SECONDS = 60.0  # of real time, for a test that hangs


class TurnProcess:
    """A pool with a clock of its own, and a job that runs so many operations when it is told to."""

    def __init__(self, harness: Harness, *, ahead_ms: int = 0) -> None:
        self.clock = FakeClock(1_700_000_000_000 + ahead_ms)
        known, harness.clock = harness.clock, self.clock
        self._turns = -1  # so many operations may be made, -1: any number
        self._mine, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self.outcome: object = None
        self.running = False
        self.steps, self.coming = 0, ""
        self._thread: threading.Thread | None = None
        self.pool: Pool = harness.open(lambda _, device: _Stepping(device, self))
        harness.clock = known

    def start(self, job: Callable[[Pool], object]) -> None:
        """Prepare a job; it runs with `run`. Its result, or its error, becomes `outcome`."""

        def work() -> None:
            assert self._mine.acquire(timeout=_LIMIT_SECONDS)
            try:
                self.outcome = job(self.pool)
            except Exception as error:  # noqa: BLE001 (looked at by the test)
                self.outcome = error
            self.running = False
            self._back.release()

        self.running, self.steps, self._turns = True, 0, 0
        self._thread = threading.Thread(target=work, name="turn")
        self._thread.start()

    def run(self, operations: int = -1) -> None:
        """Let the job make so many operations, or go on to its end."""
        if self.running and operations:
            self._turns = operations
            self._mine.release()
            assert self._back.acquire(timeout=_LIMIT_SECONDS), "the job hangs"

    def run_to(self, operation: str) -> None:
        """Let the job go on until its next operation is one of these."""
        self.run(1)
        while self.running and self.coming != operation:
            self.run(1)

    def step(self, operation: str) -> None:
        """Called before each operation."""
        if not self.running or threading.current_thread() is not self._thread:
            return
        self.coming = operation
        if self._turns == 0:
            self._back.release()
            assert self._mine.acquire(timeout=_LIMIT_SECONDS)
        self._turns -= 1
        self.steps += 1

    def end(self) -> None:
        """Let the job end; close the pool."""
        self.run()
        if self._thread is not None:
            self._thread.join(_LIMIT_SECONDS)
        self.pool.close()


class _Stepping(DeviceWrapper):
    def __init__(self, inner: Device, process: TurnProcess) -> None:
        super().__init__(inner)
        self._process = process

    def around(self, operation: str, nbytes: int, call: Callable[[], T]) -> T:
        self._process.step(operation)
        return call()
