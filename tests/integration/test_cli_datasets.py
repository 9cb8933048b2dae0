"""`hpstore dataset ...` as people use it: arguments, output, errors in one line, exit codes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from hpstore.cli import main


class Cli:
    """Runs `hpstore dataset ...` on one pool, as its process would."""

    def __init__(
        self, tmp_path: Path, patch: pytest.MonkeyPatch, captured: pytest.CaptureFixture[str]
    ) -> None:
        self._patch, self._captured, self.pool = patch, captured, str(tmp_path / "pool.toml")
        patch.chdir(tmp_path)
        patch.setenv("HOME", str(tmp_path))
        self.run("create", self.pool, "--data", 2, "--parity", 1, "d0", "d1", "d2")

    def run(self, *words: object, code: int = 0) -> str:
        self._patch.setattr(sys, "argv", ["hpstore", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = self._captured.readouterr()
        assert (ended.value.code or 0) == code, f"{words}: {ended.value.code}\n{out}{err}"
        return out if code == 0 or out else err

    def __call__(self, command: str, *words: object, code: int = 0) -> str:
        return self.run("dataset", command, self.pool, *words, code=code)


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(tmp_path, monkeypatch, capsys)


def test_the_day_of_a_data_set(cli: Cli, tmp_path: Path) -> None:
    """ingest with a bad image, skip it, ls, info, verify, damage found, rm."""
    for number in range(20):
        path = tmp_path / f"in/{'cat' if number % 2 else 'dog'}/{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        body = np.random.default_rng(number).bytes(9000).replace(b"\xff", b"\0")
        path.write_bytes(b"\xff\xd8\xff\xda\0\2" + body + b"\xff\xd9"[: 0 if number == 7 else 2])
    said = cli("ingest", "train", "in", code=45)
    assert said.startswith("hpstore: IngestError: in: bad record cat/7.jpg: the JPEG is cut short")
    assert said.count("\n") == 1
    assert json.loads(cli("ls", "--json"))[0]["state"] == "unfinished"
    report = json.loads(cli("ingest", "train", "in", "--on-error", "skip", "--json"))
    assert (report["samples"], report["skipped_count"]) == (19, 1)
    assert report["skipped"][0]["name"] == "cat/7.jpg"
    assert "train" in cli("ls")
    facts = json.loads(cli("info", "train", "--json"))
    assert facts["metadata"]["classes"] == ["cat", "dog"]
    assert facts["losses_tolerated"] == 1
    assert json.loads(cli("inspect", "train", "--json")) == facts
    assert "19 samples" in cli("verify", "train")
    assert json.loads(cli("verify", "train", "--json"))["clean"] is True
    assert "exists" in cli("ingest", "train", "in", code=5)
    cli("rm", "train")
    assert json.loads(cli("ls", "--json")) == []
    assert "no data set" in cli("rm", "train", code=4)


def test_options_reach_the_data_set(cli: Cli, tmp_path: Path) -> None:
    """--no-shuffle, --field, --compression, --format; what is not known is one line and code 2."""
    np.savez(tmp_path / "a.npz", x=np.arange(50_000, dtype="i4").reshape(50, 1000), y=np.arange(50))
    cli("ingest", "a", "a.npz", "--no-shuffle", "--field", "x", "--compression", "zstd")
    facts = json.loads(cli("info", "a", "--json"))
    assert (list(facts["fields"]), facts["compression"]) == (["x"], "zstd")
    assert facts["shuffle_seed"] is None
    assert "order sequential" in cli("ingest", "b", "a.npz", "--no-shuffle")
    assert "order global with seed 5" in cli("ingest", "c", "a.npz", "--seed", 5)
    assert "is not one of" in cli("ingest", "d", "a.npz", "--format", "csv", code=2)
    assert "does not exist" in cli("ingest", "d", "none", code=2)
