"""The README's claims that a machine can check."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

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
