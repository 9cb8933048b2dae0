"""The command line as people use it: each command, --json, errors in one line, exit codes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from hpstore import errors
from hpstore.cli import app


class Cli:
    """Runs `hpstore ...` in a process of its own."""

    def __init__(self, tmp_path: Path) -> None:
        self.tmp_path, self.pool = tmp_path, str(tmp_path / "pool.toml")

    def __call__(self, *words: object, code: int = 0) -> str:
        root = Path(__file__).resolve().parents[2]
        done = subprocess.run(
            [sys.executable, "-c", "from hpstore.cli import main; main()", *map(str, words)],
            capture_output=True, text=True, timeout=120, check=False, cwd=self.tmp_path,
            env={**os.environ, "PYTHONPATH": str(root), "HOME": str(self.tmp_path)},
        )  # fmt: skip
        assert done.returncode == code, f"{words}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout if code == 0 else done.stderr

    def json(self, *words: object) -> dict[str, object]:
        found: dict[str, object] = json.loads(self(*words, "--json"))
        return found


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    made = Cli(tmp_path)
    devices = [tmp_path / f"disk{i}" for i in range(6)]
    made("create", made.pool, "--data", 4, "--parity", 2, *devices)
    return made


def test_the_operators_day(cli: Cli, tmp_path: Path) -> None:
    """create, put, get, status, two disks deleted, evict, rebuild, bits flipped, scrub."""
    data = np.random.default_rng(0).bytes(3_000_001)
    (tmp_path / "in").write_bytes(data)
    cli("put", cli.pool, "a/b", "in")
    assert cli.json("stat", cli.pool, "a/b")["size"] == len(data)
    shutil.rmtree(tmp_path / "disk1")
    shutil.rmtree(tmp_path / "disk4")
    cli("get", cli.pool, "a/b", "out")
    assert (tmp_path / "out").read_bytes() == data
    status = cli.json("status", cli.pool)
    assert (status["objects"], status["degraded"], status["losses_tolerated"]) == (1, 1, 0)
    for disk in ("disk1", "disk4"):
        cli("evict", cli.pool, tmp_path / disk)
    assert cli.json("rebuild", cli.pool)["relaid"] == 1
    assert cli.json("status", cli.pool)["losses_tolerated"] == 2
    for path in list((tmp_path / "disk0" / "objects").rglob("@*"))[:1]:
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 2] ^= 1
        path.write_bytes(raw)
    report = cli.json("scrub", cli.pool)
    assert (report["damaged_columns"], report["columns_written"]) == (1, 1)
    assert cli.json("scrub", cli.pool)["clean"] is True
    cli("get", cli.pool, "a/b", "out2")
    assert (tmp_path / "out2").read_bytes() == data
    assert "a/b" in cli("ls", cli.pool, "--long")
    cli("rm", cli.pool, "a/b")
    assert cli("ls", cli.pool) == ""


def test_devices_come_and_go(cli: Cli, tmp_path: Path) -> None:
    """add, drain, readmit by path."""
    (tmp_path / "in").write_bytes(b"x" * 500_000)
    cli("put", cli.pool, "k", "in")
    cli("add", cli.pool, tmp_path / "disk6")
    assert "drained" in cli("drain", cli.pool, tmp_path / "disk0")
    assert "online" in cli("readmit", cli.pool, tmp_path / "disk0")
    states = [d["state"] for d in cli.json("status", cli.pool)["devices"]]  # type: ignore[attr-defined]
    assert states == ["online"] * 7


def test_errors_are_one_line_with_their_own_exit_code(cli: Cli, tmp_path: Path) -> None:
    """No traceback; the class and what to do."""
    (tmp_path / "in").write_bytes(b"x")
    cases = [
        (("get", cli.pool, "nothing", "out"), errors.ObjectNotFound),
        (("put", cli.pool, "../x", "in"), errors.InvalidKey),
        (("put", cli.pool, "k", "absent"), errors.ConfigError),
        (("evict", cli.pool, "disk9"), errors.MembershipError),
        (("status", tmp_path / "none.toml"), errors.ConfigError),
        (("create", tmp_path / "q.toml", "--data", 4, "--parity", 2, tmp_path / "disk0",
          *(tmp_path / f"e{i}" for i in range(5))), errors.DeviceInUse),
    ]  # fmt: skip
    for words, error in cases:
        text = cli(*words, code=error.exit_code)
        assert text.count("\n") == 1, text
        assert error.__name__ in text
    assert not (tmp_path / "out").exists()


def test_rm_goes_on_past_what_is_not_there(cli: Cli, tmp_path: Path) -> None:
    """Of three keys the middle one is absent: the others are deleted, the exit code tells."""
    (tmp_path / "in").write_bytes(b"x")
    cli("put", cli.pool, "a", "in")
    cli("put", cli.pool, "c", "in")
    text = cli("rm", cli.pool, "a", "b", "c", code=errors.ObjectNotFound.exit_code)
    assert text.count("\n") == 1
    assert cli("ls", cli.pool) == ""
    cli("rm", cli.pool, "b", "--ignore-missing")


def test_status_is_a_table_for_people(cli: Cli) -> None:
    """Every device, the shape, what is tolerated."""
    text = cli("status", cli.pool)
    assert "4+2" in text
    assert text.count("online") == 6


def test_every_command_has_help_with_an_example() -> None:
    """--help names an example line for each command."""
    for name in ("create", "status", "put", "get", "ls", "stat", "rm", "add", "evict", "drain",
                 "readmit", "rebuild", "scrub", "bench", "agent", "sit-out"):  # fmt: skip
        shown = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200"})
        assert shown.exit_code == 0
        assert f"hpstore {name}" in shown.output
