"""A session that lost the fence commits nothing, wherever it was stopped: real processes."""

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
from tests.register_servers import etcd_or_skip
from tests.thorough import some_of

_CHILD = """
import os, signal, sys, threading, time
import torch
import hpstore
from hpstore.agreement.claims import KeyClaim
from hpstore.checkpoint import Checkpointer
from hpstore.checkpoint.save import commit, rank_plan
from hpstore.devices.file_handles import LocalWriter
from hpstore.runtime.clock import SystemClock

place, size, skew, step = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
ahead = SystemClock.wall_ms
SystemClock.wall_ms = lambda self: ahead(self) + 1000 * skew
if size == "apart":  # as saves are that are too large for their manifest
    rank_plan.WITHIN_BYTES = -1
word = f"step-{step:012d}/manifest"
named, stopped, turn, armed = [0], threading.Event(), threading.Lock(), [False]

def stop():
    stopped.set()
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.1)  # it takes effect soon

def look(*args, plain=commit.require_fence):
    found = plain(*args)
    if armed[0] and place == "after its look" and not stopped.is_set():
        stop()
    return found

def publish(self, path, guard=None, plain=LocalWriter.publish):
    if not armed[0] or "manifest" not in path or f"step-{step:012d}" not in path:
        return plain(self, path, guard)
    with turn:  # one after the other
        if not stopped.is_set() and place == f"{named[0]} names":
            stop()
        plain(self, path, guard)
        named[0] += 1

def give_back(self, plain=KeyClaim.give_back):
    if armed[0] and word in self._key and place == "before its answer" and not stopped.is_set():
        stop()
    return plain(self)

commit.require_fence = look
LocalWriter.publish = publish
KeyClaim.give_back = give_back
with hpstore.open("pool.toml") as pool, Checkpointer(pool, "run", rng=False) as ckpt:
    for number, value in ((1, 1.0), (step, 2.0)):
        armed[0] = value == 2.0
        try:
            state = {"w": torch.full((1000,), value)}
            ckpt.save(number, state, overwrite=step == 1).result()
            print("committed", number, flush=True)
        except hpstore.HpstoreError as error:
            print(type(error).__name__, error, flush=True)
"""
_PLACES = ["after its look", "0 names", "1 names", "2 names", "before its answer"]


def _pool(tmp_path: Path) -> Path:
    settings = Settings(
        run_directory=str(tmp_path / "run"), workers_per_device=1, claim_seconds=0.3
    )
    paths = [str(tmp_path / f"d{i}") for i in range(6)]
    config = tmp_path / "pool.toml"
    hpstore.create(paths, data=4, parity=2, config=config, settings=settings).close()
    return config


def _stopped_child(directory: Path, *words: str) -> subprocess.Popen[str]:
    """A trainer that has stopped itself in the commit of its second save."""
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD, *words],
        stdout=subprocess.PIPE,
        text=True,
        cwd=directory,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "TMPDIR": str(directory),
        },
    )
    os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    return child


def _goes_on(child: subprocess.Popen[str]) -> list[str]:
    child.send_signal(signal.SIGCONT)
    assert child.stdout is not None
    return child.stdout.read().splitlines()


def _contents(ckpt: Checkpointer) -> dict[int, float]:
    found = {}
    for step in ckpt.steps():
        into = {"w": torch.zeros(1000)}
        assert ckpt.restore(into, step=step) == step
        assert (into["w"] == into["w"][0]).all()
        found[step] = float(into["w"][0])
    return found


@pytest.mark.parametrize(
    ("place", "skew", "size"),
    some_of(
        [
            *((place, 0, "within") for place in _PLACES),
            *((place, 0, "apart") for place in ("after its look", "1 names", "before its answer")),
            ("0 names", 3600, "within"),
            ("after its look", -3600, "apart"),
        ],
        *(0, 2, 4, 6, 8, 9),
    ),
)
def test_what_a_stopped_session_had_begun_to_commit_is_decided_when_another_begins(
    place: str, skew: int, size: str, tmp_path: Path
) -> None:
    """PROTOCOL 18: it is a step by then, or never; and nobody hears that it was committed. Nothing
    collects garbage here."""
    config = _pool(tmp_path)
    with _stopped_child(tmp_path, place, size, str(skew), "2") as child:
        try:
            with hpstore.open(config) as pool, Checkpointer(pool, "run", rng=False) as other:
                other.save(3, {"w": torch.full((1000,), 3.0)}).result()
                begun = _contents(other)
                free = 2 not in begun
                if free and skew:  # before it goes on
                    other.save(2, {"w": torch.full((1000,), 5.0)}).result()
                    begun[2] = 5.0
                lines = _goes_on(child)
                assert _contents(other) == begun
                other.save(4, {"w": torch.full((1000,), 4.0)}).result()
                if free and not skew:
                    other.save(2, {"w": torch.full((1000,), 5.0)}).result()
                    begun[2] = 5.0
                assert _contents(other) == {**begun, 4: 4.0}
        except BaseException:
            child.kill()
            raise
    assert lines[0] == "committed 1"
    assert "has begun to save under 'run'" in lines[1], lines
    assert begun.keys() - {2} == {1, 3}
    with hpstore.open(config) as pool, Checkpointer(pool, "run", rng=False) as reader:
        assert _contents(reader) == {**begun, 4: 4.0}


@pytest.mark.parametrize(
    ("place", "size"),
    some_of([("after its look", "within"), ("2 names", "within"), ("1 names", "apart")], 0, 2),
)
def test_a_step_is_not_replaced_by_a_session_that_lost_the_fence(
    place: str, size: str, tmp_path: Path
) -> None:
    """PROTOCOL 18: the step holds what it held when the other session had begun."""
    config = _pool(tmp_path)
    with _stopped_child(tmp_path, place, size, "0", "1") as child:
        try:
            with hpstore.open(config) as pool, Checkpointer(pool, "run", rng=False) as other:
                other.save(3, {"w": torch.full((1000,), 3.0)}).result()
                begun = _contents(other)
                lines = _goes_on(child)
                assert _contents(other) == begun
        except BaseException:
            child.kill()
            raise
    assert lines[0] == "committed 1"
    assert not lines[1].startswith("committed"), lines
    assert begun.keys() == {1, 3}
    assert begun[1] in (1.0, 2.0)


def test_registers_in_etcd_order_the_commits_of_two_hosts(tmp_path: Path) -> None:
    """The stopped trainer has a run directory and a temporary directory of its own, and a clock
    that is ahead."""
    etcd = etcd_or_skip(tmp_path)
    try:
        config = _pool(tmp_path)
        with hpstore.open(config) as pool:
            pool.admin.move_registers(etcd.url)
            host = tmp_path / "host"
            host.mkdir()
            text = config.read_text(encoding="utf-8").replace(
                str(tmp_path / "run"), str(host / "run")
            )
            (host / "pool.toml").write_text(text, encoding="utf-8")
            (host / "pool.toml").chmod(0o600)
            with _stopped_child(host, "0 names", "within", "3600", "2") as child:
                try:
                    with Checkpointer(pool, "run", rng=False) as other:
                        other.save(3, {"w": torch.full((1000,), 3.0)}).result()
                        lines = _goes_on(child)
                        assert _contents(other) == {1: 1.0, 3: 3.0}
                except BaseException:
                    child.kill()
                    raise
            assert lines[0] == "committed 1"
            assert "has begun to save under 'run'" in lines[1], lines
    finally:
        etcd.close()
