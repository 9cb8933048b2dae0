"""A process that is stopped for longer than its deadlines does not blame its devices for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

_CHILD = """
import os, sys, time
from concurrent.futures import ThreadPoolExecutor
from hpstore.config import Settings
import hpstore

def work():
    for _ in range(8):
        time.sleep(0.1)
    return "answered"

def waits():
    from hpstore.runtime.deadline_wait import wait_awake
    with ThreadPoolExecutor(1) as threads:
        future = threads.submit(work)
        print("go", flush=True)
        wait_awake([future], 1.2)
        return future.done()

def puts():
    from hpstore.objects.write.column_writer import ColumnWriter
    plain = ColumnWriter.seal
    def slow(self):
        work()
        plain(self)
    ColumnWriter.seal = slow
    settings = Settings(
        device_deadline_seconds=1.2, straggler_seconds=1.2, run_directory=os.path.abspath("run")
    )
    paths = [f"d{i}" for i in range(4)]
    with hpstore.create(paths, data=2, parity=1, config="pool.toml", settings=settings) as pool:
        print("go", flush=True)
        info = pool.put("a", b"x" * 100_000)
        lost = pool.metrics.snapshot().get("column_write_error_total", 0)
        return info.losses_tolerated == 1 and not lost

print({"waits": waits, "puts": puts}[sys.argv[1]](), flush=True)
"""


@pytest.mark.parametrize("what", ["waits", "puts"])
def test_time_in_which_the_process_is_stopped_is_no_delay_of_a_device(
    what: str, tmp_path: Path
) -> None:
    """Stopped for longer than the deadline, while every device needs most of it."""
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD, what],
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == "go\n"
        time.sleep(0.3)  # into the work, not to its end
        child.send_signal(signal.SIGSTOP)
        time.sleep(1.5)
        child.send_signal(signal.SIGCONT)
        assert child.stdout.readline() == "True\n"
    assert child.returncode == 0
