"""What save() returns, and what becomes of it."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass, replace
from typing import TypeVar

from hpstore.errors import CheckpointError

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport:
    """A committed save, durable on at least m + 1 devices. It survives `losses_tolerated` further
    losses; every object of it may lose `spare_columns`, though the pool may then not open."""

    step: int
    key: str  # of the manifest
    bytes: int  # stored by all ranks for this step
    referenced_bytes: int  # that an earlier step holds, unchanged, and were not written again
    staged_seconds: float  # how long save() kept the trainer
    durable_seconds: float  # from the call of save() to the commit
    losses_tolerated: int
    spare_columns: int

    def with_stall(self, seconds: float) -> SaveReport:
        """The same, with what save() took on this rank."""
        return replace(self, staged_seconds=seconds)

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


class SaveHandle:
    """A save on its way, as Checkpointer.save() returns it. Thread-safe.

    Attributes
    ----------
    step
        Completed steps that it holds.
    staged_seconds
        How long save() kept the trainer.
    skipped
        There is no save, as another one was under way (on_busy="skip"). Then done() is true and
        result() raises CheckpointError.
    """

    def __init__(
        self,
        step: int,
        staged_seconds: float,
        future: Future[SaveReport],
        *,
        late_seconds: Callable[[], float] = lambda: 0.0,
        skipped: bool = False,
    ) -> None:
        self.step, self.staged_seconds, self.skipped = step, staged_seconds, skipped
        self.delivered = False  # its error was raised to somebody
        self._future, self._late_seconds, self._pid = future, late_seconds, os.getpid()

    @classmethod
    def of_skipped(cls, step: int) -> SaveHandle:
        """Stands for a save that was not begun."""
        future: Future[SaveReport] = Future()
        future.set_exception(
            CheckpointError(f"the save of step {step} was skipped: another was under way")
        )
        return cls(step, 0.0, future, skipped=True)

    @property
    def visible_stall_seconds(self) -> float:
        """Time that training has lost: in save() and, with overlap, in the optimizer's hook."""
        return self.staged_seconds + self._late_seconds()

    @property
    def foreign(self) -> bool:
        """Whether this process is a fork of the one that saves: the save's thread is not here."""
        return self._pid != os.getpid()

    def done(self) -> bool:
        """Whether it is committed or has failed."""
        return self._future.done()

    def settled(self, timeout: float | None = None) -> bool:
        """Wait until it is committed or has failed, raising nothing of it.

        Parameters
        ----------
        timeout
            Seconds to wait at most. Default: without a limit.

        Returns
        -------
        bool
            False when it takes longer, or is saved by the process that this one is a fork of.
        """
        if self.foreign and not self.done():
            return False
        return self._future in wait([self._future], timeout).done

    def outcome(self) -> SaveReport | BaseException | None:
        """Return its report, or what went wrong in it; None while it is under way.

        For those who watch: unlike after result(), the Checkpointer still raises an error.
        """
        if not self.done():
            return None
        return self._future.exception() or self._future.result()

    def result(self, timeout: float | None = None) -> SaveReport:
        """Wait until the save is durable.

        Parameters
        ----------
        timeout
            Seconds to wait at most. Default: without a limit.

        Returns
        -------
        SaveReport
            What was stored, and how many losses it survives.

        Raises
        ------
        TimeoutError
            It takes longer. The save goes on.
        CheckpointError
            This process is a fork of the one that saves, or the save was skipped or failed.
        HpstoreError
            What else went wrong in the save. The message says which step is still current.
        """
        if self.foreign and not self.done():
            raise CheckpointError(
                f"step {self.step} is being saved by process {self._pid}, of which this one is a "
                "fork: only that process can wait for it. The save itself goes on there."
            )
        if self._future not in wait([self._future], timeout).done:
            raise TimeoutError(f"the save of step {self.step} is not done after {timeout} s")
        self.delivered = True  # not after a timeout: it may fail in that very moment
        return self._future.result()


def guarded(
    action: Callable[[], T],
    future: Future[T],
    ended: Callable[[BaseException | None], None] = lambda error: None,
) -> None:
    """Run a part of a save on its thread, its outcome into the future; before that `ended` gets
    the error, or None."""
    try:
        outcome = action()
    except BaseException as error:  # noqa: BLE001 (raised again by result, save, wait, close)
        ended(error)
        forget_frames(error)
        future.set_exception(error)
    else:
        ended(None)
        future.set_result(outcome)


def forget_frames(error: BaseException | None) -> None:
    """Let go what the frames of an error and of its causes hold: the whole state, for one that is
    kept. Its traceback stays."""
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
