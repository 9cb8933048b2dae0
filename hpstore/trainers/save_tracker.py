"""What each save was like, for TensorBoard, Weights & Biases, or any writer with their methods."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from typing import Any

from hpstore.checkpoint import SaveHandle, SaveReport

_log = logging.getLogger(__name__)
_MOST_WAITING = 256  # saves that are not over yet; a Checkpointer has one


class SaveTracker:
    """Log stall, durable seconds, bytes and losses tolerated of each save.

        track = SaveTracker(SummaryWriter("runs/gpt"))  # or of wandb.init(mode="offline")
        track(ckpt.save(step, state))
        ...
        track.close()

    A call returns at once and logs the saves that are over by then, so a save shows at the next
    call or in close(). A writer that fails ends no training: that is logged once, and counted in
    `errors`. What goes wrong in a save is still raised by the Checkpointer. Of several ranks one
    tracks. One thread at a time. Neither package is imported here.

    Parameters
    ----------
    writer
        What has `add_scalar(name, value, step)`, as TensorBoard's SummaryWriter, or `log(dict)`, as
        a run of Weights & Biases or its module. It stays the caller's.
    prefix
        What the names begin with, before a slash.

    Raises
    ------
    TypeError
        The writer has neither method.
    """

    def __init__(self, writer: Any, *, prefix: str = "checkpoint") -> None:  # Any: of any package
        if not callable(getattr(writer, "add_scalar", None)) and not callable(
            getattr(writer, "log", None)
        ):
            raise TypeError(
                f"{type(writer).__name__} is no writer: it has neither add_scalar(name, value, "
                "step) nor log(dict)"
            )
        self._writer, self._prefix = writer, prefix
        self._waiting: deque[SaveHandle] = deque()
        self._defined = False  # the x axis of Weights & Biases
        self.errors = 0

    def __call__(self, handle: SaveHandle) -> None:
        """Log this save once it is over, and others that are over now.

        Parameters
        ----------
        handle
            As Checkpointer.save() returns it.
        """
        self._waiting.append(handle)
        if len(self._waiting) > _MOST_WAITING:
            lost = self._waiting.popleft()
            _log.warning("the save of step %d is not tracked: too many are waiting", lost.step)
        self._drain()

    def close(self, timeout: float | None = None) -> None:
        """Wait for the saves under way and log them. The writer is not closed. Idempotent.

        Parameters
        ----------
        timeout
            Seconds to wait for each at most. Default: without a limit. What is not over then is
            left for another call.
        """
        for handle in self._waiting:
            handle.settled(timeout)
        self._drain()

    def _drain(self) -> None:
        over = [handle for handle in self._waiting if handle.done()]
        self._waiting = deque(handle for handle in self._waiting if handle not in over)
        for handle in over:
            self._write(handle.step, metrics_of(handle))

    def _write(self, step: int, metrics: Mapping[str, float]) -> None:
        named = {f"{self._prefix}/{name}": value for name, value in metrics.items()}
        try:
            if callable(getattr(self._writer, "add_scalar", None)):
                for name, value in named.items():
                    self._writer.add_scalar(name, value, step)
            else:
                self._write_row({f"{self._prefix}/step": step, **named})
        except Exception as error:  # noqa: BLE001 (of any package; a chart must not end a training)
            if not self.errors:
                _log.warning("the save of step %d was not tracked: %s", step, error)
            self.errors += 1

    def _write_row(self, row: Mapping[str, float]) -> None:
        """One call of log(). To Weights & Biases without a commit: a row of its own would move its
        step on, and what the trainer logs for the current step after that would be dropped."""
        if not callable(getattr(self._writer, "define_metric", None)):
            self._writer.log(dict(row))
            return
        if not self._defined:
            axis = f"{self._prefix}/step"
            self._writer.define_metric(axis)
            self._writer.define_metric(f"{self._prefix}/*", step_metric=axis)
            self._defined = True
        self._writer.log(dict(row), commit=False)


def metrics_of(handle: SaveHandle) -> dict[str, float]:
    """Numbers of a save that is over, by name. Raises nothing of the save."""
    found: dict[str, float] = {
        "stall_seconds": handle.visible_stall_seconds,
        "failed": 0.0,
        "skipped": float(handle.skipped),
    }
    outcome = handle.outcome()
    if isinstance(outcome, SaveReport):
        found |= {
            "durable_seconds": outcome.durable_seconds,
            "bytes": float(outcome.bytes),
            "referenced_bytes": float(outcome.referenced_bytes),
            "losses_tolerated": float(outcome.losses_tolerated),
        }
    elif not handle.skipped:
        found["failed"] = 1.0
    return found
