"""`hpstore dataset ...` as people use it: arguments, output, errors in one line, exit codes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import hpstore
from hpstore.loaders import delete_rows
from tests.integration.cli_cases import PoolCommands


@pytest.fixture
def cli(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> PoolCommands:
    made = PoolCommands(tmp_path, capsys, "dataset")
    made.create(data=2, parity=1, devices=3)
    return made


def test_the_day_of_a_data_set(cli: PoolCommands, tmp_path: Path) -> None:
    """ingest with a bad image, skip it, ls, info, verify, damage found, rm."""
    for number in range(20):
        path = tmp_path / f"in/{'cat' if number % 2 else 'dog'}/{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        body = np.random.default_rng(number).bytes(9000).replace(b"\xff", b"\0")
        path.write_bytes(b"\xff\xd8\xff\xda\0\2" + body + b"\xff\xd9"[: 0 if number == 7 else 2])
    said = cli("ingest", "train", "in", code=45)
    assert said.startswith("hpstore: IngestError: in: bad record cat/7.jpg: the JPEG is cut short")
    assert said.count("\n") == 1
    assert cli.json("ls")[0]["state"] == "unfinished"
    report = cli.json("ingest", "train", "in", "--on-error", "skip")
    assert (report["samples"], report["skipped_count"]) == (19, 1)
    assert report["skipped"][0]["name"] == "cat/7.jpg"
    assert "train" in cli("ls")
    facts = cli.json("info", "train")
    assert facts["metadata"]["classes"] == ["cat", "dog"]
    assert facts["losses_tolerated"] == 1
    assert cli.json("inspect", "train") == facts
    assert "19 samples" in cli("verify", "train")
    assert cli.json("verify", "train")["clean"] is True
    assert "exists" in cli("ingest", "train", "in", code=5)
    cli("rm", "train", "--yes")
    assert cli.json("ls") == []
    assert "no data set" in cli("rm", "train", "-y", code=4)


def test_options_reach_the_data_set(cli: PoolCommands, tmp_path: Path) -> None:
    """--no-shuffle, --field, --compression, --format; what is not known is one line and code 2."""
    np.savez(tmp_path / "a.npz", x=np.arange(50_000, dtype="i4").reshape(50, 1000), y=np.arange(50))
    cli("ingest", "a", "a.npz", "--no-shuffle", "--field", "x", "--compression", "zstd")
    facts = cli.json("info", "a")
    assert (list(facts["fields"]), facts["compression"]) == (["x"], "zstd")
    assert facts["shuffle_seed"] is None
    assert "order sequential" in cli("ingest", "b", "a.npz", "--no-shuffle")
    assert "order global with seed 5" in cli("ingest", "c", "a.npz", "--seed", 5)
    assert "is not one of" in cli("ingest", "d", "a.npz", "--format", "xml", code=2)
    assert "does not exist" in cli("ingest", "d", "none", code=2)


def test_versions_are_listed_shown_and_removed(cli: PoolCommands, tmp_path: Path) -> None:
    """The newest is not removed by its version; the others leave what is shared."""
    np.save(tmp_path / "a.npy", np.arange(1200).reshape(100, 12))
    cli("ingest", "train", "a.npy")
    assert [(v["name"], v["current"]) for v in cli.json("versions", "train")] == [("v1", True)]
    with hpstore.open(tmp_path / "pool.toml") as pool:
        delete_rows(pool, "train", range(10), version="fewer")
    listed = cli("versions", "train")
    assert "v1" in listed
    assert "fewer" in listed
    assert cli.json("ls")[0]["version"] == "fewer"
    assert cli.json("info", "train", "--version", "v1")["samples"] == 100
    assert cli.json("info", "train")["samples"] == 90
    assert cli.json("verify", "train", "--version", "v1")["samples"] == 100
    assert "is the newest" in cli("rm", "train", "--version", "fewer", "--yes", code=2)
    assert "no version 'v7'" in cli("rm", "train", "--version", "v7", "--yes", code=4)
    assert cli.json("rm", "train", "--version", "v1", "--yes")["objects"] > 0
    assert [v["name"] for v in cli.json("versions", "train")] == ["fewer"]
    assert cli.json("verify", "train")["clean"] is True
