"""What the command line shows of names and texts that others chose: nothing of them steers the
terminal, none is taken for markup, and none is too deep to be shown."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import hpstore
from hpstore.checkpoint import Checkpointer, SaveOptions
from hpstore.cli.output import VisibleLog, plain, visible, write_keys
from hpstore.cli.progress_bar import progress_bar
from hpstore.cli.status_watch import agent_view
from hpstore.errors import CheckpointError
from hpstore.trainers.named_checkpoints import NamedCheckpoints
from tests.integration.cli_cases import Cli, PoolCommands

RUN = "runs/a"
CLEARED = "\x1b[2J\x1b]0;owned\x07red"
NAMES = (CLEARED, "[bold]b", "[#nothing]", "\N{RIGHT-TO-LEFT OVERRIDE}txt.exe", "\x9b2J")


@pytest.fixture
def cli(pool: hpstore.Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> PoolCommands:
    del pool  # it is at pool.toml there
    return PoolCommands(tmp_path, capsys, "checkpoint")


def require_harmless(text: str) -> None:
    assert all(c.isprintable() or c == "\n" for c in text), ascii(text)


@given(st.text())
def test_what_steers_a_terminal_is_escaped_and_all_else_stays(text: str) -> None:
    """Lines and spaces stay; the escapes are Python's own, so the text can be found again."""
    shown = visible(text)
    assert all(c.isprintable() or c.isspace() for c in shown)
    assert not {"\x1b", "\r", "\t", "\x0b", "\x0c", "\x85", "\u2028"} & set(shown)
    if text.isprintable():
        assert shown == text
    assert str(plain(text)) == shown


def test_names_in_a_step_do_not_steer_the_terminal(cli: PoolCommands, pool: hpstore.Pool) -> None:
    lineage = {"note": CLEARED}
    with Checkpointer(pool, RUN, save=SaveOptions(lineage=lineage)) as ckpt:
        for step in (1, 2):
            state = {name: {"w": torch.full((3,), step), "text": f"{name}{step}"} for name in NAMES}
            ckpt.save(step, state, metrics={CLEARED: step}).result()
    for words in (
        ("ls", RUN),
        ("inspect", RUN),
        ("inspect", RUN, "--tree"),
        ("diff", RUN, 1, 2),
        ("diff", RUN, 1, 2, "--norms"),
    ):
        shown = cli(*words)
        require_harmless(shown)
        if words[0] != "ls":
            for name in NAMES:
                assert visible(name) in shown, words  # brackets too: no markup
    asked = cli("inspect", RUN, "--keys", f"{CLEARED}x", code=CheckpointError.exit_code)
    require_harmless(asked)
    found = json.loads(cli("inspect", RUN, "--json"))
    assert f"{CLEARED}/w" in [tensor["name"] for tensor in found["tensors"]]  # for machines


def test_logs_and_bars_show_names_and_obey_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """rich raises an error for a closing tag that closes nothing."""
    record = logging.LogRecord("hpstore", logging.WARNING, "", 0, "%s", (CLEARED,), None)
    require_harmless(VisibleLog("%(message)s").format(record))

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for name in (*NAMES, "[bold]b[/bold]", "[/nothing]"):
        screen = Terminal()
        monkeypatch.setattr(sys, "stderr", screen)
        with progress_bar(name) as bar:
            bar.advance(1, 1)
        monkeypatch.undo()
        assert visible(name) in screen.getvalue()
        assert "owned\x07" not in screen.getvalue()


def test_keys_for_another_program_are_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    write_keys(["a\x9bb"])
    assert capsys.readouterr().out == "a\x9bb\n"


def test_an_address_in_brackets_is_no_markup() -> None:
    """rich takes [fe80::1] for a tag, and leaves it out."""
    url = "hpd://[fe80::1]:7200/0"
    device = {"device": "d", "url": url, "state": "online", "problem": f"{url} [/red] is slow"}
    screen = io.StringIO()
    Console(file=screen, width=200).print(agent_view({"pool": "p", "devices": [device]}))
    assert url in screen.getvalue()
    assert "[/red] is slow" in screen.getvalue()


def test_names_with_very_many_slashes_are_shown(cli: PoolCommands, pool: hpstore.Pool) -> None:
    name = "/".join(["a"] * 3000)
    with Checkpointer(pool, RUN, rng=False) as ckpt:
        ckpt.save(1, {"model": {name: torch.ones(3)}, "n": {name: 5}}).result()
    assert "3]" in cli("inspect", RUN)
    assert "a/a/a" in cli("inspect", RUN, "--tree")
    for words in ((), ("--tree",)):
        assert json.loads(cli("inspect", RUN, *words, "--json"))["bytes"] == 12


def test_a_prefix_is_found_however_it_was_saved_and_typed(
    cli: PoolCommands, pool: hpstore.Pool, tmp_path: Path
) -> None:
    """By a trainer that names its checkpoints, and with a slash at its end."""
    with NamedCheckpoints(pool, "runs/named") as named:
        named.save("last", {"x": torch.ones(3)})
    with Checkpointer(pool, RUN) as ckpt:
        ckpt.save(1, {"x": torch.ones(3)}).result()
    for prefix in ("runs/named", "runs/named/", RUN, f"{RUN}/", f"/{RUN}"):
        found = json.loads(cli("inspect", prefix, "--json"))
        assert [tensor["bytes"] for tensor in found["tensors"] if "x" in tensor["name"]] == [12]
        assert "12 B" in cli("inspect", prefix, "--tree")
        assert "losses tolerated" in cli("inspect", prefix)
    torch.save({"x": torch.ones(3)}, tmp_path / "x.pt")
    cli("import", "runs/new/", tmp_path / "x.pt", "--step", 4)
    assert json.loads(cli("inspect", "runs/new", "--json"))["step"] == 4


def test_each_status_of_a_watch_is_there_at_once(
    pool: hpstore.Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pipe would hold back some kilobytes of them."""
    del pool
    cli = Cli(tmp_path, capsys)
    with cli.start("status", cli.pool, "--watch", "--json", stdout=subprocess.PIPE) as watched:
        assert watched.stdout is not None
        lines: list[str] = []
        while not lines or lines[-1] != "}\n":
            lines.append(watched.stdout.readline())
        watched.kill()
    assert json.loads("".join(lines))["name"]


def test_a_file_of_unknown_size_is_stored_whole(
    pool: hpstore.Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of /proc have none before they are read."""
    file = Path("/proc/self/status")
    assert file.stat().st_size == 0
    Cli(tmp_path, capsys)("put", "pool.toml", "a", file)
    assert bytes(pool.get("a")).startswith(b"Name:")
    with file.open("rb") as opened, pytest.raises(TypeError, match="size of this file"):
        pool.put("b", opened)
    (tmp_path / "empty").touch()
    with (tmp_path / "empty").open("rb") as opened:
        assert pool.put("c", opened).size == 0
