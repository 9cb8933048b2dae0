"""The tree of commands: groups and short names, help that a newcomer can follow, completion."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import hpstore
from hpstore.cli import app, main
from hpstore.cli.options import complete_device, complete_pool

TREE: Any = typer.main.get_command(app)  # typer's own click has its own types
SHORT = {
    "object": ["put", "get", "ls", "stat", "versions", "rm"],
    "device": ["add", "drain", "evict", "readmit", "replace", "release", "sit-out"],
}


def leaves(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """All commands that do something, by their words."""
    children = getattr(command, "commands", None)
    if children is None:
        yield path, command
        return
    for name, child in children.items():
        yield from leaves(child, (*path, name))


LEAVES = dict(leaves(TREE))


def named(words: list[str]) -> tuple[Any, list[str]]:
    """The command that words mean, and what is left for it."""
    command = TREE
    while getattr(command, "commands", None):
        if words[0] not in command.commands:  # `hpstore agent pool.toml`
            command = command.commands["run"]
            break
        command, words = command.commands[words[0]], words[1:]
    return command, words


def example_of(path: tuple[str, ...]) -> tuple[Any, list[str]]:
    """The command that the first example in a help names, and the arguments there."""
    lines = [line.strip() for line in LEAVES[path].help.splitlines()]
    example = next(line for line in lines if line.startswith("hpstore "))
    return named(shlex.split(example)[1:])


def test_short_names_are_the_commands_of_their_groups() -> None:
    """`hpstore put` and `hpstore object put` are one function; no group has one that lacks it."""
    for group, names in SHORT.items():
        assert list(TREE.commands[group].commands) == names
        for name in names:
            short, long = LEAVES[(name,)].callback, LEAVES[group, name].callback
            assert short.__wrapped__ is long.__wrapped__


@pytest.mark.parametrize("path", LEAVES, ids=" ".join)
def test_help_has_an_example_that_is_taken(path: tuple[str, ...]) -> None:
    """A line that begins with `hpstore`, names this very command, and has arguments that it takes;
    the first line of the help is a sentence without one."""
    command = LEAVES[path]
    assert "hpstore " not in command.help.splitlines()[0]
    found, rest = example_of(path)
    assert found.help == command.help
    found.make_context(path[-1], rest)  # raises a usage error


def test_help_shows_groups_and_short_names_apart() -> None:
    """Panels, so that a newcomer finds things: the pool first, then groups, short names, tools."""
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "100"}).output
    panels = re.findall(r"─ ([A-Z][^─]*) ─", shown)
    assert panels == [
        "Options",
        "Pool",
        "Groups: hpstore GROUP --help",
        "Objects: short for hpstore object ...",
        "Devices: short for hpstore device ...",
        "Tools",
    ]
    groups = shown.split("Groups:")[1].split("Objects:")[0]
    assert re.findall(r"^│ (\S+) ", groups, re.M) == [
        "object",
        "device",
        "checkpoint",
        "dataset",
        "agent",
        "health",
        "memory",
        "host",
        "cache",
        "registers",
    ]


def test_the_agent_runs_with_and_without_its_word() -> None:
    """API.md's `hpstore agent POOL`, options before or behind it; `run` and `status` are words."""
    runner = CliRunner()
    for words in (
        ["agent", "no-such-pool"],
        ["agent", "--once", "no-such-pool"],
        ["agent", "run", "no-such-pool"],
        ["agent", "run", "status"],
    ):
        said = str(runner.invoke(app, words).exception)
        assert f"no pool is called '{words[-1]}' here" in said
    assert "Usage" in runner.invoke(app, ["agent", "--help"]).output


@pytest.fixture
def registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a pool called main and its pool.toml."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    devices = [str(tmp_path / f"d{i}") for i in range(3)]
    hpstore.create(devices, data=2, parity=1, config="pool.toml", name="main").close()
    return tmp_path


def completed(*words: str) -> list[str]:
    """What bash is offered for the last word."""
    run = CliRunner().invoke(
        app,
        [],
        prog_name="hpstore",
        env={
            "_HPSTORE_COMPLETE": "complete_bash",
            "COMP_WORDS": shlex.join(("hpstore", *words)),
            "COMP_CWORD": str(len(words)),
        },
    )
    return run.output.split()


def test_shells_complete_pools_and_devices(registered: Path) -> None:
    """Registered names and settings files, then the pool's devices; no device is opened."""
    for device in ("d0", "d1", "d2"):
        (registered / device / "pool.json").unlink()
    assert completed("status", "ma") == ["main"]
    assert completed("agent", "poo") == ["pool.toml"]
    assert completed("evict", "main", f"{registered}/d") == [
        str(registered / f"d{i}") for i in range(3)
    ]


def test_completion_of_what_cannot_be_read_is_empty(
    registered: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not an error in the middle of a line that is typed."""
    monkeypatch.setenv("HPSTORE_POOLS", str(registered / "none.toml"))
    assert complete_pool("m") == []
    context = typer.Context(LEAVES[("evict",)])
    context.params["pool"] = "nowhere"
    assert complete_device(context, "") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_can_be_shown_and_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shell: str
) -> None:
    """The script calls this command; installing writes it below the home directory."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    runner = CliRunner()
    shown = runner.invoke(app, ["--show-completion", shell], prog_name="hpstore").output
    assert f"_HPSTORE_COMPLETE=complete_{shell}" in shown
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    runner.invoke(app, ["--install-completion", shell], prog_name="hpstore")
    assert [path for path in tmp_path.rglob("*") if path.is_file()]


SIZES = {
    "--rate",
    "--unit",
    "--shard",
    "--max-shard",
    "--memory",
    "--device-size",
    "--rebuild-rate",
}


def test_every_option_of_bytes_takes_units() -> None:
    """64MiB, 200MB and 4096; what is none, and nothing at all, names the option and ends with 2."""
    found = {
        (path, option.opts[0]): option
        for path, command in LEAVES.items()
        for option in command.params
        if option.opts[0] in SIZES
    }
    assert {name for _, name in found} == SIZES
    for (path, name), option in found.items():
        command, rest = example_of(path)
        for text, size in (("64MiB", 64 << 20), ("200MB", 200_000_000), ("4096", 4096)):
            context = command.make_context(path[-1], [*rest, name, text])
            assert context.params[option.name] == size
        for text in ("fast", "12 parsecs", "0", "-5"):
            with pytest.raises(typer.BadParameter, match=r"number of bytes|not above 0"):
                command.make_context(path[-1], [*rest, name, text])


@pytest.mark.parametrize(
    "words",
    [
        ["rebuild", "none.toml", "--rate", "fast"],
        ["scrub", "none.toml", "--rate", "0"],
        ["create", "none.toml", "d", "--data", "1", "--parity", "1", "--unit", "x"],
        ["create", "none.toml", "d", "--data", "0", "--parity", "1"],
        ["durability", "--data", "4", "--parity", "2", "--afr", "-1", "--rebuild-hours", "1"],
        ["release", "none.toml", "d", "--wait", "-1"],
        ["status", "none.toml"],
        ["status", "none.toml", "--watch", "--exit-code"],
        ["bench", "nothing"],
        ["put", "none.toml"],
        ["no-such-command"],
    ],
    ids=" ".join,
)
def test_wrong_arguments_end_with_2(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Typer's errors and ours; nothing is made."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["hpstore", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert not list(tmp_path.iterdir())


def test_the_command_line_starts_without_torch() -> None:
    """It takes a second and a half to import: commands that need it import it when they run."""
    code = "import sys, hpstore.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
