"""Retention of real steps: by age, tried before it is done, and by the command line."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import hpstore
from hpstore.checkpoint import Checkpointer, RetentionRule
from hpstore.cli import confirm, retention_command
from hpstore.errors import CheckpointError, ConfigError
from hpstore.pool.admin import PoolAdmin
from hpstore.trainers.named_checkpoints import NamedCheckpoints
from tests.integration.cli_cases import PoolCommands

DAY_NS = 86400 * 10**9
RUN = "runs/a"


@pytest.fixture
def cli(pool: hpstore.Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> PoolCommands:
    del pool  # it is at pool.toml there
    return PoolCommands(tmp_path, capsys, "checkpoint")


@contextmanager
def days_ago(days: float) -> Iterator[None]:
    """The clock of this process is so far behind."""
    now = time.time_ns
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.time_ns", lambda: now() - round(days * DAY_NS))
        yield


def save(ckpt: Checkpointer, step: int, days: float = 0.0, **words: Any) -> None:
    with days_ago(days):
        ckpt.save(step, {"w": torch.full((9,), float(step))}, **words).result()
        ckpt.wait()


def fill(pool: hpstore.Pool) -> None:
    """Steps 1 to 6 of RUN, of 9, 8, 3, 2, 1 and 0 days ago; the best is 2; 1 is protected."""
    with Checkpointer(pool, RUN) as ckpt:
        for step, days in enumerate((9, 8, 3, 2, 1, 0), start=1):
            save(ckpt, step, days, metrics={"loss": abs(step - 2.0)})
        ckpt.steps.protect(1, "first")


def test_steps_go_by_age_when_a_later_save_commits(pool: hpstore.Pool) -> None:
    """Those younger than keep_for stay beside the last one, the others go; restore finds each."""
    with Checkpointer(pool, RUN, keep_last=1, keep_for="7d") as ckpt:
        for step, days in enumerate((9, 8, 3, -30, 0), start=1):
            save(ckpt, step, days)
    with Checkpointer(pool, RUN) as ckpt:
        assert ckpt.steps() == [3, 4, 5]
        for step in ckpt.steps():
            assert ckpt.restore(state := {"w": torch.zeros(9)}, step) == step
            assert state["w"].tolist() == [float(step)] * 9


def test_a_dry_run_says_what_the_same_call_then_does(pool: hpstore.Pool) -> None:
    """It changes nothing; without dry_run exactly what it said goes, and once only."""
    fill(pool)
    with Checkpointer(
        pool, RUN, keep_last=1, keep_every=4, keep_for="60h", keep_best="min:loss"
    ) as c:
        before = sorted(pool.list(RUN))
        said = c.steps.retain(dry_run=True)
        assert sorted(pool.list(RUN)) == before
        assert {found.step: found.rules for found in said} == {
            1: (RetentionRule.PROTECTED,),
            2: (RetentionRule.BEST,),
            3: (),
            4: (RetentionRule.EVERY, RetentionRule.AGE),
            5: (RetentionRule.AGE,),
            6: (RetentionRule.LAST, RetentionRule.AGE),
        }
        assert [found.step for found in c.steps.retain() if not found.stays] == [3]
        assert c.steps() == [1, 2, 4, 5, 6]
        assert all(found.stays for found in c.steps.retain())


@pytest.mark.usefixtures("segments_apart")
def test_what_was_committed_last_stays_where_the_run_went_back(pool: hpstore.Pool) -> None:
    """Steps of an older line are later ones: retain() took the newest commit for an old step."""
    with Checkpointer(pool, RUN, keep_last=1, keep_every=10) as ckpt:
        for step in (10, 20, 30):
            save(ckpt, step)
    with Checkpointer(pool, RUN, keep_last=1, keep_every=10) as ckpt:
        assert ckpt.restore({"w": torch.zeros(9)}, 20) == 20
        save(ckpt, 25)
        assert {d.step for d in ckpt.steps.retain() if d.stays} == {10, 20, 25, 30}
        assert ckpt.steps() == [10, 20, 25, 30]


def test_nothing_goes_while_the_newest_step_is_not_whole(
    pool: hpstore.Pool, tmp_path: Path, cli: PoolCommands
) -> None:
    """PROTOCOL 19: with a device away all stay, and it is said why; once it is back they go."""
    fill(pool)
    with Checkpointer(pool, RUN) as ckpt:
        ckpt.save(7, {"w": torch.ones(200_000)}).result()  # a stripe over all five devices
    pool.close()
    (tmp_path / "d0").rename(tmp_path / "away")
    with (
        hpstore.open(tmp_path / "pool.toml") as opened,
        Checkpointer(opened, RUN, keep_last=1) as ckpt,
    ):
        said = ckpt.steps.retain()
        assert {found.rules for found in said} == {(RetentionRule.FRAGILE,)}
        assert "step 7, the newest" in said[0].reason
        assert len(ckpt.steps()) == 7
    assert "7 steps stay, 0 go" in cli("retention", RUN, "--keep-last", 1, "--yes")
    (tmp_path / "away").rename(tmp_path / "d0")
    cli("retention", RUN, "--keep-last", 1, "--yes")
    assert [row["step"] for row in cli.json("ls", RUN)] == [1, 7]


def test_the_command_shows_and_deletes_only_with_yes(cli: PoolCommands, pool: hpstore.Pool) -> None:
    """A line a step with the rules that keep it; without a terminal and --yes nothing changes."""
    fill(pool)
    rules = ("retention", RUN, "--keep-last", 2, "--keep-best", "min:loss", "--keep-for", "60h")
    shown = cli(*rules)
    assert "nothing was deleted: --yes does it" in cli.err
    assert "5 steps stay, 1 goes" in shown
    assert "protected as first" in shown
    assert "the best by min:loss (0)" in shown
    assert "5 steps stay, 1 goes" in cli(*rules, "--dry-run")
    assert cli.err == ""
    found = cli.json(*rules)
    assert (found["going"], found["deleted"], found["failed"]) == ([3], [], "")
    assert found["steps"][3] == {
        "step": 4,
        "stays": True,
        "rules": ["keep_for"],
        "reason": "2.0 d old, less than 2.5 d",
    }
    assert len(cli.json("ls", RUN)) == 6
    assert cli.json(*rules, "--yes")["deleted"] == [3]
    assert [row["step"] for row in cli.json("ls", RUN)] == [1, 2, 4, 5, 6]
    assert "1 of 1 steps are deleted" in cli("retention", RUN, "--keep-last", 3, "--yes")
    assert [row["step"] for row in cli.json("ls", RUN)] == [1, 4, 5, 6]


def test_best_count_keeps_several(cli: PoolCommands, pool: hpstore.Pool) -> None:
    """The count of Best, as an option."""
    fill(pool)
    rules = ("retention", RUN, "--keep-last", 1, "--keep-best", "min:loss", "--best-count", 3)
    assert cli.json(*rules)["going"] == [4, 5]


@pytest.mark.parametrize(("answer", "left"), [(False, 6), (True, 2)])
def test_on_a_terminal_it_asks(
    cli: PoolCommands,
    pool: hpstore.Pool,
    monkeypatch: pytest.MonkeyPatch,
    answer: bool,
    left: int,
) -> None:
    """After the table; only yes deletes. --dry-run asks nothing."""
    fill(pool)
    asked: list[str] = []

    def confirmed(question: str, **_: object) -> bool:
        asked.append(question)
        return answer

    monkeypatch.setattr(confirm, "on_terminal", lambda: True)
    monkeypatch.setattr(retention_command, "on_terminal", lambda: True)
    monkeypatch.setattr("typer.confirm", confirmed)
    cli("retention", RUN, "--keep-last", 1, "--dry-run")
    assert not asked
    cli("retention", RUN, "--keep-last", 1, code=0 if answer else 1)
    assert asked == ["delete steps 2, 3, 4, 5 of runs/a?"]
    assert len(cli.json("ls", RUN)) == left


def test_what_is_protected_while_it_asks_stays(
    cli: PoolCommands, pool: hpstore.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a step that a training commits meanwhile deletes none that was not agreed to."""
    fill(pool)

    def confirmed(*_: object, **__: object) -> bool:
        with Checkpointer(pool, RUN) as ckpt:
            ckpt.steps.protect(3, "meanwhile")
            save(ckpt, 7)
        return True

    monkeypatch.setattr(confirm, "on_terminal", lambda: True)
    monkeypatch.setattr(retention_command, "on_terminal", lambda: True)
    monkeypatch.setattr("typer.confirm", confirmed)
    assert "3 of 4 steps are deleted" in cli("retention", RUN, "--keep-last", 1)
    assert [row["step"] for row in cli.json("ls", RUN)] == [1, 3, 6, 7]


