"""The one progress bar: each kind of callback moves it, and rates count what was done meanwhile."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from rich.console import Console
from rich.progress import Progress

from hpstore.cli.progress_bar import Bar
from hpstore.maintenance.rebuild import Progress as Step
from hpstore.units import MIB


@dataclass(frozen=True)
class Count:
    records: int
    total: int | None
    bytes: int
    estimated: bool = False


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr("hpstore.cli.progress_bar.time.monotonic", lambda: now[0])
    return now


def test_every_kind_of_callback_shows_amount_and_rate(clock: list[float]) -> None:
    """Objects, bytes, parts of bytes, steps; after ten seconds, from the beginning."""
    moved: dict[str, Callable[[Bar], None]] = {
        "objects": lambda bar: bar.objects(Step(done=3, total=9, bytes=20 * MIB, key="k")),
        "bytes": lambda bar: bar.of_bytes(20 * MIB, 40 * MIB),
        "parts": lambda bar: bar.advance(20 * MIB, 40 * MIB),
        "steps": lambda bar: bar.steps(3, 9),
    }
    found = {}
    for name, move in moved.items():
        shown = Progress(console=Console(file=io.StringIO()))
        bar = Bar(name, shown)
        clock[0] += 10
        move(bar)
        clock[0] += 10
        move(bar)
        (task,) = shown.tasks
        found[name] = (task.completed, task.total, task.fields["amount"], task.fields["rate"])
    assert found == {
        "objects": (3, 9, "3/9", "1.0 MiB/s"),
        "bytes": (20 * MIB, 40 * MIB, "20.0 MiB/40.0 MiB", "1.0 MiB/s"),
        "parts": (40 * MIB, 40 * MIB, "40.0 MiB/40.0 MiB", "2.0 MiB/s"),
        "steps": (3, 9, "3/9", ""),
    }


def test_samples_that_were_there_before_have_no_rate(clock: list[float]) -> None:
    """An ingest that is resumed at 1000 of 2000: 50 more in ten seconds are 5 per second."""
    shown = Progress(console=Console(file=io.StringIO()))
    bar = Bar("ingest", shown)
    bar.samples(Count(1000, 2000, 1000 * MIB))
    clock[0] += 10
    bar.samples(Count(1050, 2000, 1050 * MIB))
    (task,) = shown.tasks
    assert (task.completed, task.total) == (1050, 2000)
    assert task.fields["rate"] == "5/s 5.0 MiB/s"
    clock[0] += 10
    bar.samples(Count(1060, None, 1060 * MIB))
    assert task.fields["amount"] == "1060/?"
    clock[0] += 10
    bar.samples(Count(1070, 3000, 1070 * MIB, estimated=True))
    assert task.fields["amount"] == "1070/~3000"
    assert task.total == 3000


def test_a_bar_is_drawn_ten_times_per_second_and_at_the_end(clock: list[float]) -> None:
    """Small objects come by the thousand per second: drawing each would cost more than the work."""
    shown = Progress(console=Console(file=io.StringIO()))
    bar = Bar("put", shown)
    for step in range(1, 100):
        clock[0] += 0.001
        bar.of_bytes(step, 100)
    assert shown.tasks[0].completed == 0
    bar.of_bytes(100, 100)
    assert shown.tasks[0].completed == 100
