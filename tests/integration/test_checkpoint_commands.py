"""The checkpoint commands as one types them, in this process: what they print, refuse and leave."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import hpstore
from hpstore.checkpoint import Checkpointer, SaveOptions, StorageWriter
from hpstore.cli import main
from hpstore.errors import CheckpointError, ConfigError, HpstoreError, MalformedFile, ObjectNotFound
from tests.fault.common import poll
from tests.integration.cli_cases import PoolCommands

RUN = "runs/a"


@pytest.fixture
def cli(pool: hpstore.Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> PoolCommands:
    del pool  # it is at pool.toml there
    return PoolCommands(tmp_path, capsys, "checkpoint")


def save(pool: hpstore.Pool, step: int, state: dict[str, Any], prefix: str = RUN) -> None:
    with Checkpointer(pool, prefix) as checkpointer:
        checkpointer.save(step, state).result()


def test_garbage_gives_one_line(cli: PoolCommands, tmp_path: Path) -> None:
    """No traceback, the class' exit code, for every kind of source."""
    junk = np.random.default_rng(0).bytes(5000)
    (tmp_path / "dir").mkdir()
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(junk)
    for name in ("x.safetensors", "x.pt", "x.unknown"):
        (tmp_path / name).write_bytes(junk)
    cases: list[tuple[str, type[HpstoreError]]] = [
        (name, MalformedFile) for name in ("x.safetensors", "x.pt")
    ]
    cases += [("dir", CheckpointError)]
    cases += [(name, ConfigError) for name in ("x.unknown", "gone.pt")]
    by_flags: list[tuple[tuple[str, ...], type[HpstoreError]]] = [
        ((), MalformedFile),  # by hpstore's reader
        (("--allow-pickle",), CheckpointError),  # by torch's
    ]
    for flags, of_dcp in by_flags:
        for name, error in [*cases, ("dcp", of_dcp)]:
            text = cli("import", RUN, tmp_path / name, "--step", 1, *flags, code=error.exit_code)
            assert text.count("\n") == 1, text
            assert text.startswith(f"hpstore: {error.__name__}: ")


@pytest.mark.usefixtures("segments_apart")
def test_the_day_of_a_checkpoint(cli: PoolCommands, pool: hpstore.Pool, tmp_path: Path) -> None:
    """ls, inspect, verify, export, import, protect, rm as one types them."""
    with Checkpointer(pool, RUN, save=SaveOptions(lineage={"git": "abc"})) as checkpointer:
        for step in (1, 2, 3):
            state = {"model": {"w": torch.ones(200_000), "b": torch.full((3,), step)}, "n": step}
            checkpointer.save(step, state, metrics={"loss": 1 / step}).result()
    cli("protect", RUN, 2, "best")
    rows = json.loads(cli("ls", RUN, "--json"))
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert rows[1]["protected"] == ["best"]
    assert all(row["shared_bytes"] >= 800_000 > row["own_bytes"] for row in rows[1:])
    assert "best" in cli("ls", RUN)
    found = json.loads(cli("inspect", RUN, "--keys", "model", "--json"))
    assert (found["step"], found["bytes"], found["losses_tolerated"]) == (3, 800_024, 2)
    assert found["lineage"] == {"git": "abc"}
    assert [tensor["name"] for tensor in found["tensors"]] == ["model/w", "model/b"]
    shown = cli("inspect", RUN, 1)
    assert "n = 1" in shown
    assert "[200000]" in shown
    assert "all as saved" in cli("verify", RUN, 3)
    assert len(json.loads(cli("verify", RUN, "--all", "--json"))) == 3
    out = tmp_path / "m.safetensors"
    assert "left out" in cli("export", RUN, "latest", out)
    assert torch.equal(safetensors.torch.load_file(out)["b"], torch.full((3,), 3))
    cli("import", "runs/b", out, "--step", 0, "--as", "model")
    assert json.loads(cli("inspect", "runs/b", "--json"))["lineage"]["imported_from"] == out.name
    text = cli("rm", RUN, 2, 9, 1, "--yes", code=CheckpointError.exit_code)
    assert text.count("\n") == 2
    assert [row["step"] for row in json.loads(cli("ls", RUN, "--json"))] == [2, 3]
    cli("unprotect", RUN, "best")
    cli("rm", RUN, 2, "--yes")


