"""The README's claims that a machine can check."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).resolve().parents[2] / "README.md"


def test_the_ten_lines_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The Python example works as printed."""
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    space: dict[str, object] = {}
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
