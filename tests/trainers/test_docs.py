"""docs/trainers.md: its examples run as printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs" / "trainers.md"

for _package in ("lightning", "transformers", "accelerate", "torch_checkpointing"):
    pytest.importorskip(_package)

pytestmark = [
    # as in test_lightning.py: few workers, one directory, and what torch 2.13 has renamed
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    # the example is small: fewer batches than log_every_n_steps
    pytest.mark.filterwarnings("ignore:The number of training batches"),
]


def test_the_examples_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One after the other in one program: first runs, resumed runs, what they print."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    code = "\n".join(re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL))
    space: dict[str, object] = {"__name__": "example"}
    exec(compile(code, "trainers.md", "exec"), space)
    space["pool"].close()  # type: ignore[attr-defined]
    printed = capsys.readouterr().out
    for line in (
        "lightning 4 12",
        "trainer [5] [5, 10]",
        "accelerate 2",
        "torch_checkpointing ['model']",
    ):
        assert line in printed
    assert not list(tmp_path.glob("out/checkpoint-*"))
    assert not list(tmp_path.glob("step-*"))
