"""The README's claims that a machine can check."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

import hpstore
from hpstore.checkpoint import Checkpointer
from hpstore.loaders import DataLoader, Dataset, DatasetWriter, Field

README = Path(__file__).resolve().parents[2] / "README.md"


def test_the_ten_lines_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The Python examples work as printed, one after the other."""
    monkeypatch.chdir(tmp_path)
    space: dict[str, object] = {}
    for code in re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL):
        exec(compile(code, "README.md", "exec"), space)
    assert "b'0123456789' 2" in capsys.readouterr().out
    assert space["pool"].list("runs/first/step")  # type: ignore[attr-defined]
    space["pool"].close()  # type: ignore[attr-defined]


def test_the_three_changed_lines_run(tmp_path: Path) -> None:
    """The added lines of the diff, in order, with the names that the text below it gives."""
    (diff,) = re.findall(r"```diff\n(.*?)```", README.read_text(), re.DOTALL)
    added = [line[1:] for line in diff.splitlines() if line.startswith("+")]
    assert len(added) == 3
    model = torch.nn.Linear(4, 4)
    with hpstore.create([tmp_path / d for d in "abc"], scheme="2+1", config=tmp_path / "p") as pool:
        with DatasetWriter(pool, "train", {"x": Field("float32", (4,))}) as writer:
            writer.write_batch({"x": np.zeros((300, 4), "float32")})
        with Checkpointer(pool, "runs/first") as ckpt:
            state: dict[str, object] = {"model": model}
            space = {"pool": pool, "ckpt": ckpt, "state": state, "DataLoader": DataLoader}
            space["Dataset"] = Dataset
            exec(added[0], space)
            assert [len(batch["x"]) for batch in space["loader"]] == [256, 44]  # type: ignore[attr-defined]
            state["loader"] = space["loader"]
            exec("\n".join(added[1:]), space)
            ckpt.wait()
            assert (space["step"], ckpt.steps()) == (0, [0])
        space["loader"].close()  # type: ignore[attr-defined]


def test_no_figure_is_missing_and_links_lead_somewhere() -> None:
    """No placeholder is left; every relative link names a file."""
    text = README.read_text()
    assert "@" not in re.sub(r"`[^`]*`", "", text)
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (README.parent / target).exists(), target


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_the_checkpoint_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its Python blocks work as printed, one after the other."""
    monkeypatch.chdir(tmp_path)
    text = (README.parent / "docs/checkpoints.md").read_text()
    space: dict[str, object] = {}
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(code, "checkpoints.md", "exec"), space)
    assert "3 2 tensor" in capsys.readouterr().out
    assert space["pool"].exists("runs/dcp/step-7/manifest")  # type: ignore[attr-defined]
    space["pool"].close()  # type: ignore[attr-defined]


def test_the_cache_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its Python block works as printed, and the cache has hits."""
    monkeypatch.chdir(tmp_path)
    text = (README.parent / "docs/cache.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(code, "cache.md", "exec"), {})
    assert float(capsys.readouterr().out) > 0.2


@pytest.mark.parametrize("page", sorted(README.parent.glob("docs/**/*.md")), ids=lambda p: p.name)
def test_links_of_the_pages_lead_somewhere(page: Path) -> None:
    """Every relative link names a file."""
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target
