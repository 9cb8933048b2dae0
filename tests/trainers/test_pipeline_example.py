"""examples/pipeline.py under torchrun: killed, restarted by torchrun, resumed with other stages."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpstore.loaders import DatasetWriter, Field
from hpstore.trainers.pipelining.schedules import ONE_STAGE, SCHEDULES
from tests.integration.ranks import make_pool, open_pool
from tests.thorough import LONG

ROOT = Path(__file__).resolve().parents[2]
LENGTH, STEPS = 16, 8
SMALL = [
    "--layers",
    "4",
    "--width",
    "32",
    "--length",
    str(LENGTH),
    "--rows",
    "2",
    "--microbatches",
    "4",
    "--checkpoint-every",
    "2",
    "--steps",
    str(STEPS),
]
pytestmark = pytest.mark.skipif(
    not LONG,
    reason="five starts of torchrun take a minute: HPSTORE_LONG_TESTS=1",
)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A pool with a small text under the name that the example looks for."""
    make_pool(tmp_path)
    text = np.random.default_rng(0).integers(0, 64, (400, LENGTH + 1), dtype=np.uint8)
    with (
        open_pool(tmp_path) as pool,
        DatasetWriter(
            pool, f"python-stdlib-{LENGTH}", {"tokens": Field("uint8", (LENGTH + 1,))}
        ) as writer,
    ):
        writer.write_batch({"tokens": text})
    return tmp_path


@contextmanager
def torchrun(
    directory: Path, world: int, run: str, *more: str, restarts: int = 0
) -> Iterator[subprocess.Popen[str]]:
    """The example on `world` processes, and its output."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(world),
        "--max-restarts",
        str(restarts),
        "--monitor-interval",
        "0.1",
        str(ROOT / "examples" / "pipeline.py"),
        "--pool",
        str(directory / "pool.toml"),
        "--prefix",
        run,
        "--events",
        str(directory / f"{run}.jsonl"),
        *SMALL,
        *more,
    ]
    environ = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": str(ROOT),
    }
    process = subprocess.Popen(
        command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def finish(process: subprocess.Popen[str]) -> None:
    """Read to the end; it must end well."""
    assert process.stdout is not None
    rest = process.stdout.read()
    assert process.wait(120) == 0, rest


def kill_after(process: subprocess.Popen[str], step: int, which: int) -> None:
    """SIGKILL one worker once a step has been printed."""
    assert process.stdout is not None
    read = []
    for line in process.stdout:
        read.append(line)
        if f"step {step}: loss" in line:
            break
    else:
        raise AssertionError("".join(read))
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(sorted(children, key=int)[which]), signal.SIGKILL)


def losses(directory: Path, run: str) -> dict[int, Any]:
    """By step, of the last attempt: the loss and the ledger."""
    rows = [json.loads(line) for line in (directory / f"{run}.jsonl").read_text().splitlines()]
    return {
        row["step"]: (row["loss"], row["samples"], row["digest"])
        for row in rows
        if row["event"] == "step"
    }


def test_killed_twice_and_resumed_with_one_stage(directory: Path) -> None:
    """A worker is killed and torchrun restarts the job, under other names in its store; a worker is
    killed and no restart is left; one process goes on. Same losses and samples as never stopped."""
    with torchrun(directory, 2, "whole", "--schedule", "1f1b") as process:
        finish(process)
    wanted = losses(directory, "whole")
    assert list(wanted) == list(range(STEPS))
    with torchrun(directory, 2, "cut", "--schedule", "1f1b", restarts=1) as process:
        kill_after(process, 2, which=0)
        kill_after(process, 5, which=1)  # no restart is left
        assert process.wait(120) != 0
    with torchrun(directory, 1, "cut", "--schedule", "gpipe", "--resume", "--recompute") as process:
        finish(process)
    found = losses(directory, "cut")
    assert sorted(found) == list(range(STEPS))
    for step, (loss, *ledger) in wanted.items():
        assert found[step][0] == pytest.approx(loss, abs=1e-6), step
        assert list(found[step][1:]) == ledger, step


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name not in ONE_STAGE])
def test_every_kind_of_schedule_runs_as_an_example(directory: Path, schedule: str) -> None:
    """On two processes, fed lazily, copied in bubbles."""
    more = ["--schedule", schedule, "--feed-lazily", "--snapshot", "bubbles"]
    with torchrun(directory, 2, "run", *more) as process:
        finish(process)
    assert list(losses(directory, "run")) == list(range(STEPS))
