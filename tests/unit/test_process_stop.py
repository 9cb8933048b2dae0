"""Stopping a process in tests: when the call returns, it has stopped."""

from __future__ import annotations

import mmap
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpstore.testing import process_stop
from hpstore.testing.process_stop import stop_process

COUNT = """
import mmap, sys
with open(sys.argv[1], "r+b") as file:
    shared = mmap.mmap(file.fileno(), 8)
    number = 0
    while True:
        number += 1
        shared[:] = number.to_bytes(8, "little")
"""


def test_on_return_it_does_nothing_more(tmp_path: Path) -> None:
    (tmp_path / "count").write_bytes(bytes(8))
    with subprocess.Popen([sys.executable, "-c", COUNT, str(tmp_path / "count")]) as child:
        with (tmp_path / "count").open("r+b") as file:
            shared = mmap.mmap(file.fileno(), 8)
        while shared[:] == bytes(8):
            time.sleep(0.01)
        for _ in range(20):
            stop_process(child.pid)
            seen = shared[:]
            time.sleep(0.005)
            assert shared[:] == seen
            child.send_signal(signal.SIGCONT)
        child.kill()
    with pytest.raises(ProcessLookupError):
        stop_process(child.pid)


def test_one_that_runs_on_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    states = iter(["R", "D"])
    monkeypatch.setattr(process_stop, "_states", lambda _: [next(states, "T")])
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        stop_process(child.pid)
        assert next(states, "T") == "T"
        monkeypatch.setattr(process_stop, "_states", lambda _: ["D"])
        monkeypatch.setattr(process_stop, "_SECONDS", 0.02)
        with pytest.raises(TimeoutError, match="runs on"):
            stop_process(child.pid)
        child.kill()