def test_commands_leave_a_running_training_alone(cli: PoolCommands, pool: hpstore.Pool) -> None:
    """None takes the fence or collects garbage: the training saves on, its keys are unchanged."""
    with Checkpointer(pool, RUN) as training_run:
        training_run.save(1, {"a": torch.zeros(9)}).result()
        training_run.save(2, {"a": torch.ones(9)}).result()
        pool.put(f"{RUN}/step-000000000009/segment-00ff-r00000", b"of nobody")
        # the note of an attempt goes after its result is there
        poll(60, lambda: not any("/attempts/" in key for key in pool.list(RUN)))
        before = pool.list()
        for words in (
            ("ls", RUN),
            ("inspect", RUN),
            ("verify", RUN, "--all"),
            ("protect", RUN, 1, "x"),
            ("unprotect", RUN, "x"),
        ):
            cli(*words)
        assert pool.list() == before
        cli("rm", RUN, 1, "--yes")
        assert f"{RUN}/step-000000000009/segment-00ff-r00000" in pool.list()
        training_run.save(3, {"a": torch.ones(9)}).result()


@pytest.mark.usefixtures("segments_apart")
def test_verify_goes_on_past_a_step_that_cannot_be_read(
    cli: PoolCommands, pool: hpstore.Pool
) -> None:
    """--all reports each step, and exits as verify does for damage."""
    for step in (1, 2):
        save(pool, step, {"a": torch.full((9,), step)})
    with Checkpointer(pool, RUN) as checkpointer:
        pool.delete(checkpointer.steps.manifest(1).segments[0].key)
    cli("verify", RUN, "--all", code=50)
    assert "step 2" in cli("verify", RUN)
    with Checkpointer(pool, RUN) as checkpointer:
        pool.delete(checkpointer.steps.manifest(2).segments[0].key)
    assert "ObjectNotFound" in cli("verify", RUN, code=ObjectNotFound.exit_code)
    assert "no checkpoint" in cli("verify", "runs/none", "--all", code=CheckpointError.exit_code)


def test_verify_tells_how_far_it_is(pool: hpstore.Pool) -> None:
    """Bytes done rise to the sum over all items."""
    save(pool, 1, {"a": torch.zeros(5_000_000), "b": torch.zeros(3, dtype=torch.uint8)})
    seen: list[tuple[int, int]] = []
    with Checkpointer(pool, RUN) as checkpointer:
        items = checkpointer.steps.manifest(1).items
        assert checkpointer.verify(1, progress=lambda *step: seen.append(step)).ok
    assert seen[-1] == (sum(item.length for item in items),) * 2
    assert len(seen) > 3


