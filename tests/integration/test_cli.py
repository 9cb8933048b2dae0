"""The command line as people use it: each command, --json, errors in one line, exit codes."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from hpstore import errors
from hpstore.cli import app
from hpstore.cli.output import json_text
from tests.integration.cli_cases import Cli


@pytest.fixture
def cli(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    made = Cli(tmp_path, capsys)
    made.create(data=4, parity=2, devices=6)
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
        cli("evict", cli.pool, tmp_path / disk, "--yes")
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
    cli("rm", cli.pool, "a/b", "--yes")
    assert cli("ls", cli.pool) == ""


def test_devices_come_and_go(cli: Cli, tmp_path: Path) -> None:
    """add, drain, readmit by path."""
    (tmp_path / "in").write_bytes(b"x" * 500_000)
    cli("put", cli.pool, "k", "in")
    cli("add", cli.pool, tmp_path / "disk6")
    assert "drained" in cli("drain", cli.pool, tmp_path / "disk0")
    assert "online" in cli("readmit", cli.pool, tmp_path / "disk0")
    states = [d["state"] for d in cli.json("status", cli.pool)["devices"]]
    assert states == ["online"] * 7


def test_the_command_is_a_module_and_has_a_short_help() -> None:
    """`python -m hpstore`, `-h` at every level, and completion for shells."""
    for words in ((), ("dataset",), ("dataset", "rm"), ("status",)):
        done = subprocess.run(
            [sys.executable, "-m", "hpstore", *words, "-h"],
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert "Usage:" in done.stdout
        assert words or "--show-completion" in done.stdout


def test_create_takes_a_scheme_in_one_word(cli: Cli, tmp_path: Path) -> None:
    """--scheme 3+2 is --data 3 --parity 2; the pool is called after its file."""
    disks = [tmp_path / f"lab{i}" for i in range(5)]
    made = json.loads(cli.run("create", "lab.toml", "--scheme", "3+2", *disks, "--json"))
    assert (made["data"], made["parity"], made["name"]) == (3, 2, "lab")
    others = [tmp_path / f"other{i}" for i in range(5)]
    for words, said in (
        (("--scheme", "3+"), "'3+' is not a scheme"),
        (("--scheme", "3+2", "--data", 4), "differ"),
        (("--data", 4), "not a whole scheme"),
    ):
        code = errors.ConfigError.exit_code
        assert said in cli.run("create", "other.toml", *words, *others, code=code)
    assert not (tmp_path / "other.toml").exists()


def test_errors_are_one_line_with_their_own_exit_code(cli: Cli, tmp_path: Path) -> None:
    """No traceback; the class and what to do."""
    (tmp_path / "in").write_bytes(b"x")
    cases = [
        (("get", cli.pool, "nothing", "out"), errors.ObjectNotFound),
        (("put", cli.pool, "../x", "in"), errors.InvalidKey),
        (("put", cli.pool, "k", "absent"), errors.ConfigError),
        (("evict", cli.pool, "disk9", "--yes"), errors.MembershipError),
        (("status", tmp_path / "none.toml"), errors.ConfigError),
        (
            (
                "create",
                tmp_path / "q.toml",
                "--data",
                4,
                "--parity",
                2,
                tmp_path / "disk0",
                *(tmp_path / f"e{i}" for i in range(5)),
            ),
            errors.DeviceInUse,
        ),
    ]
    for words, error in cases:
        text = cli.fails(*words, code=error.exit_code)
        assert text.count("\n") == 1, text
        assert error.__name__ in text
    assert not (tmp_path / "out").exists()


def test_rm_goes_on_past_what_is_not_there(cli: Cli, tmp_path: Path) -> None:
    """Of three keys the middle one is absent: the others are deleted, the exit code tells."""
    (tmp_path / "in").write_bytes(b"x")
    cli("put", cli.pool, "a", "in")
    cli("put", cli.pool, "c", "in")
    text = cli("rm", cli.pool, "a", "b", "c", "--yes", code=errors.ObjectNotFound.exit_code)
    assert text.count("\n") == 1
    assert cli("ls", cli.pool) == ""
    cli("rm", cli.pool, "b", "--ignore-missing", "--yes")


def test_status_is_a_table_for_people(cli: Cli) -> None:
    """Every device, the shape, what is tolerated."""
    text = cli("status", cli.pool)
    assert "4+2" in text
    assert text.count("online") == 6


def test_every_command_has_help_with_an_example() -> None:
    """--help names an example line for each command."""
    for name in (
        "create",
        "status",
        "put",
        "get",
        "ls",
        "stat",
        "rm",
        "add",
        "evict",
        "drain",
        "readmit",
        "rebuild",
        "scrub",
        "bench",
        "agent",
        "sit-out",
    ):
        shown = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200"})
        assert shown.exit_code == 0
        assert f"hpstore {name}" in shown.output


@pytest.mark.parametrize("prefix", ["../", "../../", "a/../", "a//", "/a/"])
def test_a_prefix_leads_to_nothing_but_keys(cli: Cli, prefix: str) -> None:
    """Not to files of another device, or out of the pool."""
    assert not cli.json("ls", cli.pool, "a")
    assert "InvalidKey" in cli("ls", cli.pool, prefix, code=errors.InvalidKey.exit_code)
    assert "InvalidKey" in cli(
        "scrub", cli.pool, "--prefix", prefix, code=errors.InvalidKey.exit_code
    )


def test_a_device_that_was_added_by_a_relative_path_is_known_by_its_place(
    cli: Cli, tmp_path: Path
) -> None:
    """Also when it is gone, and nobody can ask where it was."""
    cli("add", cli.pool, "disk6")
    (tmp_path / "disk6").rename(tmp_path / "away")
    assert "is evicted" in cli("evict", cli.pool, tmp_path / "disk6", "--yes")


def test_numbers_that_json_lacks_are_null() -> None:
    found = json_text({"a": math.nan, "b": [1.5, -math.inf, (math.inf,)], "c": Path("x")})
    assert json.loads(found) == {"a": None, "b": [1.5, None, [None]], "c": "x"}
    assert "NaN" not in found


def test_a_reader_that_has_seen_enough_is_no_error(cli: Cli) -> None:
    """Such as `hpstore ls | head -1` with `set -o pipefail`."""
    read, write = os.pipe()
    os.close(read)
    ended = cli.start("status", cli.pool, stdout=write)
    os.close(write)
    assert ended.communicate(timeout=60)[1] == ""
    assert ended.returncode == 0


def test_a_terminal_that_cannot_show_a_key_gets_its_code_points(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Not a traceback, which a log of a service in the C locale got."""
    (tmp_path / "file").write_bytes(b"x")
    cli.run("put", cli.pool, "ключ/é", "file")
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    for words in (("ls",), ("stat", "ключ/é"), ("versions", "ключ/é"), ("rm", "ключ/é", "--yes")):
        with cli.start(words[0], cli.pool, *words[1:], stdout=subprocess.PIPE) as ended:
            out, err = ended.communicate(timeout=60)
        assert (ended.returncode, err) == (0, "")
        assert words[0] != "ls" or out == "\\u043a\\u043b\\u044e\\u0447/\\xe9\n"


