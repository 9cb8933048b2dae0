"""The examples, run as a user runs them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hpstore
from tests.thorough import LONG

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    found = tmp_path / "pool.toml"
    hpstore.create([tmp_path / f"d{i}" for i in range(4)], data=2, parity=1, config=found).close()
    return found


def run(config: Path, *arguments: str, ranks: int = 1) -> str:
    """Standard output of an example, which must end well."""
    launcher = [sys.executable]
    threads = "1" if ranks > 1 else "2"  # as torchrun, and as a shell of two cores has it
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    script, *options = arguments
    done = subprocess.run(
        [*launcher, str(ROOT / "examples" / script), "--pool", str(config), *options],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": threads},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_two_disks_die_and_the_losses_are_the_same(tmp_path: Path) -> None:
    """The script that draws README's picture: two of six directories go, are evicted, rebuilt."""
    pytest.importorskip("matplotlib")
    picture = tmp_path / "picture.png"
    done = subprocess.run(
        [
            sys.executable,
            str(ROOT / "examples" / "two_disks_die.py"),
            "--steps",
            "12",
            "--directory",
            str(tmp_path),
            "--out",
            str(picture),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "12 losses are equal, bit by bit" in done.stdout
    assert 10_000 < picture.stat().st_size < 150_000


def losses(path: Path) -> dict[int, str]:
    """By step, of the events of examples/train.py."""
    events = [json.loads(line) for line in path.read_text().splitlines()]
    return {event["step"]: event["loss"] for event in events if event["event"] == "step"}


def test_training_resumes_bit_exactly_on_another_number_of_ranks(
    config: Path, tmp_path: Path
) -> None:
    """In mid-epoch: steps 1 to 15 on one rank, 11 to 40 on two, against all of them on one.

    So many steps, as sums of another number of threads differ in their last bit now and then.
    """
    common = ["--checkpoint-every", "10", "--width", "64", "--layers", "2"]

    def train(prefix: str, steps: int, name: str, *more: str, ranks: int = 1) -> dict[int, str]:
        run(
            config,
            "train.py",
            "--prefix",
            prefix,
            "--steps",
            str(steps),
            *common,
            "--events",
            str(tmp_path / name),
            *more,
            ranks=ranks,
        )
        return losses(tmp_path / name)

    whole = train("a", 40, "whole")
    first = train("b", 15, "first")
    second = train("b", 40, "second", "--resume", ranks=2)
    assert sorted(second) == list(range(11, 41))
    assert {**first, **second} == whole


@pytest.mark.skipif(not LONG, reason="half a minute: HPSTORE_LONG_TESTS=1")
def test_digits_are_learnt_and_a_run_that_was_cut_ends_as_the_whole_one(config: Path) -> None:
    """Stopped between two checkpoints, resumed in mid-epoch: same losses, same accuracy."""
    whole = run(config, "digits.py", "--prefix", "a", "--epochs", "4").splitlines()[1:]
    run(config, "digits.py", "--prefix", "b", "--epochs", "4", "--stop-after", "50")
    rest = run(config, "digits.py", "--prefix", "b", "--epochs", "4", "--resume").splitlines()
    assert rest == whole[-len(rest) :]
    assert len(rest) == 3
    right = re.search(r"([0-9.]+) right", whole[-1])
    assert right is not None
    assert float(right.group(1)) > 0.8


def test_pictures_of_two_folders_are_learnt_on_two_ranks_and_the_run_goes_on(config: Path) -> None:
    """JPEG files in train/ and val/; a second run begins behind the epoch of the first."""
    pytest.importorskip("PIL")
    sizes = ["--train", "192", "--val", "31"]  # no multiple of the batches of two ranks
    first = run(config, "train_images.py", "--epochs", "1", *sizes, ranks=2)
    assert "shapes/train: 192 pictures" in first
    assert "shapes/val: 31 pictures" in first
    assert re.search(r"epoch 1: loss [0-9.]+, \d+ of 31 right", first)
    assert "2 ranks, classes ['circle', 'cross', 'square']" in first
    second = run(config, "train_images.py", "--epochs", "2", *sizes, ranks=2)
    assert "pictures" not in second
    assert re.findall(r"epoch (\d)", second) == ["2"]


@pytest.mark.skipif(not LONG, reason="half a minute: HPSTORE_LONG_TESTS=1")
def test_a_packed_mixture_that_was_stopped_on_three_ranks_ends_whole_on_two(config: Path) -> None:
    """The script compares every sequence and every document itself, and ends badly otherwise."""
    out = run(config, "pack_text.py", "--documents", "60", "--stop-at", "8", "--every", "3")
    assert "all three were killed at step 8" in out
    assert "2 ranks go on from step 6" in out
    assert re.search(r"3 ranks and then 2 were given the \d+ sequences of 1, each as often", out)
    for name in ("docs", "code", "sums"):
        assert re.search(rf"{name}: all \d+ tokens of 60 documents, once in a pass", out)


def test_wav_files_are_kept_whole_and_learnt(config: Path) -> None:
    """Three kinds of tones: most are told apart after four epochs; a third would be chance."""
    out = run(config, "decode_audio.py", "--sounds", "600")
    assert "bytes: b'RIFF' b'WAVE'" in out
    assert out.splitlines()[2].startswith("audio/wav, ")
    assert float(re.findall(r"([0-9.]+) right", out)[-1]) > 0.6


def test_training_from_slow_storage_is_the_same_with_the_cache() -> None:
    """The example compares all losses itself; the cache has hits and misses."""
    done = subprocess.run(
        [
            sys.executable,
            str(ROOT / "examples" / "remote_cache.py"),
            "--samples",
            "256",
            "--epochs",
            "2",
            "--latency-ms",
            "1",
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    row = next(line for line in done.stdout.splitlines() if "cache of 1/4" in line)
    hits, _, misses = (int(n) for n in re.findall(r"│\s+(\d+)\s+(?=│)", row))
    assert hits > 0
    assert misses > 0
