"""The verdict of `hpstore status` and its next command, for each state that a pool can be in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import hpstore
from hpstore.cli.pool_verdict import AgentSight, Level, agent_sight, verdict_of, verdict_of_closed
from hpstore.cli.status_report import device_lines, show_status
from hpstore.pool.status import PoolStatus

Change = Callable[[PoolStatus], PoolStatus]
AGENT = AgentSight(age_seconds=3, work="rebuilding 41 %")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> PoolStatus:
    """That of a real pool of 4+2 on six devices /mnt/0 to /mnt/5, as if with 10 objects."""
    where = tmp_path_factory.mktemp("pool")
    with hpstore.create(
        [where / str(i) for i in range(6)], data=4, parity=2, config=where / "pool.toml"
    ) as pool:
        found = pool.status()
    devices = tuple(
        replace(device, device=f"{i}" * 12, url=f"/mnt/{i}")
        for i, device in enumerate(found.devices)
    )
    return replace(found, name="main", objects=10, devices=devices, sharing=())


def device(number: int, **facts: object) -> Change:
    """One device is otherwise."""

    def change(status: PoolStatus) -> PoolStatus:
        rows = list(status.devices)
        rows[number] = replace(rows[number], **facts)  # type: ignore[arg-type]
        return replace(status, devices=tuple(rows))

    return change


def pool(**facts: object) -> Change:
    return lambda status: replace(status, **facts)  # type: ignore[arg-type]


MISSING = device(1, state="missing", problem="No such device", total_bytes=0)
EVICTED = device(1, state="evicted")
SHORT, SHORTER = pool(degraded=10, losses_tolerated=1), pool(degraded=10, losses_tolerated=0)
READ_ONLY = device(1, state="read-only")
CASES: dict[str, tuple[tuple[Change, ...], str, str]] = {
    "all well": ((), "WHOLE: 2 devices may fail", ""),
    "new and empty": ((pool(objects=0),), "WHOLE: 2 devices may fail", "put main KEY FILE"),
    "one missing": ((MISSING, SHORT), "DEGRADED: 1 more device may fail", "evict main /mnt/1"),
    "two missing": (
        (MISSING, device(2, state="missing"), SHORTER),
        "AT RISK: no more device may fail",
        "evict main /mnt/1",
    ),
    "two missing, no objects": (
        (MISSING, device(2, state="missing"), pool(objects=0, losses_tolerated=0)),
        "DEGRADED: no more device may fail",
        "evict main /mnt/1",
    ),
    "missing, all rebuilt without it": (
        (MISSING, pool(losses_tolerated=1)),
        "DEGRADED: 1 more device may fail",
        "evict main /mnt/1",
    ),
    "missing, of a domain whose columns are covered": (
        (MISSING,),
        "DEGRADED: 2 devices may fail",
        "evict main /mnt/1",
    ),
    "beyond parity for some objects": (
        (MISSING, pool(degraded=7, unreadable=3, losses_tolerated=0)),
        "AT RISK: 3 of 10 objects cannot be read now",
        "status main",
    ),
    "damaged beyond repair, all devices there": (
        (pool(unreadable=1, losses_tolerated=0),),
        "AT RISK: 1 of 10 objects cannot be read now",
        "scrub main",
    ),
    "evicted, not rebuilt": ((EVICTED, SHORT), "DEGRADED: 1 more device may fail", "rebuild main"),
    "evicted, objects whole, not marked": (
        (EVICTED, pool(losses_tolerated=1)),
        "DEGRADED: 1 more device may fail",
        "rebuild main",
    ),
    "evicted and rebuilt": (
        (device(1, state="evicted", rebuilt=True),),
        "WHOLE: 2 devices may fail",
        "",
    ),
    "one evicted and one missing": (
        (EVICTED, device(2, state="missing"), SHORTER),
        "AT RISK: no more device may fail",
        "evict main /mnt/2",
    ),
    "a column damaged or a put cut short": (
        (SHORT,),
        "DEGRADED: 1 more device may fail",
        "rebuild main",
    ),
    "draining": (
        (device(1, state="draining"), SHORT),
        "DEGRADED: 1 more device may fail; 1 draining",
        "drain main /mnt/1",
    ),
    "draining, nothing left on it": (
        (device(1, state="draining"),),
        "WHOLE: 2 devices may fail; 1 draining",
        "drain main /mnt/1",
    ),
    "read-only": (
        (READ_ONLY, pool(effective_data=3)),
        "DEGRADED: 2 devices may fail; 1 read-only",
        "drain main /mnt/1",
    ),
    "one full": ((device(1, state="full"),), "WHOLE: 2 devices may fail", "rebalance main"),
    "full": (
        (*(device(i, state="full") for i in range(6)), pool(effective_data=0)),
        "DEGRADED: 2 devices may fail; no new data fits",
        "add main DEVICE",
    ),
    "too few devices for new data": (
        (pool(effective_data=0),),
        "DEGRADED: 2 devices may fail; too few devices for new data",
        "add main DEVICE",
    ),
    "released": (
        (device(1, state="missing", released=True), SHORT),
        "DEGRADED: 1 more device may fail; 1 released for maintenance",
        "readmit main /mnt/1",
    ),
    "faulted by a process": (
        (device(1, health="faulted"),),
        "DEGRADED: 2 devices may fail",
        "drain main 11111111",
    ),
    "suspect by a process": ((device(1, health="suspect"),), "WHOLE: 2 devices may fail", ""),
    "sitting out": ((device(1, state="sitting-out"),), "WHOLE: 2 devices may fail", ""),
    "one parity, whole": ((pool(parity=1, losses_tolerated=1),), "WHOLE: 1 device may fail", ""),
    "one parity, one missing": (
        (pool(parity=1, degraded=10, losses_tolerated=0), MISSING),
        "AT RISK: no more device may fail",
        "evict main /mnt/1",
    ),
}


def changed(status: PoolStatus, changes: tuple[Change, ...]) -> PoolStatus:
    for change in changes:
        status = change(status)
    return status


@pytest.mark.parametrize("case", CASES)
def test_the_verdict_fits_the_state(whole: PoolStatus, case: str) -> None:
    """No agent runs: the verdict, and the command that makes it better."""
    changes, said, command = CASES[case]
    found = verdict_of(changed(whole, changes), "main", None)
    assert str(found) == said
    assert found.command == (f"hpstore {command}" if command else "")


@pytest.mark.parametrize("case", CASES)
def test_a_running_agent_does_what_it_does_by_itself(whole: PoolStatus, case: str) -> None:
    """The verdict is the same. Nobody is sent to evict, rebuild or drain beside it; released
    devices, unreadable objects and full pools stay the operator's. One that only pretends helps
    nobody."""
    changes, said, command = CASES[case]
    status = changed(whole, changes)
    found = verdict_of(status, "main", AGENT)
    assert str(found) == said
    assert found.level == verdict_of(status, "main", None).level
    word = command.split(" ")[0]
    theirs = word in ("evict", "rebuild") or (word == "drain" and "faulted" not in case)
    assert found.command == (
        "hpstore status main --watch" if theirs else f"hpstore {command}" if command else ""
    )
    assert verdict_of(status, "main", replace(AGENT, dry_run=True)) == verdict_of(
        status, "main", None
    )


def test_exit_codes_are_the_levels() -> None:
    """0 whole, 1 degraded, 2 at risk; a pool that cannot be opened is at risk."""
    assert [(level.word, int(level)) for level in Level] == [
        ("whole", 0),
        ("degraded", 1),
        ("at-risk", 2),
    ]
    closed = verdict_of_closed("my pool.toml")
    assert closed.level is Level.AT_RISK
    assert closed.command == "hpstore status 'my pool.toml'"


def test_what_an_agent_left_is_read_whatever_is_in_it() -> None:
    """Of an older version, without fields; of another pool, which is none of this one's."""
    assert agent_sight(None, "id", 5000) is None
    assert agent_sight({"at_ms": 1000, "pool_id": "other"}, "id", 5000) is None
    assert agent_sight({"at_ms": 1000}, "id", 4000) == AgentSight(age_seconds=3)
    found = agent_sight(
        {
            "at_ms": 1000,
            "pool_id": "id",
            "job": {"kind": "rebuild", "done": 41, "total": 100},
            "devices": [{"device": "d", "state": "removed"}, 7],
            "warnings": ["alarm"],
        },
        "id",
        4000,
    )
    assert found is not None
    assert str(found) == "agent: 3 s ago, rebuilding 41 %"
    assert (found.state_of("d"), found.state_of("e"), found.warnings) == ("removed", "", ("alarm",))


