"""Progress of saves, restores and verifications, and the line that shows it on a terminal."""

from __future__ import annotations

import io

import pytest
import torch

import hpstore
from hpstore.checkpoint import Checkpointer, SaveOptions, TerminalBar
from hpstore.checkpoint.restore.byte_meter import ByteMeter
from hpstore.units import MIB

RUN = "run"
Calls = list[tuple[int, int]]


def state_of(value: float) -> dict[str, torch.Tensor]:
    """Of several tensors: two are read in pieces, by two threads where they are in memory."""
    sizes = {"a": 2_000_000, "b": 9, "c": 1_000_000}
    return {name: torch.full((size,), value) for name, size in sizes.items()}


def rises_to_all(seen: Calls) -> bool:
    """Each call says more than the one before, the last one all."""
    done = [count for count, _ in seen]
    return (
        done == sorted(set(done)) and len({n for _, n in seen}) == 1 and seen[-1][0] == seen[-1][1]
    )


@pytest.mark.parametrize(
    "options", [SaveOptions(warm=False), SaveOptions(), SaveOptions(compression="zstd")]
)
def test_a_restore_says_how_far_it_is(pool: hpstore.Pool, options: SaveOptions) -> None:
    """From disks, from memory, compressed: in pieces, up to all that it reads."""
    seen: Calls = []
    with Checkpointer(pool, RUN, rng=False, save=options) as ckpt:
        ckpt.save(1, state_of(1.0)).result()
        state = state_of(0.0)
        assert ckpt.restore(state, progress=lambda *step: seen.append(step)) == 1
        stored = sum(item.length for item in ckpt.steps.manifest(1).items)
    assert torch.equal(state["a"], state_of(1.0)["a"])
    assert rises_to_all(seen)
    assert seen[-1][1] >= stored
    assert len(seen) > 3 or stored < 1_000_000  # in pieces; compressed it is one


def test_a_restore_of_small_tensors_ends_at_all(pool: hpstore.Pool) -> None:
    """Within the manifest, and of several segments."""
    seen: Calls = []
    with Checkpointer(pool, RUN) as ckpt:
        ckpt.save(1, {"a": torch.zeros(5)}).result()
        ckpt.restore({"a": torch.ones(5)}, progress=lambda *step: seen.append(step))
    assert rises_to_all(seen)


def test_a_restore_of_several_segments_counts_them_together(pool: hpstore.Pool) -> None:
    seen: Calls = []
    frozen = torch.zeros(1_000_000)
    with Checkpointer(pool, RUN, rng=False, save=SaveOptions(warm=False)) as ckpt:
        for step in (1, 2):
            ckpt.save(step, {"frozen": frozen, "free": torch.full((1_000_000,), step)}).result()
        assert len(ckpt.steps.manifest(2).segments) == 2
        ckpt.restore(
            {"frozen": frozen, "free": torch.zeros(1_000_000, dtype=torch.int64)},
            progress=lambda *step: seen.append(step),
        )
    assert rises_to_all(seen)
    assert seen[-1][1] == 12_000_000


def test_what_is_read_again_counts_once() -> None:
    """A read that begins again, as after a device is lost, takes nothing back."""
    seen: Calls = []
    meter = ByteMeter(lambda *step: seen.append(step), 100)
    for count in (40, 40, 40, 5):
        meter.add(count)
    assert seen == [(40, 100), (80, 100), (100, 100)]


class Terminal(io.StringIO):
    """What a bar is shown on."""

    def __init__(self, *, terminal: bool = True) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal

    def lines(self) -> list[str]:
        return self.getvalue().split("\r\x1b[K")[1:]


class Clock:
    """Seconds that a test moves."""

    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


def test_a_terminal_gets_one_line_that_goes() -> None:
    """Amount at once, rate and time left when they are no guess; the end clears it; then it can
    begin again."""
    stream, clock = Terminal(), Clock()
    bar = TerminalBar("save", stream=stream, clock=clock)
    for seconds, done in ((0.0, 10), (0.05, 20), (1.0, 30), (2.0, 100)):
        clock.now = 60.0 + seconds
        bar(done * MIB, 100 * MIB)
    assert stream.lines() == [
        "save: 10 %, 10.0 MiB/100.0 MiB",
        "save: 30 %, 30.0 MiB/100.0 MiB, 30.0 MiB/s, 2 s left",
        "",
    ]
    clock.now = 90.0
    bar(5, 10)
    assert stream.lines()[-1] == "save: 50 %, 5 B/10 B"


def test_nothing_but_a_terminal_gets_anything() -> None:
    stream = Terminal(terminal=False)
    bar = TerminalBar("save", stream=stream)
    bar(1, 2)
    bar(2, 2)
    assert stream.getvalue() == ""


def test_a_closed_stream_ends_no_save(pool: hpstore.Pool) -> None:
    stream = Terminal()
    stream.close()
    bar = TerminalBar("save", stream=stream)
    with Checkpointer(pool, RUN) as ckpt:
        ckpt.save(1, state_of(1.0), progress=bar).result()
        assert ckpt.restore(state_of(0.0), progress=bar) == 1
        assert ckpt.verify(1, progress=bar).ok


def test_nothing_to_do_is_no_division() -> None:
    stream = Terminal()
    TerminalBar("save", stream=stream)(0, 0)
    assert stream.lines() == [""]
