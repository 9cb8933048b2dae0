"""The history file: what goes in comes out, it stays small, and nothing depends on it."""

from __future__ import annotations

import logging
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from hpstore.health import HealthState
from hpstore.health.detect.io_recorder import Operation
from hpstore.health.detect.telemetry import Sample, Tick
from hpstore.health.history import SCHEMA, History, PastSample
from hpstore.health.policy.states import Decision, Role
from hpstore.runtime.metrics import Metrics
from hpstore.runtime.process_identity import this_process

ERRORS = "health_history_error_total"


def tick(device: str = "d0", score: float = 1.5) -> Tick:
    sample = Sample(
        ios=40,
        nbytes=1 << 20,
        errors=0,
        dropped=0,
        seconds_mean=2e-3,
        scores={Operation.READ: score, Operation.SYNC: 1.0},
        counts={Operation.READ: 30, Operation.SYNC: 10},
    )
    return Tick(now_seconds=5.0, reference_seconds=1e-3, samples={device: sample}, signs={})


def decision(at: float, reason: str = "slow") -> Decision:
    return Decision(
        at_seconds=at,
        device="d0",
        was=HealthState.ONLINE,
        becomes=HealthState.SUSPECT,
        reason=reason,
        role=Role.AGENT,
        dry_run=True,
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "history.sqlite"


def test_samples_and_decisions_come_back_in_a_later_process(path: Path) -> None:
    """By a reader of its own, beside the open writer; the file is its owner's alone."""
    metrics = Metrics()
    with closing(History(path, metrics)) as history:
        history.add_tick(tick(), 1000.0)
        history.add_tick(tick("d1"), 1001.0)
        history.add_decisions([decision(1000.0), decision(1002.0, "slower")])
        history.add_decisions([])
        with closing(History(path, metrics, read_only=True)) as reader:
            assert reader.samples("d0", 0.0) == [
                PastSample(
                    at_seconds=1000.0,
                    device="d0",
                    operation=Operation.READ,
                    ios=30,
                    score=1.5,
                    reference_seconds=1e-3,
                ),
                PastSample(
                    at_seconds=1000.0,
                    device="d0",
                    operation=Operation.SYNC,
                    ios=10,
                    score=1.0,
                    reference_seconds=1e-3,
                ),
            ]
            assert reader.samples("d0", 1000.5) == []
            said = replace(decision(1002.0, "slower"), process=this_process())
            assert reader.decisions(1) == [said]
            assert len(reader.decisions(10)) == 2
    assert path.stat().st_mode & 0o777 == 0o600
    assert metrics.value(ERRORS) == 0


def test_a_second_history_of_a_process_does_not_end_the_locks_of_the_first(path: Path) -> None:
    """A monitor's beside the agent's, which stays open: another process that writes meanwhile is
    not the last one, so what it leaves is seen, and what the first one writes is not lost."""
    write = (
        "import sqlite3, sys; file = sqlite3.connect(sys.argv[1]); "
        'file.execute("INSERT INTO decisions (at, device, was, becomes, reason, role, dry_run) '
        "VALUES (3, 'd', 'online', 'suspect', 'other', 'agent', 0)\"); file.commit(); file.close()"
    )
    metrics = Metrics()
    with closing(History(path, metrics)) as history:
        history.add_decisions([decision(1.0, "first")])
        with closing(History(path, metrics)) as second:
            second.add_decisions([decision(2.0, "second")])
        subprocess.run([sys.executable, "-S", "-c", write, str(path)], check=True, timeout=60)
        assert path.with_name(f"{path.name}-wal").exists()
        history.add_decisions([decision(4.0, "last")])
        with closing(History(path, metrics, read_only=True)) as reader:
            reasons = [said.reason for said in reader.decisions(9)]
        assert reasons == ["last", "other", "second", "first"]
    assert metrics.value(ERRORS) == 0


def test_rows_are_bounded_in_number_and_age(path: Path) -> None:
    """The oldest go; each table on its own, and the file does not grow."""
    with closing(History(path, Metrics(), rows_most=20, age_most_seconds=100.0)) as history:
        for number in range(40):
            history.add_tick(tick(), float(number))
            history.add_decisions([decision(float(number))])
        kept = history.samples("d0", 0.0)
        assert [sample.at_seconds for sample in kept] == sorted([*range(30, 40)] * 2)
        assert len(history.decisions(100)) == 20
        history.add_tick(tick(), 135.0)
        assert history.samples("d0", 0.0)[0].at_seconds == 35.0
        assert len(history.decisions(100)) == 20
    size = path.stat().st_size
    with closing(History(path, Metrics(), rows_most=20)) as history:
        for number in range(200):
            history.add_tick(tick(), 200.0 + number)
    assert path.stat().st_size <= size + 8192


@pytest.mark.parametrize("content", [b"no database" * 100, b"SQLite format 3\0" + b"\xff" * 5000])
def test_a_damaged_file_is_told_once_and_left_alone(
    path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Everything goes on without it, and its bytes stay for whoever wants to look."""
    path.write_bytes(content)
    metrics = Metrics()
    with caplog.at_level(logging.WARNING), closing(History(path, metrics)) as history:
        history.add_tick(tick(), 1.0)
        history.add_decisions([decision(1.0)])
        assert history.samples("d0", 0.0) == []
        assert history.problem
    assert path.read_bytes() == content
    assert metrics.value(ERRORS) == 1
    (record,) = caplog.records
    assert f"health history {path} cannot be used" in record.getMessage()
    assert "move it away" in record.getMessage()


def test_a_file_of_a_newer_schema_is_not_touched(path: Path) -> None:
    """Nor read: nobody knows what it means."""
    with closing(sqlite3.connect(path)) as file:
        file.execute(f"PRAGMA user_version = {SCHEMA + 1}")
    before = path.read_bytes()
    with closing(History(path, Metrics())) as history:
        history.add_tick(tick(), 1.0)
        assert f"schema {SCHEMA + 1}, this hpstore knows {SCHEMA}" in history.problem
    assert path.read_bytes() == before


@contextmanager
def nobody() -> Iterator[Path]:
    """A directory of everybody, as a user who is not root."""
    directory = Path(tempfile.mkdtemp())
    directory.chmod(0o755)
    try:
        if os.geteuid() == 0:
            shutil.chown(directory, 65534)
            os.seteuid(65534)
        yield directory
    finally:
        if os.getuid() == 0:
            os.seteuid(0)
        shutil.rmtree(directory)


def test_a_file_that_cannot_be_written_is_counted_and_may_come_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Told once; when it may be written again, it is."""
    with nobody() as directory:
        path, metrics = directory / "h.sqlite", Metrics()
        with closing(History(path, metrics)) as history:
            history.add_tick(tick(), 1.0)
        path.chmod(0o400)
        with closing(History(path, metrics)) as history:
            history.add_tick(tick(), 2.0)
            history.add_tick(tick(), 3.0)
            assert "Permission denied" in history.problem
            assert metrics.value(ERRORS) == 2
            assert len(caplog.records) == 1
            path.chmod(0o600)
            history.add_tick(tick(), 4.0)
            assert history.problem == ""
            assert {sample.at_seconds for sample in history.samples("d0", 0.0)} == {1.0, 4.0}


def test_a_reader_writes_nothing_and_makes_no_file(path: Path) -> None:
    """A status page looks; a history that is not there yet is empty."""
    metrics = Metrics()
    with closing(History(path, metrics, read_only=True)) as reader:
        assert reader.decisions(5) == []
        assert not path.exists()
        with closing(History(path, metrics)) as writer:
            writer.add_decisions([decision(1.0)])
        assert len(reader.decisions(5)) == 1
        reader.add_decisions([decision(2.0)])
        assert len(reader.decisions(5)) == 1


@pytest.mark.parametrize("with_its_log", [True, False])
def test_a_file_that_was_tidied_away_is_made_and_read_again(path: Path, with_its_log: bool) -> None:
    """Below /tmp it goes after some days. A process that had it open wrote and read the old one for
    months, which no other process sees: the agent was deaf to reports."""
    metrics = Metrics()
    with closing(History(path, metrics)) as agent, closing(History(path, metrics)) as process:
        agent.add_decisions([decision(1.0)])
        logs = list(path.parent.glob(f"{path.name}-*")) if with_its_log else []
        for name in (path, *logs):
            name.unlink()
        process.add_decisions([decision(2.0, "report: drain it")])
        assert [d.reason for d in agent.decisions(5)] == ["report: drain it"]
        agent.add_decisions([decision(3.0, "drained")])
        assert [d.reason for d in process.decisions(5)] == ["drained", "report: drain it"]
        assert metrics.value(ERRORS) == 0


def test_decisions_of_another_version_are_left_out_counted_and_told_once(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One row with a state that this version does not know ended each round of the agent."""
    metrics = Metrics()
    with closing(History(path, metrics)) as history:
        history.add_decisions([decision(1.0), decision(2.0, "of a later version"), decision(3.0)])
        with closing(sqlite3.connect(path)) as file, file:
            file.execute("UPDATE decisions SET becomes = 'hibernating' WHERE at = 2.0")
        for _ in range(2):
            assert [d.at_seconds for d in history.decisions(5)] == [3.0, 1.0]
        assert metrics.value("health_history_row_skipped_total") == 2
    assert len(caplog.records) == 1
    assert "hibernating" in caplog.text


def test_decisions_from_the_future_do_not_push_out_those_of_today(path: Path) -> None:
    """A clock that was ahead wrote them; the newest 200 rows were theirs until it came true."""
    with closing(History(path, Metrics())) as history:
        history.add_decisions([decision(10.0)])
        history.add_decisions([decision(9_000.0 + n) for n in range(5)])
        assert [d.at_seconds for d in history.decisions(5, until_seconds=20.0)] == [10.0]
        assert len(history.decisions(10)) == 6
