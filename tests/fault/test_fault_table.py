"""The fault suite cannot pass by itself: rows are kept, proofs fail without a fault."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import cast

import pytest

from hpstore.testing.fuse import FaultRule
from tests.fault.common import forked
from tests.fault.suite.faults import flap, hanging, misbehave, refused
from tests.fault.suite.rig import Rig
from tests.fault.suite.table import Row, Table, latency
from tests.fault.suite.workload import Gate, Plan, Read, Reader, Trainer

pytestmark = [pytest.mark.fault]


def test_each_row_is_written_before_the_next_one_begins(tmp_path: Path) -> None:
    """Also one that raises, as a time limit of pytest does; a cell is one line."""
    table = Table(tmp_path / "build" / "faults.md")
    with table.row("first", "by hand") as row:
        row.note = "a note"
    text = (tmp_path / "build" / "faults.md").read_text()
    assert "| first | by hand | - | - | - | - | - | ok, a note |" in text
    with pytest.raises(pytest.fail.Exception), table.row("second", "a limit"):
        pytest.fail("Timeout > 280 s\nand | a page of stacks" + 1000 * "x")
    text = (tmp_path / "build" / "faults.md").read_text()
    assert "| FAILED: Failed: Timeout > 280 s and / a page" in text.splitlines()[-1]
    raw = json.loads((tmp_path / "build" / "faults.json").read_text())
    assert [found["fault"] for found in raw] == ["first", "second"]
    assert raw[1]["failures"][0].startswith("Failed: Timeout > 280 s\nand")


def test_row_that_was_skipped_says_why(tmp_path: Path) -> None:
    table = Table(tmp_path / "faults.md")
    table.add(Row(fault="XFS", method="ioctl", skipped="needs mkfs.xfs"))
    assert "| skipped: needs mkfs.xfs |" in (tmp_path / "faults.md").read_text()


def test_latencies_are_quantiles_of_all_reads() -> None:
    """1 to 101 ms: the middle one, the 99th of 100 steps, the last; none of no reads."""
    found = latency([Read(at=0.0, seconds=n / 1000, problem="") for n in range(101, 0, -1)])
    assert (found.count, found.p50, found.p99, found.slowest) == pytest.approx((101, 51, 100, 101))
    assert str(latency([])) == "-"


def test_proof_of_a_refusal_fails_where_writes_go_well(tmp_path: Path) -> None:
    """And where the error is another one; nothing is left behind."""
    with pytest.raises(pytest.fail.Exception):
        refused(str(tmp_path), errno.EIO)
    with pytest.raises(AssertionError, match="No such file"):
        refused(str(tmp_path / "none"), errno.EIO)
    assert not list(tmp_path.iterdir())


def test_proof_of_a_hang_fails_where_a_call_ends() -> None:
    """It may end at any time while the fault is used."""
    with pytest.raises(AssertionError, match="the device has answered"), hanging(lambda: None):
        pass


class _Untouched:
    """Of a FUSE server that no call reaches."""

    def behave(self, *rules: FaultRule) -> int:
        return 3

    def applied(self) -> int:
        return 3


class _RigOfNothing:
    faulty = _Untouched()


@pytest.mark.parametrize(
    "script", [misbehave(FaultRule(error=errno.EIO)), flap], ids=["rules", "flap"]
)
def test_fault_that_no_call_meets_is_no_fault(script: Callable[[Rig], Iterator[None]]) -> None:
    """A rule that never applied fails the row."""
    steps = script(cast(Rig, _RigOfNothing()))
    next(steps)
    with pytest.raises(AssertionError, match="no call met the fault"):
        next(steps)


def test_reader_that_has_died_is_noticed_at_once(tmp_path: Path) -> None:
    """Not after two minutes of waiting for its next read."""
    with forked(lambda: None) as pid:
        reader = Reader(tmp_path / "reads", pid)
        with pytest.raises(AssertionError, match="the reader has ended"):
            reader.await_reads(1)


def test_gate_lets_through_what_was_allowed_and_no_step_more(tmp_path: Path) -> None:
    """Never beyond the plan, nothing twice, and no error when the trainer is gone."""
    gate = Gate()
    os.set_blocking(gate.reading, False)
    trainer = Trainer(Plan(steps=7, every=2), tmp_path / "events", gate)
    for step, more in ((3, 3), (2, 0), (5, 2), (100, 2)):
        trainer.allow(step)
        found = b""
        with suppress(BlockingIOError):
            found = os.read(gate.reading, 100)
        assert len(found) == more
    os.close(gate.reading)
    gate.allow(200)
    os.close(gate.writing)