def test_what_could_not_be_deleted_is_said(
    cli: PoolCommands, pool: hpstore.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the class' exit code; what is there still is not listed as deleted."""
    fill(pool)

    def refused(*_: object, **__: object) -> None:
        raise CheckpointError("no room for tombstones")

    monkeypatch.setattr(PoolAdmin, "remove_versions", refused)
    said = cli("retention", RUN, "--keep-last", 1, "--yes", code=CheckpointError.exit_code)
    assert "steps 2, 3, 4, 5 are still there: no room for tombstones" in said
    assert len(cli.json("ls", RUN)) == 6


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--keep-last", 1, "--keep-best", "loss"), "min:loss"),
        (("--keep-last", 1, "--keep-for", "soon"), "--keep-for: 'soon' is not a span of time"),
        (("--keep-last", 1, "--best-count", 2), "--keep-best"),
        (("--keep-last", 1, "--yes", "--dry-run"), "Leave one out"),
    ],
)
def test_wrong_rules_are_refused(cli: PoolCommands, words: tuple[object, ...], said: str) -> None:
    """In one line, before anything is read."""
    text = cli("retention", RUN, *words, code=ConfigError.exit_code)
    assert said in text
    assert text.count("\n") == 1


def test_checkpoints_by_name_and_prefixes_without_any_are_refused(
    cli: PoolCommands, pool: hpstore.Pool
) -> None:
    """The numbers of the former are no steps of their trainer."""
    with NamedCheckpoints(pool, "runs/lit") as named:
        named.save("last.ckpt", {"w": torch.ones(3)})
    said = cli("retention", "runs/lit", "--keep-last", 1, code=ConfigError.exit_code)
    assert "saved by name by a trainer" in said
    said = cli("retention", "runs/none", "--keep-last", 1, code=CheckpointError.exit_code)
    assert "nothing" in said or "no checkpoint" in said