@pytest.mark.parametrize("width", [60, 80, 100, 1000])
def test_no_row_of_devices_is_wider_than_the_terminal(whole: PoolStatus, width: int) -> None:
    """Long places share their directory's line, notes are cropped and whole below."""
    why = "cannot be opened: No such file or directory, and this goes on for quite a while"
    status = changed(whole, (MISSING, device(1, problem=why)))
    devices = [replace(d, url=f"/srv/storage/of/the/cluster{d.url}") for d in status.devices]
    lines = device_lines(devices, None, width)
    table = [line for line in lines if line[:6] == "DEVICE" or line[:8].isalnum()]
    notes = [line for line in table if line.endswith(why) and line[8] == ":"]
    assert all(len(line) <= width for line in table if line not in notes)
    assert len(table) - len(notes) == 7
    assert any(why in line for line in lines)
    assert bool(notes) == (width < 200)


def test_a_status_begins_with_the_verdict(
    whole: PoolStatus, capsys: pytest.CaptureFixture[str]
) -> None:
    """Verdict, next command and agent in one line where it fits; then figures, then devices."""
    show_status(changed(whole, (EVICTED, SHORT)), agent=AGENT, scrubbed_ms=0)
    first, second, third, *_ = capsys.readouterr().out.splitlines()
    assert first == (
        "pool main  4+2   DEGRADED: 1 more device may fail    -> the agent is on it: hpstore "
        "status main --watch    agent: 3 s ago, rebuilding 41 %"
    )
    assert "objects 10: 10 short of parity, 0 unreadable    never scrubbed" in second
    assert third.split() == ["DEVICE", "PATH", "STATE", "FREE", "LATENCY", "NOTE"]


