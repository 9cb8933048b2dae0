"""What cannot be undone is asked on a terminal, and wants --yes where there is none."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

import hpstore
from hpstore import errors
from hpstore.checkpoint import Checkpointer
from hpstore.errors import ConfigError
from hpstore.loaders import DatasetWriter, Field, list_datasets
from tests.integration.cli_cases import ROOT, Cli


@pytest.fixture
def cli(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    """A pool with an object, a data set, and two steps of a checkpoint."""
    made = Cli(tmp_path, capsys)
    made.create(data=2, parity=1, devices=4)
    with hpstore.open(made.pool) as pool:
        pool.put("k", b"data")
        with DatasetWriter(pool, "train", {"x": Field("int64")}) as writer:
            writer.write({"x": 1})
        with Checkpointer(pool, "runs/a") as saver:
            for step in (1, 2):
                saver.save(step, {"x": step}).result()
    return made


DESTRUCTIVE: dict[str, tuple[tuple[str, ...], tuple[object, ...]]] = {
    "rm": (("rm",), ("k",)),
    "dataset rm": (("dataset", "rm"), ("train",)),
    "checkpoint rm": (("checkpoint", "rm"), ("runs/a", 1)),
    "checkpoint rm latest": (("checkpoint", "rm"), ("runs/a", "latest")),
    "evict": (("evict",), ("disk3",)),
}


def facts(pool: str) -> tuple[object, ...]:
    with hpstore.open(pool, read_only=True) as opened:
        return (
            opened.list("k"),
            [d.name for d in list_datasets(opened)],
            len(opened.list("runs/a")),
            [d.state for d in opened.status().devices],
        )


@pytest.mark.parametrize("name", ["rm", "checkpoint rm", "evict"])
def test_what_is_named_one_by_one_goes_without_a_terminal(cli: Cli, name: str) -> None:
    """As scripts do it."""
    before, (words, rest) = facts(cli.pool), DESTRUCTIVE[name]
    rest = tuple(cli.directory / one if one == "disk3" else one for one in rest)
    cli(*words, cli.pool, *rest)
    assert facts(cli.pool) != before


@pytest.mark.parametrize("name", ["dataset rm", "checkpoint rm latest"])
def test_nothing_is_deleted_without_a_terminal_and_without_yes(cli: Cli, name: str) -> None:
    """Point 8: `hpstore dataset rm` deleted at once. One line, code 2, nothing has changed."""
    before, (words, rest) = facts(cli.pool), DESTRUCTIVE[name]
    rest = tuple(cli.directory / one if one == "disk3" else one for one in rest)
    said = cli(*words, cli.pool, *rest, code=ConfigError.exit_code)
    assert "nothing was changed: say --yes" in said
    assert said.count("\n") == 1
    assert facts(cli.pool) == before
    cli(*words, cli.pool, *rest, "--yes")
    assert facts(cli.pool) != before


@pytest.mark.parametrize(("answer", "code"), [("n", 1), ("", 1), ("y", 0)])
def test_on_a_terminal_it_is_asked(cli: Cli, answer: str, code: int) -> None:
    """The question names what will be gone; only yes is yes."""
    ours, theirs = pty.openpty()
    run = subprocess.Popen(
        [sys.executable, "-m", "hpstore", "dataset", "rm", cli.pool, "train"],
        stdin=theirs,
        stderr=theirs,
        stdout=subprocess.DEVNULL,
        cwd=ROOT,
    )
    os.close(theirs)
    os.write(ours, f"{answer}\n".encode())
    assert run.wait(60) == code
    said = os.read(ours, 4000).decode()
    os.close(ours)
    assert f"delete data set train of {cli.pool}?" in said
    assert ("nothing was changed" in said) == bool(code)
    with hpstore.open(cli.pool, read_only=True) as opened:
        assert bool(list_datasets(opened)) == bool(code)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """As on a terminal whose user always answers no: the questions."""
    questions: list[str] = []

    def answer(question: str, **_: object) -> bool:
        questions.append(question)
        return False

    monkeypatch.setattr("hpstore.cli.confirm.on_terminal", lambda: True)
    monkeypatch.setattr("hpstore.cli.object_commands.on_terminal", lambda: True)
    monkeypatch.setattr("typer.confirm", answer)
    return questions


OVERWRITING: dict[str, tuple[object, ...]] = {
    "object k": ("put", "pool.toml", "k", "new"),
    "old": ("get", "pool.toml", "k", "old"),
    "old.pt": ("checkpoint", "export", "pool.toml", "runs/a", 1, "old.pt"),
    "folder": ("checkpoint", "export", "pool.toml", "runs/a", 1, "folder"),
    "model.json": ("health", "train", "none.csv", "--out", "model.json"),
    "old.json": ("bench", "erasure", "--json", "old.json"),
}


@pytest.fixture
def standing(cli: Cli) -> dict[str, bytes]:
    """What the commands of OVERWRITING would replace."""
    (cli.directory / "folder").mkdir()
    kept = {
        "old": b"1",
        "old.pt": b"2",
        "folder/model.safetensors": b"3",
        "model.json": b"4",
        "old.json": b"5",
    }
    for name, data in kept.items():
        (cli.directory / name).write_bytes(data)
    (cli.directory / "new").write_bytes(b"new data")
    return kept


@pytest.mark.parametrize("what", OVERWRITING)
def test_overwriting_is_asked_on_a_terminal(
    cli: Cli, standing: dict[str, bytes], asked: list[str], what: str
) -> None:
    """Issue 36: with no for an answer, the code is 1 and everything is as it was."""
    cli(*OVERWRITING[what], code=1)
    (question,) = asked
    assert question.startswith(f"replace {what}")
    assert {name: (cli.directory / name).read_bytes() for name in standing} == standing
    with hpstore.open(cli.pool, read_only=True) as pool:
        assert pool.get("k") == b"data"


@pytest.mark.parametrize("what", ["old", "old.pt", "folder"])
def test_local_files_are_not_replaced_without_a_terminal_and_without_yes(
    cli: Cli, standing: dict[str, bytes], what: str
) -> None:
    said = cli(*OVERWRITING[what], code=ConfigError.exit_code)
    assert f"replace {what}? There is no terminal to ask" in said
    assert {name: (cli.directory / name).read_bytes() for name in standing} == standing
    if what != "folder":
        cli(*OVERWRITING[what], "--yes")
        assert (cli.directory / what).read_bytes() != standing[what]


def test_scripts_replace_the_object_that_they_name(cli: Cli, standing: dict[str, bytes]) -> None:
    """`put POOL KEY FILE` is what stores do; --if-absent refuses."""
    cli("put", cli.pool, "k", "new")
    with hpstore.open(cli.pool, read_only=True) as pool:
        assert pool.get("k") == b"new data"
    cli("put", cli.pool, "k", "old", "--if-absent", code=errors.VersionConflict.exit_code)


def test_the_settings_of_a_pool_are_never_replaced(cli: Cli, asked: list[str]) -> None:
    """pool.toml has the pool's key: no answer and no --yes makes another one over it."""
    before = Path(cli.pool).read_bytes()
    words = ("create", cli.pool, "--data", 1, "--parity", 1, *(cli.directory / n for n in "xyz"))
    assert "exists" in cli(*words, code=ConfigError.exit_code)
    assert not asked
    assert Path(cli.pool).read_bytes() == before


def test_get_replaces_no_file_unless_told(cli: Cli, tmp_path: Path) -> None:
    """Point 8: `hpstore get` wrote over local files silently; links to files count as files."""
    out = tmp_path / "out"
    out.write_bytes(b"mine")
    (tmp_path / "link").symlink_to(out)
    for name in ("out", "link"):
        said = cli("get", cli.pool, "k", name, code=ConfigError.exit_code)
        assert f"replace {name}? There is no terminal to ask, and nothing was changed" in said
        assert out.read_bytes() == b"mine"
    cli("get", cli.pool, "k", "out", "--yes")
    assert out.read_bytes() == b"data"
    cli("get", cli.pool, "k", "/dev/null")


def test_get_keeps_the_mode_of_the_file_that_it_replaces(cli: Cli, tmp_path: Path) -> None:
    """A private file stays one, also while it is written."""
    out = tmp_path / "out"
    out.write_bytes(b"mine")
    out.chmod(0o600)
    (tmp_path / "link").symlink_to(out)
    cli("get", cli.pool, "k", "link", "--yes")
    assert out.read_bytes() == b"data"
    assert out.stat().st_mode & 0o777 == 0o600
