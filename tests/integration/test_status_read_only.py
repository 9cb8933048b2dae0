"""What a read-only open says of devices: by direct reads, and by what those who write have seen."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

import hpstore
from hpstore.cli.status_report import show_status
from hpstore.config import private_directory
from hpstore.devices.probe_reads import some_file, stopped_writing
from hpstore.health.decision_log import history_path
from hpstore.health.detect.verdicts import HealthState
from hpstore.health.history import History
from hpstore.health.policy.states import Decision, Role
from hpstore.membership.agent_observations import STATUS_FILE
from hpstore.pool.status import DeviceStatus
from hpstore.runtime.metrics import Metrics
from hpstore.runtime.process_identity import may_live, this_process


def leave_word(pool: hpstore.Pool, devices: list[dict[str, object]], age_seconds: float) -> None:
    """What an agent leaves in the run directory."""
    body = {"at_ms": int((time.time() - age_seconds) * 1000), "process": 4711, "devices": devices}
    (private_directory(pool.admin.run_directory) / STATUS_FILE).write_text(json.dumps(body))


def rows(toml: Path) -> dict[str, DeviceStatus]:
    with hpstore.open(toml, read_only=True) as opened:
        return {d.device: d for d in opened.status().devices}


def test_a_read_only_open_takes_the_agents_word_for_what_it_may_not_try(
    pool: hpstore.Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """status_read_only_open: broken writes were "online" with 2 more to be lost; and it says how
    it knows."""
    ids = list(pool.admin.devices.places)
    bad: dict[str, object] = {"problem": "EIO on write", "present": False, "read_only": False}
    refuses: dict[str, object] = {"problem": "EROFS", "present": True, "read_only": True}
    leave_word(pool, [{"device": ids[0], **bad}, {"device": ids[1], **refuses}], age_seconds=3)
    toml = tmp_path / "pool.toml"
    found = rows(toml)
    assert [found[d].state for d in ids] == ["missing", "read-only", "online", "online", "online"]
    assert "agent 4711, 3 s ago" in found[ids[0]].problem
    assert "not tried" in found[ids[2]].known_by
    with hpstore.open(toml, read_only=True) as opened:
        status = opened.status()
    assert status.losses_tolerated == 1
    show_status(status, verbose=True)
    assert "writes: agent 4711" in capsys.readouterr().out
    leave_word(pool, [{"device": ids[0], **bad}], age_seconds=600)  # no agent runs any more
    assert rows(toml)[ids[0]].state == "online"
    assert all("written" in d.known_by for d in pool.status().devices)


def said(at: float, device: str, process: str) -> Decision:
    return Decision(
        at_seconds=at,
        device=device,
        was=HealthState.ONLINE,
        becomes=HealthState.SUSPECT,
        reason="slow",
        role=Role.PROCESS,
        process=process,
    )


def test_verdicts_of_processes_that_are_gone_are_not_shown(
    pool: hpstore.Pool, tmp_path: Path
) -> None:
    """A process that has ended reads nothing any more; its verdict stood there for an hour."""
    pid, _, namespace = this_process().split("-")
    first, second, *_ = pool.admin.devices.places
    history = History(history_path(pool.config.settings, pool.admin.record.pool_id), Metrics())
    private_directory(pool.admin.run_directory)
    history.add_decisions(
        [
            said(time.time(), first, f"{pid}-1-{namespace}"),
            said(time.time(), second, this_process()),
        ]
    )
    history.close()
    found = rows(tmp_path / "pool.toml")
    assert (found[first].health, found[second].health) == ("online", "suspect")
    assert may_live(f"{pid}-1-4026500000")  # of another container: it cannot be told
    assert may_live("")


def test_a_history_from_before_names_no_process(tmp_path: Path) -> None:
    """It is read, and gains the column with the next decision."""
    import sqlite3

    path = tmp_path / "health.sqlite"
    file = sqlite3.connect(path)
    file.executescript(
        "CREATE TABLE samples (id INTEGER PRIMARY KEY, at REAL);"
        "CREATE TABLE decisions (id INTEGER PRIMARY KEY, at REAL NOT NULL, device TEXT NOT NULL, "
        "was TEXT NOT NULL, becomes TEXT NOT NULL, reason TEXT NOT NULL, role TEXT NOT NULL, "
        "dry_run INTEGER NOT NULL); PRAGMA user_version = 1;"
        "INSERT INTO decisions VALUES (1, 1.0, 'd', 'online', 'suspect', 'slow', 'process', 0);"
    )
    file.close()
    for read_only in (True, False):
        history = History(path, Metrics(), read_only=read_only)
        assert [d.process for d in history.decisions(5)] == [""]
        if not read_only:
            history.add_decisions([said(2.0, "d", "")])
            assert history.decisions(5)[0].process == this_process()
        history.close()


def test_mount_options_tell_of_a_filesystem_that_stopped_writing(tmp_path: Path) -> None:
    """Since Linux 6.15 statvfs says nothing of an ext4 that met an error."""
    device = os.stat(tmp_path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    mounts = tmp_path / "mountinfo"
    fd = os.open(tmp_path, os.O_RDONLY)
    line = "36 35 {} / /mnt rw,relatime shared:1 - ext4 /dev/loop0 rw,{}\n"
    for options, expected in (("errors=remount-ro", False), ("emergency_ro", True)):
        mounts.write_text(line.format("0:1", "shutdown") + line.format(number, options))
        assert bool(stopped_writing(fd, str(mounts))) is expected
    assert stopped_writing(fd, str(tmp_path / "none")) == ""
    os.close(fd)


def test_some_file_is_one_below_or_none(tmp_path: Path) -> None:
    (tmp_path / "objects/a/b").mkdir(parents=True)
    fd = os.open(tmp_path, os.O_RDONLY)
    assert some_file(fd, "objects") is None
    (tmp_path / "objects/a/b/c").write_text("x")
    assert some_file(fd, "objects") == "objects/a/b/c"
    os.close(fd)


def test_a_full_pool_is_called_full(pool: hpstore.Pool, capsys: pytest.CaptureFixture[str]) -> None:
    """It was called short of devices, where it was said at all."""
    found = pool.status()
    full = replace(
        found, devices=tuple(replace(d, state="full") for d in found.devices), effective_data=0
    )
    show_status(full)
    assert "FULL: 5 of 5 devices have no room left, no new data fits" in capsys.readouterr().out
    show_status(found)
    assert "FULL" not in capsys.readouterr().out
