"""A process that ends while threads of ours are in C++ or C: its exit status is its own.

A thread that comes back out of torch to an interpreter that is gone takes the process down with
SIGABRT (pytorch#38228), one whose memory was freed at exit with SIGSEGV (docs/decisions/0163).
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

BUSY = """
import atexit, time
atexit.register(time.sleep, 0.2)  # called last: threads go on meanwhile
import sys, threading, torch
torch.set_num_threads(1)
inside, square = threading.Event(), torch.ones(64, 64)
def busy(*_):
    inside.set()
    until = time.monotonic() + 0.4
    while time.monotonic() < until:
        square + square  # each comes back out of C++
"""
WATCHES = """
from hpstore.checkpoint.ranks import stop_step
class Alone:
    rank, world = 0, 2
    def all_gather(self, mine, channel): return [mine, mine]
class Store:
    check = busy
stop_step._store = Store
watch = stop_step.Preemption(Alone(), 60.0)
"""
FETCHES = """
from hpstore.loaders import DataLoader
from hpstore.trainers.pipelining.micro_batch_feed import Feed
class Samples(torch.utils.data.Dataset):
    def __len__(self): return 2
    def __getitem__(self, index): return torch.tensor(busy() or index)
feed = Feed(DataLoader(Samples(), batch_size=1), ahead=1)
feed.start()
"""
REQUESTS = """
import numpy as np
from hpstore.loaders.policy.directories import RULES, Directories
blocks = 6_000_000  # its memory is the kernel's again once it is freed
made = Directories(RULES[:1], blocks, blocks // 4, seen=np.zeros(blocks, np.uint8))
def ask():
    inside.set()
    while True: made.request(np.arange(0, blocks, 3))
threading.Thread(target=ask, daemon=True).start()
"""
compiled = pytest.mark.skipif(
    importlib.util.find_spec("hpstore._directories") is None, reason="installed without a compiler"
)


@pytest.mark.parametrize(
    "left",
    [
        pytest.param(WATCHES, id="watches for SIGTERM in torch's store"),
        pytest.param(FETCHES, id="fetches micro-batches of a user's dataset"),
        pytest.param(REQUESTS, id="asks the policy of a cache", marks=compiled),
    ],
)
def test_a_thread_that_runs_on_leaves_the_exit_status_alone(left: str) -> None:
    """Nothing is closed: the script ends as scripts do."""
    script = f"{BUSY}{left}inside.wait()\nsys.exit(3)\n"
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert (ended.returncode, ended.stderr) == (3, "")
