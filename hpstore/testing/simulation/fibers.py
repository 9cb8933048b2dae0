"""Threads of which one runs at a time: it resumes another, which hands back when it pauses or ends.

Threads and not greenlets, as no dependency is needed for them: a simulation switches only where a
schedule says so, a few times in an operation, and a switch takes about 10 microseconds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


def _closed_gate() -> threading.Lock:
    """A lock that is taken: the next who takes it waits until it is released."""
    gate = threading.Lock()
    gate.acquire()
    return gate


class Fiber:
    """A call that can be left in the middle and taken up again. Its thread is used for others
    afterwards."""

    def __init__(self, crew: Crew, name: str, call: Callable[[], None]) -> None:
        self.name, self.done = name, False
        self.error: BaseException | None = None
        self._crew, self._call = crew, call
        self.parent: Fiber | None = None  # who resumed it
        self._worker: _Worker | None = None

    def resume(self) -> None:
        """Run it until it pauses or ends. Raises what it raised, once."""
        if self.done:
            raise RuntimeError(f"{self.name} has ended")
        crew = self._crew
        self.parent, crew.running = crew.running, self
        worker = self._worker = self._worker or crew.hire()
        worker.run(self, crew.gate_of(self.parent))
        crew.running = self.parent
        if self.done:
            crew.release(worker)
            self._worker = None
        error, self.error = self.error, None
        if error is not None:
            raise error

    def pause(self) -> None:
        """Called by the fiber itself: go back to who resumed it, until it is resumed again."""
        assert self._worker is not None
        assert self._crew.running is self
        self._crew.gate_of(self.parent).release()
        self._worker.gate.acquire()

    def work(self) -> None:
        """The call. By its thread."""
        try:
            self._call()
        except BaseException as error:  # noqa: BLE001 (handed to who resumed it)
            self.error = error
        self.done = True
        self._crew.gate_of(self.parent).release()

    @property
    def worker(self) -> _Worker:
        """The thread that it has."""
        assert self._worker is not None
        return self._worker


class _Worker:
    """A thread that runs one fiber after another."""

    def __init__(self, number: int) -> None:
        self.gate = _closed_gate()
        self._fiber: Fiber | None = None
        self._stop = False
        self._begun = False
        self._thread = threading.Thread(target=self._loop, name=f"fiber-{number}", daemon=True)
        self._thread.start()

    def run(self, fiber: Fiber, back: threading.Lock) -> None:
        """Let the thread go on, and wait until it hands back."""
        self._fiber = fiber
        self.gate.release()
        back.acquire()

    def _loop(self) -> None:
        while True:
            self.gate.acquire()
            if self._stop:
                return
            fiber, self._fiber = self._fiber, None
            if fiber is not None:
                fiber.work()

    def stop(self) -> None:
        """End the thread, which runs nothing."""
        self._stop = True
        self.gate.release()
        self._thread.join()


class Crew:
    """The threads of one simulation, and which fiber runs; None for the caller of it all."""

    def __init__(self) -> None:
        self.running: Fiber | None = None
        self._gate = _closed_gate()
        self._idle: list[_Worker] = []
        self._count = 0

    def gate_of(self, fiber: Fiber | None) -> threading.Lock:
        """What a fiber, or the caller, waits at."""
        return self._gate if fiber is None else fiber.worker.gate

    def hire(self) -> _Worker:
        """An idle thread, or a new one."""
        if self._idle:
            return self._idle.pop()
        self._count += 1
        return _Worker(self._count)

    def release(self, worker: _Worker) -> None:
        """A thread whose fiber has ended."""
        self._idle.append(worker)

    def close(self) -> None:
        """End all threads; every fiber has ended."""
        while self._idle:
            self._idle.pop().stop()
