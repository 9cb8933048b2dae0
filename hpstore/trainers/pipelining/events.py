"""What a rank computes, and when: one event a call of a stage's compute methods.

Kinds are those of torch's schedules: F forward, B full backward, I backward for the inputs alone, W
backward for the weights, R the reduction and scaling of gradients at the end of a step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from hpstore.checkpoint.save.copy_gate import CopyGate

_log = logging.getLogger(__name__)
KINDS = ("F", "B", "I", "W", "R")
NO_MICROBATCH = -1  # of R


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeEvent:
    """One call. Seconds of time.perf_counter(): alike for the processes of one host.

    On a GPU it spans the launch of the work, not the work.
    """

    stage: int
    kind: str
    microbatch: int
    begin: float
    end: float


class EventRecorder:
    """Notes the events of one step and shuts the gate of background copies meanwhile.

    For the training thread. Never raises into the schedule: what an observer raises is counted and
    logged once.
    """

    def __init__(self, gate: CopyGate) -> None:
        self.gate = gate
        self.hook_seconds = 0.0  # spent here, in this step
        self.observer_errors_total = 0
        self.before_first: Callable[[], None] | None = None  # called once, before the next event
        self.observers: list[Callable[[ComputeEvent], None]] = []
        self.recording = False  # between begin_step() and end_step()
        self.events_outside = 0  # seen while not recording: an evaluation, a loop of the user's
        self._seen: list[tuple[int, str, int, float, float]] = []

    def begin_step(self) -> None:
        """Forget the step before."""
        self._seen, self.hook_seconds, self.recording = [], 0.0, True

    def end_step(self) -> tuple[ComputeEvent, ...]:
        """The events of the step, in order. Also after an error in it: copies may go on."""
        began = time.perf_counter()
        self.recording = False
        self.gate.open()
        events = tuple(_event(*seen) for seen in self._seen)
        self.hook_seconds += time.perf_counter() - began
        return events

    def begin(self) -> float:
        """A compute call begins; its time."""
        entered = time.perf_counter()
        self.gate.shut()
        if self.before_first is not None:
            first, self.before_first = self.before_first, None
            self._guarded(first)
        began = time.perf_counter()
        self.hook_seconds += began - entered
        return began

    def end(self, stage: int, kind: str, microbatch: int, began: float) -> None:
        """It has ended, well or not."""
        ended = time.perf_counter()
        self.gate.open()
        if not self.recording:
            self.events_outside += 1
            return
        self._seen.append((stage, kind, microbatch, began, ended))
        if self.observers:
            event = _event(stage, kind, microbatch, began, ended)
            for observer in self.observers:
                self._guarded(partial(observer, event))
        self.hook_seconds += time.perf_counter() - ended

    def _guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 (a schedule that is left in the middle hangs its peers)
            self.observer_errors_total += 1
            if self.observer_errors_total == 1:
                _log.exception("a hook of the pipeline failed, the step goes on: %s", error)


def _event(stage: int, kind: str, microbatch: int, begin: float, end: float) -> ComputeEvent:
    return ComputeEvent(stage=stage, kind=kind, microbatch=microbatch, begin=begin, end=end)