def test_every_checkpoint_command_has_help_with_an_example(
    cli: PoolCommands, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--help shows a line that can be typed."""
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("ls", "inspect", "verify", "export", "import", "rm", "protect", "unprotect"):
        assert f"hpstore checkpoint {name} pool.toml" in cli(name, "--help")


def test_a_mistyped_prefix_is_told_where_checkpoints_are(
    cli: PoolCommands, pool: hpstore.Pool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every command that reads names near prefixes; `ls` says so beside its empty list."""
    for prefix in (RUN, "runs/b", "other", "deep/er/c"):
        save(pool, 1, {"a": torch.ones(3)}, prefix)
    said = "no checkpoints under 'run/a'; there are some under 'runs/a'"
    failed = CheckpointError.exit_code
    for words in (
        ("inspect",),
        ("verify",),
        ("verify", "--all"),
        ("rm", 1, "-y"),
        ("export", "latest", "x.pt"),
        ("protect", "latest", "x"),
    ):
        assert said in cli(words[0], "run/a", *words[1:], code=failed), words
    assert "'runs/a', 'runs/b'" in cli("inspect", "runs", code=failed)
    assert "under 'runs/a'" in cli("inspect", "runs/a/step-000000000001", code=failed)
    for empty in ("", "/"):
        assert "there are some under" in cli("ls", empty, code=ConfigError.exit_code)
    assert "step 1: " in cli("verify", "runs/a/")
    assert json.loads(cli("ls", "run/a", "--json")) == []
    with pytest.raises(CheckpointError, match="under 'run/a'; there are some under 'runs/a'"):
        Checkpointer(pool, "run/a").restore({"a": torch.ones(3)}, step=1)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_an_empty_list_says_on_the_side_where_checkpoints_are(
    pool: hpstore.Pool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Standard output stays what a machine reads."""
    save(pool, 1, {"a": torch.ones(3)})
    dcp_save({"a": torch.ones(3)}, storage_writer=StorageWriter(pool, "dcp/x"), no_dist=True)
    words = {"run": "under 'runs/a'", "dcp/x": "StorageReader(pool, 'dcp/x')"}
    for prefix, said in words.items():
        argv = ["hpstore", "checkpoint", "ls", str(tmp_path / "pool.toml"), prefix, "--json"]
        monkeypatch.setattr(sys, "argv", argv)
        with pytest.raises(SystemExit):
            main()
        shown = capsys.readouterr()
        assert json.loads(shown.out) == []
        assert said in shown.err


def test_verify_of_a_step_and_of_all_is_refused(cli: PoolCommands, pool: hpstore.Pool) -> None:
    """`verify 1 --all` would have read all and said nothing of the step."""
    save(pool, 1, {"a": torch.ones(3)})
    for step in ("1", "latest"):
        said = cli("verify", RUN, step, "--all", code=ConfigError.exit_code)
        assert f"both step {step} and --all" in said


def test_rm_of_the_latest_step_needs_a_word_more(cli: PoolCommands, pool: hpstore.Pool) -> None:
    """Without --yes nothing goes, also not what is named beside it."""
    for step in (1, 2, 3):
        save(pool, step, {"a": torch.full((9,), step)})
    assert "latest is step 3" in cli("rm", RUN, 1, "latest", code=ConfigError.exit_code)
    assert "is not a step" in cli("rm", RUN, 1, "lates", code=ConfigError.exit_code)
    assert [row["step"] for row in json.loads(cli("ls", RUN, "--json"))] == [1, 2, 3]
    assert cli("rm", RUN, "latest", 3, "--yes") == "step 3 is deleted\n"
    assert [row["step"] for row in json.loads(cli("ls", RUN, "--json"))] == [1, 2]


def test_an_export_under_an_unknown_suffix_is_refused(
    cli: PoolCommands, pool: hpstore.Pool, tmp_path: Path
) -> None:
    """It would have been a folder of safetensors; a slash, --format or a folder there makes it."""
    save(pool, 1, {"a": torch.ones(3)})
    for name in ("model.tar", "model.safetensor", "llama-3.1"):
        said = cli("export", RUN, 1, tmp_path / name, code=ConfigError.exit_code)
        assert all(part in said for part in (".safetensors, .pt", "dcp", "slash")), said
        assert not (tmp_path / name).exists()
    cli("export", RUN, 1, f"{tmp_path}/llama-3.1/")
    (tmp_path / "there.v2").mkdir()
    cli("export", RUN, 1, tmp_path / "there.v2", "--yes")
    cli("export", RUN, 1, tmp_path / "x.y", "--format", "dcp")
    assert (tmp_path / "llama-3.1" / "model.safetensors").is_file()
    assert (tmp_path / "there.v2" / "model.safetensors").is_file()
    assert (tmp_path / "x.y" / ".metadata").is_file()
