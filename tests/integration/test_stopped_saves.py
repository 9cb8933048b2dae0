"""Saves that are stopped at their manifest while another session collects: real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import hpstore
from hpstore.checkpoint import Checkpointer
from hpstore.config import Settings
from tests.thorough import some_of

_CHILD = """
import os, signal, sys, threading, time
import torch
import hpstore
from hpstore.checkpoint import Checkpointer
from hpstore.checkpoint.save import rank_plan
from hpstore.devices.file_handles import LocalWriter

named, begun, done, turn = int(sys.argv[1]), [0], [0], threading.Condition()
if sys.argv[2] == "apart":  # as saves are that are too large for their manifest
    rank_plan.WITHIN_BYTES = -1

def publish(self, path, guard=None, plain=LocalWriter.publish):
    if "manifest" not in path or "step-000000000002" not in path:
        return plain(self, path, guard)
    with turn:
        begun[0] += 1
        if begun[0] == named + 1:  # so many copies have their name
            turn.wait_for(lambda: done[0] == named)
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(0.1)  # it takes effect soon
            done[0] += 10
            turn.notify_all()
        elif begun[0] > named + 1:
            turn.wait_for(lambda: done[0] > 9)
    plain(self, path, guard)
    with turn:
        done[0] += 1
        turn.notify_all()

LocalWriter.publish = publish
with hpstore.open("pool.toml") as pool, Checkpointer(pool, "run", keep_last=2) as ckpt:
    for step in (1, 2):
        try:
            ckpt.save(step, {"w": torch.full((1000,), float(step))}).result()
            print("committed", step, flush=True)
        except hpstore.HpstoreError as error:
            print("raised", error, flush=True)
"""


@pytest.mark.parametrize(
    ("named", "where", "said", "left"),
    some_of(
        [
            (0, "apart", "raised another checkpointer", [1, 3]),
            (1, "apart", "raised another checkpointer", [2, 3]),
            (0, "within", "raised another checkpointer", [1, 3]),
            (1, "within", "raised another checkpointer", [2, 3]),
        ],
        *(0, 3),
    ),
)
def test_the_last_steps_are_there_whatever_becomes_of_a_save_that_was_stopped(
    named: int, where: str, said: str, left: list[int], tmp_path: Path
) -> None:
    """PROTOCOL 18, seed 8190: a step that could be read was counted by the retention of another
    session, which removed the one before it; then it was withdrawn. Now either the stopped save
    finds that it is over and nothing of it shows, or it is there for good, though it was not
    acknowledged: the claim that it was written under was taken over (PROTOCOL 6)."""
    settings = Settings(run_directory=str(tmp_path / "run"), workers_per_device=1)
    paths = [str(tmp_path / f"d{i}") for i in range(6)]
    config = tmp_path / "pool.toml"
    hpstore.create(paths, data=4, parity=2, config=config, settings=settings).close()
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD, str(named), where],
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    with child:
        assert child.stdout is not None
        try:
            os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            with hpstore.open(config) as pool, Checkpointer(pool, "run", keep_last=2) as other:
                other.save(3, {"w": torch.full((1000,), 3.0)}).result()
                other.wait()
                other.steps.collect_garbage()  # the fence has moved: the stopped save is dead
            child.send_signal(signal.SIGCONT)
        except BaseException:
            child.kill()
            raise
        lines = child.stdout.read().splitlines()
    assert lines[0] == "committed 1"
    assert lines[1].startswith(said), lines
    with hpstore.open(config) as pool, Checkpointer(pool, "run") as reader:
        assert reader.steps() == left
        for step in left:
            into = {"w": torch.zeros(1000)}
            assert reader.restore(into, step=step) == step
            assert (into["w"] == step).all()
        assert not pool.list("run/attempts/")
        assert not pool.list("run/condemned/")
