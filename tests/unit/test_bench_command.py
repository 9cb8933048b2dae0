"""`hpstore bench`: a run that is cut leaves what it has found."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from hpstore.benchmarks.harness.measure import Options
from hpstore.benchmarks.suite import BENCHMARKS
from hpstore.cli.bench_command import interrupted_by, measured

OPTIONS = Options(directory=None, size_bytes=1, repeats=3)


def cut(options: Options) -> dict[str, object]:
    """Two repetitions, then somebody ends it, as `timeout` does."""
    options.keep({"repeats": 1})
    options.keep({"repeats": 2})
    os.kill(os.getpid(), signal.SIGTERM)
    raise AssertionError("it goes on")


def test_a_file_has_the_repetitions_before_the_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(BENCHMARKS, "cut", cut)
    monkeypatch.setitem(BENCHMARKS, "whole", lambda options: {"size": options.size_bytes})
    path = tmp_path / "found.json"
    with pytest.raises(KeyboardInterrupt):
        measured({"whole": OPTIONS, "cut": OPTIONS}, str(path))
    found = json.loads(path.read_text())
    assert found["whole"] == {"size": 1}
    assert found["cut"] == {"repeats": 2, "unfinished": True}


def test_standard_output_has_them_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(BENCHMARKS, "cut", cut)
    with pytest.raises(KeyboardInterrupt):
        measured({"cut": OPTIONS}, "-")
    assert json.loads(capsys.readouterr().out)["cut"] == {"repeats": 2, "unfinished": True}


def test_a_run_that_ends_is_not_called_unfinished(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And the signal does what it did before."""

    def whole(options: Options) -> dict[str, object]:
        options.keep({"repeats": 1})
        return {"repeats": 3}

    monkeypatch.setitem(BENCHMARKS, "whole", whole)
    before = signal.getsignal(signal.SIGTERM)
    path = tmp_path / "found.json"
    assert measured({"whole": OPTIONS}, str(path))["whole"] == {"repeats": 3}
    assert json.loads(path.read_text())["whole"] == {"repeats": 3}
    assert signal.getsignal(signal.SIGTERM) == before
    with pytest.raises(KeyboardInterrupt), interrupted_by(signal.SIGTERM):
        os.kill(os.getpid(), signal.SIGTERM)