def test_verbose_adds_what_a_developer_asks(
    whole: PoolStatus, capsys: pytest.CaptureFixture[str]
) -> None:
    """Generation, erasure backend, io_uring, domains, kept files: not for every day."""
    words = ("generation 1", "erasure code by", "small reads by", "domain", "kept files")
    show_status(whole)
    assert not any(word in capsys.readouterr().out for word in words)
    show_status(whole, verbose=True)
    shown = capsys.readouterr().out
    assert all(word in shown for word in words)


def test_status_ends_with_its_level(tmp_path: Path) -> None:
    """On a real pool whose devices are moved away one by one; JSON has verdict and command."""
    import json

    from typer.testing import CliRunner

    from hpstore.cli import app

    toml, run = str(tmp_path / "pool.toml"), CliRunner()
    with hpstore.create([tmp_path / str(i) for i in range(5)], data=2, parity=2, config=toml) as p:
        p.put("k", b"data" * 100_000)
    found = []
    for gone in range(4):
        if gone:
            (tmp_path / str(gone)).rename(tmp_path / f"{gone}.away")
        shown = run.invoke(app, ["status", toml, "--json", "--exit-code"])
        said = json.loads(shown.stdout)
        found.append((shown.exit_code, said["verdict"], said["next_command"]))
    assert found == [
        (0, "whole", ""),
        (1, "degraded", f"hpstore evict {toml} {tmp_path}/1"),
        (2, "at-risk", f"hpstore evict {toml} {tmp_path}/1"),
        (2, "at-risk", f"hpstore status {toml}"),
    ]
    assert run.invoke(app, ["status", toml, "--watch", "--exit-code"]).exception is not None
