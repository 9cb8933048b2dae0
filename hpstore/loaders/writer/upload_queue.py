"""Objects of a dataset on their way to the pool, one at a time behind the writer's back."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait

from hpstore.runtime.closing import Closing
from hpstore.runtime.threads import WorkerThreads


class Uploads(Closing):
    """Runs one job at a time on a thread of its own; at most one waits or runs.

    The first failure is raised by the next call and by every one after it.
    """

    def __init__(self) -> None:
        self._executor: WorkerThreads | None = None
        self._flying: Future[None] | None = None
        self._failed: BaseException | None = None

    def submit(self, job: Callable[[], None]) -> None:
        """Wait for the job before, then start this one."""
        self.settle()
        if self._executor is None:
            self._executor = WorkerThreads(1, "hpstore-dataset")
        self._flying = self._executor.submit(job)

    def settle(self) -> None:
        """Wait until nothing is under way. Raises what a job raised."""
        flying, self._flying = self._flying, None
        if flying is not None:
            try:
                wait([flying])
            except BaseException:
                self._flying = flying  # the wait was interrupted: the job still runs
                raise
            self._failed = self._failed or flying.exception()
        if self._failed is not None:
            raise self._failed

    def close(self) -> None:
        """Wait for what is under way, whatever comes of it. Idempotent."""
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=True)
