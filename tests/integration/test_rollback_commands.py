"""`hpstore checkpoint rollback`, `undo-rollback`, and what `ls` shows of hidden steps."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import typer

import hpstore
from hpstore.checkpoint import Checkpointer
from hpstore.cli import confirm, rollback_commands
from hpstore.errors import CheckpointError, ConfigError
from hpstore.trainers.named_checkpoints import NamedCheckpoints
from tests.integration.cli_cases import PoolCommands

RUN = "runs/a"
DAY_MS = 24 * 3600 * 1000


@pytest.fixture
def cli(pool: hpstore.Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> PoolCommands:
    """Steps 1 to 4."""
    with Checkpointer(pool, RUN) as ckpt:
        for step in (1, 2, 3, 4):
            ckpt.save(step, {"w": torch.full((100,), float(step))}).result()
    return PoolCommands(tmp_path, capsys, "checkpoint")


def steps(cli: PoolCommands) -> list[int]:
    return [row["step"] for row in cli.json("ls", RUN)]


def test_back_and_forth(cli: PoolCommands, pool: hpstore.Pool) -> None:
    """Hidden steps are listed apart, with until when they are kept; the undo brings them back."""
    assert "hidden" not in cli("ls", RUN)
    said = cli("rollback", RUN, 2, "--grace", "3d", "--yes")
    assert "steps 3, 4 are hidden since rollback " in said
    assert "undo-rollback brings them back" in said
    assert steps(cli) == [1, 2]
    (found,) = cli.json("ls", RUN, "--hidden")
    assert (found["step"], found["hidden"]) == (2, [3, 4])
    left = found["until_ms"] - time.time_ns() // 1_000_000
    assert 2.9 * DAY_MS < left <= 3 * DAY_MS
    until = rollback_commands.text_of_time(found["until_ms"])
    line = f"steps 3, 4 are hidden since rollback {found['name']} to step 2, and kept until {until}"
    assert line in cli("ls", RUN)
    assert cli("ls", RUN, "--hidden").strip() == line
    with Checkpointer(pool, RUN) as ckpt:
        assert ckpt.restore({"w": torch.zeros(100)}) == 2
    assert cli("undo-rollback", RUN, "--yes").strip() == "steps 3, 4 are back"
    assert steps(cli) == [1, 2, 3, 4]
    assert cli("ls", RUN, "--hidden") == ""
    assert cli.json("ls", RUN, "--hidden") == []


def test_as_json_and_by_name(cli: PoolCommands, pool: hpstore.Pool) -> None:
    first = cli.json("rollback", RUN, "3", "--yes")
    assert (first["step"], first["hidden"]) == (3, [4])
    with Checkpointer(pool, RUN) as ckpt:
        ckpt.save(5, {"w": torch.zeros(100)}).result()
    text = cli("undo-rollback", RUN, "--yes", code=CheckpointError.exit_code)
    assert "has committed the steps [5] since" in text
    second = cli.json("rollback", RUN, 3, "--yes")
    assert second["hidden"] == [5]
    assert [found["name"] for found in cli.json("ls", RUN, "--hidden")] == [
        first["name"],
        second["name"],
    ]
    back = cli.json("undo-rollback", RUN, first["name"], "--yes")
    assert (back["hidden"], back["lost"]) == ([4], [])
    assert steps(cli) == [1, 2, 3, 4]
    assert cli.json("rollback", RUN, "latest", "--yes")["hidden"] == []
    assert "step 4 is the last one: nothing was hidden" in cli("rollback", RUN, 4)


@pytest.mark.parametrize("answer", ["no", "none", "yes"])
def test_it_is_asked(
    cli: PoolCommands, monkeypatch: pytest.MonkeyPatch, pool: hpstore.Pool, answer: str
) -> None:
    """The question names what is hidden, until when; without a terminal it wants --yes."""
    asked: list[str] = []

    def confirmed(question: str, *, err: bool) -> bool:
        asked.append(question)
        assert err
        return answer == "yes"

    monkeypatch.setattr(confirm, "on_terminal", lambda: answer != "none")
    monkeypatch.setattr(typer, "confirm", confirmed)
    fence = pool.get(f"{RUN}/writer")
    code = {"yes": 0, "no": 1, "none": ConfigError.exit_code}[answer]
    cli("rollback", RUN, 2, code=code)
    assert steps(cli) == ([1, 2] if answer == "yes" else [1, 2, 3, 4])
    if answer == "none":
        assert "say --yes" in cli("rollback", RUN, 2, code=code)
    else:
        assert "hide steps 3, 4 of runs/a" in asked[0]
        assert "they can be brought back until 20" in asked[0]
    if answer == "yes":
        cli("undo-rollback", RUN)
        assert "bring back steps 3, 4 of runs/a" in asked[1]
    else:  # a training that runs was not disturbed
        assert pool.get(f"{RUN}/writer") == fence


def test_what_is_refused_changes_nothing(cli: PoolCommands, pool: hpstore.Pool) -> None:
    with Checkpointer(pool, RUN) as ckpt:
        ckpt.steps.protect(4, "best")
    fence = pool.get(f"{RUN}/writer")
    wrong = CheckpointError.exit_code
    assert "is protected as 'best'" in cli("rollback", RUN, 2, "--yes", code=wrong)
    assert "no checkpoint of step 9" in cli("rollback", RUN, 9, "--yes", code=wrong)
    assert "no checkpoints under" in cli("rollback", "runs/b", 2, "--yes", code=wrong)
    assert "can be taken back" in cli("undo-rollback", RUN, "--yes", code=wrong)
    cli("undo-rollback", RUN, "0" * 16, "--yes", code=wrong)
    for words in (("x",), (2, "--grace", "soon"), (2, "--grace", "-1")):
        cli("rollback", RUN, *words, "--yes", code=ConfigError.exit_code)
    assert steps(cli) == [1, 2, 3, 4]
    assert pool.get(f"{RUN}/writer") == fence
    assert cli.json("rollback", RUN, 2, "--force", "--yes")["protections"] == {"best": 4}


def test_checkpoints_by_name_are_refused(cli: PoolCommands, pool: hpstore.Pool) -> None:
    """Their numbers are not the trainer's steps."""
    with NamedCheckpoints(pool, "runs/named") as named:
        named.save("last", {"x": 1})
    text = cli("rollback", "runs/named", 1, "--yes", code=ConfigError.exit_code)
    assert "saved by name by a trainer" in text