def test_names_on_devices_are_utf8_or_nothing_is_opened(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In another encoding a process would store keys that the others do not see."""
    for name, value in (("LC_ALL", "C"), ("PYTHONUTF8", "0"), ("PYTHONCOERCECLOCALE", "0")):
        monkeypatch.setenv(name, value)
    for words in (("status", cli.pool), ("create", "other.toml", "--scheme", "2+1", *"abc")):
        assert "PYTHONUTF8=1" in cli.fails(*words, code=2)
    assert not list(cli.directory.glob("[abc]"))
    assert not (cli.directory / "other.toml").exists()


def test_an_interrupt_says_what_is_safe(cli: Cli) -> None:
    ended = cli.start("status", cli.pool, "--watch", stdout=subprocess.PIPE)
    assert ended.stdout is not None
    assert ended.stdout.readline()
    ended.send_signal(signal.SIGINT)
    assert "interrupted; what was acknowledged is safe" in ended.communicate(timeout=60)[1]
    assert ended.returncode == 130


def test_an_agent_that_has_ended_keeps_nobody_waiting(cli: Cli, tmp_path: Path) -> None:
    """A round by cron, then an order: there is no agent to come to it now."""
    cli("agent", cli.pool, "--once")
    began = time.monotonic()
    assert "no agent runs here now" in cli("sit-out", cli.pool, tmp_path / "disk0")
    assert time.monotonic() - began < 10


def test_results_that_cannot_be_written_are_refused_before_the_work(cli: Cli) -> None:
    said = cli("bench", "erasure", "--json", "nowhere/x.json", code=errors.ConfigError.exit_code)
    assert "nowhere is not a directory" in said
