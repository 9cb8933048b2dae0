"""Gates that hold copies back while a pipeline computes."""

from __future__ import annotations

import threading

import pytest
import torch

from hpstore.checkpoint.save.copy_gate import CopyGate
from hpstore.checkpoint.save.host_copy import PIECE_BYTES
from hpstore.checkpoint.save.staging_memory import _plain_copy
from hpstore.trainers.pipelining.events import EventRecorder


def noting_waits(gate: CopyGate) -> threading.Event:
    """Set when a copy waits at the gate."""
    arrived = threading.Event()

    class Noting(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            arrived.set()
            return super().wait(timeout)

    gate._opened = Noting()
    return arrived


def test_a_shut_gate_holds_a_copy_until_it_is_opened() -> None:
    """And counts by when a piece began; one that does not block only counts."""
    gate = CopyGate(blocks=True)
    arrived = noting_waits(gate)
    gate.shut()

    def copy() -> None:
        gate.enter()
        gate.copied(5)

    thread = threading.Thread(target=copy)
    thread.start()
    assert arrived.wait(60)
    assert gate.idle_bytes == gate.busy_bytes == 0
    gate.open()
    thread.join(60)
    assert (gate.idle_bytes, gate.busy_bytes) == (5, 0)
    free = CopyGate(blocks=False)
    free.shut()
    free.enter()
    free.copied(3)
    assert (free.idle_bytes, free.busy_bytes) == (0, 3)


def test_a_gate_that_stays_shut_is_passed_in_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a trainer that died while it computed: counted each time, logged once."""
    monkeypatch.setattr("hpstore.checkpoint.save.copy_gate.PATIENCE_SECONDS", 0.001)
    gate = CopyGate(blocks=True)
    gate.shut()
    for _ in range(2):
        gate.enter()
        gate.copied(7)
    assert (gate.overdue_total, gate.busy_bytes) == (2, 14)
    assert caplog.text.count("do not wait") == 1


@pytest.mark.parametrize("moment", ["clear", "wait"])
def test_a_gate_that_opens_while_a_copy_arrives_lets_it_through(
    moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind its first look and before its second, or behind that: no lock keeps them apart."""
    monkeypatch.setattr("hpstore.checkpoint.save.copy_gate.PATIENCE_SECONDS", 0.01)
    gate = CopyGate(blocks=True)

    class Opening(threading.Event):
        def clear(self) -> None:
            super().clear()
            if moment == "clear":
                gate.open()

        def wait(self, timeout: float | None = None) -> bool:
            if moment == "wait":
                gate.open()
            return super().wait(timeout)

    gate._opened = Opening()
    for _ in range(2):
        gate.shut()
        gate.enter()
        gate.copied(7)
    assert (gate.overdue_total, gate.idle_bytes, gate.busy_bytes) == (0, 14, 0)
    assert not gate.awaited


def test_a_strided_tensor_is_copied_behind_the_gate_too() -> None:
    """It cannot be cut into pieces: it is one, which waits and is counted."""
    gate = CopyGate(blocks=True)
    arrived = noting_waits(gate)
    gate.shut()
    source = torch.arange(200_000, dtype=torch.float32).reshape(400, 500).t()
    target = torch.zeros(500, 400)
    thread = threading.Thread(target=_plain_copy, args=(target, source, gate))
    thread.start()
    assert arrived.wait(60)
    assert not target.any()
    gate.open()
    thread.join(60)
    assert torch.equal(target, source)
    assert (gate.idle_bytes, gate.busy_bytes) == (source.nbytes, 0)
    flat = torch.ones(3 * PIECE_BYTES // 8)
    _plain_copy(torch.zeros_like(flat), flat, gate)
    assert gate.idle_bytes == source.nbytes + flat.nbytes


def test_a_recorder_opens_the_gate_whatever_happens() -> None:
    """Shut in a call, open between calls and behind a step that broke off; events outside a step
    are counted, not kept."""
    gate = CopyGate(blocks=True)
    recorder = EventRecorder(gate)
    recorder.end(0, "F", 0, recorder.begin())
    assert recorder.events_outside == 1
    recorder.begin_step()
    began = recorder.begin()
    assert gate.is_shut
    recorder.end(1, "I", 3, began)
    assert not gate.is_shut
    recorder.begin()
    (event,) = recorder.end_step()
    assert not gate.is_shut
    assert (event.stage, event.kind, event.microbatch) == (1, "I", 3)
    assert event.begin <= event.end
    assert recorder.hook_seconds > 0
