"""The record of a machine's disks: several writers at once, crashes, a lock that is held."""

from __future__ import annotations

import csv
import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from hpstore.agent.smart_watch import DiskWatch
from hpstore.errors import ForecastError
from hpstore.health.forecast import disk_record
from hpstore.health.forecast.drive_stats import BadRows
from hpstore.health.forecast.forecaster import FailureForecaster
from hpstore.health.forecast.this_machine import recorded
from hpstore.health.policy.states import ForecastOutlook
from hpstore.health.smart.counters import COUNTERS, INDEX
from hpstore.health.smart.readout import Readout, SmartReading

DAY = 739_000
WRITERS, DISKS, DAYS = 4, 6, 10
ROOT = Path(__file__).resolve().parents[2]
WRITER = """
import sys
from tests.unit.test_disk_record import DAY, DAYS, DISKS, reading
from hpstore.health.forecast import disk_record
path, own = sys.argv[1], int(sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
for day in range(DAY, DAY + DAYS):
    disk_record.append(path, day, [reading(f"common-{n}") for n in range(DISKS)])
    disk_record.append(path, day, [reading(f"own-{own}-{n}") for n in range(DISKS)])
"""


def reading(serial: str, **counters: float) -> SmartReading:
    values = [0.0] * len(COUNTERS)
    for name, value in counters.items():
        values[INDEX[name]] = value
    return SmartReading(
        device=f"/dev/{serial}",
        readout=Readout.OK,
        serial=serial,
        model="ST4000DM000",
        capacity_bytes=4000,
        values=tuple(values),
    )


def test_processes_that_add_at_once_lose_nothing_and_repeat_nothing(tmp_path: Path) -> None:
    """Four processes, released together on a file that is not there: one header; one row for each
    disk and day, of disks that all of them see and of those of one alone."""
    path = tmp_path / "disks.csv"
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            cwd=ROOT,
        )
        for number in range(WRITERS)
    ]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("go\n")
        writer.stdin.flush()
    for writer in writers:
        writer.communicate(timeout=120)
        assert writer.returncode == 0
    with path.open(newline="") as file:
        rows = list(csv.reader(file))
    assert [row for row in rows if row[0] == "date"] == [list(disk_record.COLUMNS)]
    found = sorted((row[0], row[1]) for row in rows[1:])
    assert len(found) == len(set(found)) == DAYS * DISKS * (1 + WRITERS)
    bad = BadRows()
    assert len(recorded(path, bad)) == DISKS * (1 + WRITERS)
    assert not bad.count


def test_a_record_that_is_held_is_an_error_that_leaves_it_alone(tmp_path: Path) -> None:
    """A paused writer: one line, nothing added; after it the row goes in."""
    path = tmp_path / "disks.csv"
    assert disk_record.append(str(path), DAY, [reading("A")]) == 1
    before = path.read_bytes()
    with path.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ForecastError, match=r"another process has held.*nothing was added"):
            disk_record.append(str(path), DAY + 1, [reading("A")], lock_seconds=0.0)
    assert path.read_bytes() == before
    assert disk_record.append(str(path), DAY + 1, [reading("A")]) == 1
    assert disk_record.append(str(path), DAY + 1, [reading("A")]) == 0


def test_a_writer_that_is_paused_before_its_row_keeps_others_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its look at the file and its row another one would add the same row."""
    path = str(tmp_path / "disks.csv")
    paused, go_on = threading.Event(), threading.Event()
    text_of = disk_record._text

    def pausing(day: int, readings: Iterable[SmartReading]) -> str:
        if not paused.is_set():
            paused.set()
            assert go_on.wait(60)
        return text_of(day, readings)

    monkeypatch.setattr(disk_record, "_text", pausing)
    added: list[int] = []
    first = threading.Thread(
        target=lambda: added.append(disk_record.append(path, DAY, [reading("A")]))
    )
    first.start()
    try:
        assert paused.wait(60)
        with pytest.raises(ForecastError, match="another process has held"):
            disk_record.append(path, DAY, [reading("A")], lock_seconds=0.0)
    finally:
        go_on.set()
        first.join(60)
    assert added == [1]
    assert disk_record.append(path, DAY, [reading("A")]) == 0


def test_a_row_that_was_cut_short_is_written_again(tmp_path: Path) -> None:
    """A crash in the second disk's row: the next call ends that line and adds the row whole."""
    path = tmp_path / "disks.csv"
    disk_record.append(str(path), DAY, [reading("A"), reading("B")])
    path.write_bytes(path.read_bytes()[:-5])
    assert disk_record.append(str(path), DAY, [reading("A"), reading("B")]) == 1
    bad = BadRows()
    assert sorted(recorded(path, bad)) == ["A", "B"]
    assert bad.count == 1


def test_the_next_agent_knows_what_the_last_one_saw(tmp_path: Path) -> None:
    """An alarm counts on two of three days: the first day is known to a new agent by the record."""
    sick = reading("A", smart_187=99.0)

    def watch() -> DiskWatch:
        return DiskWatch(
            tmp_path,
            FailureForecaster(),
            timeout_seconds=1.0,
            read=lambda _: sick,
            disks_of=lambda _: ["/dev/A"],
        )

    (first,) = watch().look({"d": "/mnt/a"}, DAY)["d"]
    assert (first.risk, first.outlook) == ("warn", ForecastOutlook.NONE)
    (second,) = watch().look({"d": "/mnt/a"}, DAY + 1)["d"]
    assert second.outlook is ForecastOutlook.ALARM
    assert np.array_equal(recorded(tmp_path / "disks.csv", BadRows())["A"].days, [DAY, DAY + 1])
