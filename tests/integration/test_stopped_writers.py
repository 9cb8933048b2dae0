"""Writers that are stopped between two renames while another process sweeps: real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import hpstore
from hpstore.config import Settings, load_config
from hpstore.pool.pool import Pool
from hpstore.runtime.clock import SystemClock

_CHILD = """
import os, signal, sys, threading, time
import numpy as np
from hpstore.devices.local import LocalDevice
from hpstore.devices.file_handles import LocalWriter
import hpstore

where, begun, done, turn = sys.argv[1], [0], [0], threading.Condition()

def stopping(call, path):
    if "/k/" not in path:
        return call()
    with turn:
        begun[0] += 1
        if begun[0] == 4:  # three columns have their name
            turn.wait_for(lambda: done[0] == 3)
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(0.1)  # it takes effect soon
            done[0] += 10
            turn.notify_all()
        elif begun[0] > 4:
            turn.wait_for(lambda: done[0] > 10)
    call()
    with turn:
        done[0] += 1
        turn.notify_all()

def publish(self, path, guard=None, plain=LocalWriter.publish):
    stopping(lambda: plain(self, path, guard), path)

def rename(self, old, new, plain=LocalDevice.rename_into_place):
    stopping(lambda: plain(self, old, new), new)

with hpstore.open("pool.toml") as pool:
    if where == "before the name":
        LocalWriter.publish = publish
    else:
        LocalDevice.rename_into_place = rename
    info = pool.put("k", np.random.default_rng(2).bytes(1_310_000))
    print("acknowledged", info.losses_tolerated, flush=True)
"""


class Ahead(SystemClock):
    """A clock that is two hours ahead."""

    def wall_ms(self) -> int:
        return super().wall_ms() + 2 * 3_600_000


@pytest.mark.parametrize("where", ["before the name", "at the rename"])
def test_a_writer_that_is_stopped_while_a_scrub_sweeps_is_whole_when_acknowledged_r02(
    where: str, tmp_path: Path
) -> None:
    """r02: three columns have their name. Stopped in the rename itself it holds up the sweep, which
    gives up; before that its columns are swept, and it writes all of them again."""
    new = np.random.default_rng(2).bytes(1_310_000)
    settings = Settings(run_directory=str(tmp_path / "run"), workers_per_device=1)
    paths = [str(tmp_path / f"d{i}") for i in range(6)]
    config = tmp_path / "pool.toml"
    with hpstore.create(paths, data=4, parity=2, config=config, settings=settings) as pool:
        pool.put("k", b"old" * 100_000)
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD, where],
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    with child:
        assert child.stdout is not None
        try:
            _sweep_while_stopped(child, config, where)
        except BaseException:
            child.kill()
            raise
        assert child.stdout.read() == "acknowledged 2\n"
    with hpstore.open(config) as pool:
        assert pool.get("k") == new
        assert pool.rebuild().whole
        assert pool.get("k") == new


def _sweep_while_stopped(child: subprocess.Popen[str], config: Path, where: str) -> None:
    os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    with Pool(load_config(config), clock=Ahead()) as ahead:
        swept = ahead.scrub().swept
        assert (swept > 0) == (where == "before the name")
    child.send_signal(signal.SIGCONT)
