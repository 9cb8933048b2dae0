"""What commands say to machines, and where `put` and `get` take and leave bytes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer

import hpstore
from hpstore import errors
from hpstore.cli import app
from tests.integration.cli_cases import ROOT, Cli

SPOOLED_MIB = 160
MEASURED = """
import resource
from hpstore.cli import main
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    main()
finally:
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.fixture
def cli(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    made = Cli(tmp_path, capsys)
    made.create(data=2, parity=1, devices=3)
    (tmp_path / "in").write_bytes(b"x" * 1000)
    return made


def leaves(command: Any, path: str = "hpstore") -> Iterator[tuple[str, Any]]:
    """All commands that do something, by their words. Typer's own click has its own types."""
    children = getattr(command, "commands", None)
    if children is None:
        yield path, command
        return
    for name, child in children.items():
        yield from leaves(child, f"{path} {name}")


def test_every_command_has_json() -> None:
    """The contract of the command line: each one can be called by machines."""
    commands = dict(leaves(typer.main.get_command(app)))
    assert len(commands) > 30
    without = [
        words
        for words, command in commands.items()
        if not any("--json" in option.opts for option in command.params)
    ]
    assert without == []


def test_device_commands_tell_machines_which_device_they_changed(cli: Cli, tmp_path: Path) -> None:
    """By its whole id, whatever part of it, or path, was typed."""
    cli("put", cli.pool, "k", "in")
    added = cli.json("add", cli.pool, tmp_path / "disk3", "--domain", "rack")
    assert (added["state"], added["domain"]) == ("online", "rack")
    device = str(added["device"])
    drained = cli.json("drain", cli.pool, device[:8])
    assert (drained["device"], drained["state"]) == (device, "evicted")
    assert isinstance(drained["objects_moved"], int)
    back = cli.json("readmit", cli.pool, device[:8])
    assert (back["device"], back["state"], back["agent"]) == (device, "online", None)
    files = back["files"]
    assert isinstance(files, dict)
    assert sorted(files) == ["kept", "quarantined", "removed"]
    evicted = cli.json("evict", cli.pool, tmp_path / "disk3", "--yes")
    assert (evicted["device"], evicted["state"]) == (device, "evicted")
    assert cli.json("readmit", cli.pool, device)["state"] == "online"
    noted = cli.json("sit-out", cli.pool, device)
    assert (noted["order"], noted["device"], noted["outcome"]) == ("sit-out", device, "noted")
    assert cli.json("health", "ignore", cli.pool, device)["order"] == "ignore"


def test_rm_and_get_tell_machines_what_they_did(cli: Cli) -> None:
    """Deleted and absent keys; where an object lies and how large it is."""
    for key in ("a", "b"):
        cli("put", cli.pool, key, "in")
    found = cli.json("get", cli.pool, "a", "out")
    assert found == {"key": "a", "size": 1000, "file": "out"}
    said = cli.json("rm", cli.pool, "a", "missing", "b", "--ignore-missing", "-y")
    assert said == {"deleted": ["a", "b"], "absent": ["missing"]}
    said_no = cli("get", cli.pool, "c", "-", "--json", code=errors.ConfigError.exit_code)
    assert "standard output" in said_no


def test_steps_are_protected_and_deleted_for_machines(cli: Cli) -> None:
    """checkpoint protect, unprotect, rm: one document each, refusals in it."""
    from hpstore.checkpoint import Checkpointer

    with hpstore.open(cli.pool) as pool, Checkpointer(pool, "runs/a") as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, {"n": step})
    words = ("checkpoint", "protect", cli.pool, "runs/a", 1, "best")
    assert cli.json(*words) == {"step": 1, "name": "best"}
    cli("checkpoint", "rm", cli.pool, "runs/a", 1, 2, "-y", code=errors.CheckpointError.exit_code)
    assert cli.json("checkpoint", "unprotect", cli.pool, "runs/a", "best") == {
        "step": 1,
        "name": "best",
    }
    assert cli.json("checkpoint", "rm", cli.pool, "runs/a", 1, "-y") == {
        "deleted": [1],
        "failed": {},
    }


def test_standard_input_is_stored_whole_and_not_through_memory(cli: Cli, tmp_path: Path) -> None:
    """From a pipe, whose length nobody knows before: it may be larger than memory."""
    block = np.random.default_rng(0).bytes(1 << 20)
    with subprocess.Popen(
        [sys.executable, "-c", MEASURED, "put", cli.pool, "big", "-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as run:
        assert run.stdin is not None
        assert run.stdout is not None
        for _ in range(SPOOLED_MIB):
            run.stdin.write(block)
        run.stdin.close()
        grown_mib = int(run.stdout.read().split()[-1])
    assert run.returncode == 0
    assert grown_mib < SPOOLED_MIB / 2
    with hpstore.open(cli.pool, read_only=True) as pool:
        assert pool.stat("big").size == SPOOLED_MIB << 20
        assert pool.get("big", (SPOOLED_MIB - 1) << 20) == block


def test_a_place_that_is_not_there_is_named_before_the_work(cli: Cli, tmp_path: Path) -> None:
    """`get` and `health train`: the folder, not the name of a part file."""
    cli("put", cli.pool, "a", "in")
    said = cli("get", cli.pool, "a", "no/such/out", code=errors.ConfigError.exit_code)
    assert f"{tmp_path}/no/such is not a directory" in said
    (tmp_path / "drives.csv").write_text("nonsense")  # it is not even opened
    words = ("health", "train", "drives.csv", "--out", "no/model.json")
    assert f"{tmp_path}/no is not a directory" in cli(*words, code=errors.ConfigError.exit_code)
