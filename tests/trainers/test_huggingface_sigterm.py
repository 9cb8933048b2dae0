"""SIGTERM to torchrun: a Trainer on two ranks (DDP) saves one step on both, stops, and goes on."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hpstore.checkpoint import Checkpointer
from tests.integration.ranks import make_pool, open_pool
from tests.thorough import LONG
from tests.trainers.test_several_processes import join_job, launch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
MANY = 100_000  # steps that no test waits for
MORE = 3


def go_on(rank: int, world: int, directory: Path, prefix: str, steps: int) -> None:
    """The same training by forked processes: torchrun takes long to start."""
    join_job(rank, world)
    from tests.trainers.preempted_trainer import train

    train(directory, prefix, steps, "-")


def torchrun(directory: Path, fifo: Path, log: Path) -> subprocess.Popen[bytes]:
    """Of two ranks; a leader of its own process group, as a cluster starts it. What it says goes
    to a file: a pipe that fills up would stop it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "tests.trainers.preempted_trainer", str(directory), "run", str(MANY)]
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    environment |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
    with open(log, "wb") as said:
        return subprocess.Popen(
            [*command, str(fifo)],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=said,
            start_new_session=True,
        )


def heard(fifo: Path, job: subprocess.Popen[bytes]) -> bytes:
    """What a rank writes; nothing of a job that ends without a word."""
    end = os.open(fifo, os.O_RDWR)  # to read alone would wait for a writer, for ever
    try:
        while not select.select([end], [], [], 0.2)[0]:
            if job.poll() is not None:
                return b""
        return os.read(end, 100)
    finally:
        os.close(end)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "whom",
    [
        "torchrun",
        pytest.param(
            "its process group",
            marks=pytest.mark.skipif(not LONG, reason="a minute: HPSTORE_LONG_TESTS=1"),
        ),
    ],
)
def test_a_preempted_job_goes_on_as_if_never_stopped(tmp_path: Path, whom: str) -> None:
    """torchrun passes the signal on; a cluster that signals the group makes it come twice."""
    make_pool(tmp_path)
    fifo, log = tmp_path / "fifo", tmp_path / "log"
    os.mkfifo(fifo)
    job = torchrun(tmp_path, fifo, log)
    try:
        assert heard(fifo, job) == b"go", log.read_text()
        send = os.kill if whom == "torchrun" else os.killpg
        send(job.pid, signal.SIGTERM)
        job.wait(timeout=200)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)  # ranks that outlived torchrun train for hours
        job.wait()
    assert job.returncode != 0
    stopped = [torch.load(tmp_path / f"run-{rank}-{MANY}.pt", weights_only=True) for rank in (0, 1)]
    assert [found["code"] for found in stopped] == [143, 143], log.read_text()
    with open_pool(tmp_path) as pool, Checkpointer(pool, "run", rng=False) as ckpt:
        (step,) = ckpt.steps()  # saved once, though both ranks got the signal
    assert {found["step"] for found in stopped} == {step}
    launch(tmp_path, 2, go_on, "run", step + MORE)
    launch(tmp_path, 2, go_on, "straight", step + MORE)
    for rank in range(2):
        cut, straight = (
            torch.load(tmp_path / f"{prefix}-{rank}-{step + MORE}.pt", weights_only=True)
            for prefix in ("run", "straight")
        )
        assert f"resume-{step}-" in cut["folder"]
        assert cut["losses"][-MORE:] == straight["losses"][-MORE:]
        assert all(torch.equal(cut["model"][n], straight["model"][n]) for n in straight["model"])
