"""Pools and checkpoints in a process without file descriptors, and in a forked one (t13)."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import hpstore
from hpstore.checkpoint import Checkpointer, SaveOptions
from hpstore.config import Settings
from hpstore.errors import DescriptorsExhausted
from hpstore.runtime.lacks import lacks_total


@contextmanager
def spare(count: int) -> Iterator[None]:
    """Inside, so many descriptors can be opened and no more."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 64, limits[1]))
    held = []
    try:
        while True:
            try:
                held.append(os.open("/dev/null", os.O_RDONLY))
            except OSError:
                break
        for _ in range(count):
            os.close(held.pop())
        yield
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[hpstore.Pool]:
    settings = Settings(run_directory=str(tmp_path / "run"), direct=False)
    paths = [tmp_path / f"d{i}" for i in range(6)]
    with hpstore.create(
        paths, data=4, parity=2, config=tmp_path / "pool.toml", settings=settings
    ) as made:
        yield made


def test_a_lack_of_descriptors_does_not_look_like_damage(pool: hpstore.Pool) -> None:
    """t13: get() reported lost units and absent devices; listings, missing devices."""
    pool.put("a", b"x" * 300_000)
    before = lacks_total()
    with spare(1):
        with pytest.raises(DescriptorsExhausted, match="no device is at fault"):
            pool.get("a")
        with pytest.raises(DescriptorsExhausted, match="ulimit -n"):
            pool.list("a/", certain=True)
    assert lacks_total() > before
    assert pool.get("a") == b"x" * 300_000
    assert all(device.state == "online" for device in pool.status().devices)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_no_step_is_passed_over_for_want_of_descriptors(pool: hpstore.Pool, count: int) -> None:
    """t13: steps 3, 2 and 1 were passed over as unreadable, and an older one could be restored."""
    with Checkpointer(pool, "run", rng=False, save=SaveOptions(warm=False)) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, {"w": torch.full((300_000,), float(step))}).result()
        state = {"w": torch.zeros(300_000)}
        with spare(count), contextlib.suppress(DescriptorsExhausted):
            assert checkpointer.restore(state) == 3  # where few were needed at a time
            assert count > 1
        assert checkpointer.restore(state) == 3
        assert state["w"][0] == 3


FORKED = """
import os, sys, torch, hpstore
from hpstore.checkpoint import Checkpointer
from hpstore.config import Settings
base = sys.argv[1]
torch.set_num_threads(4)
settings = Settings(run_directory=base + "/run", direct=False)
with hpstore.create([f"{base}/d{i}" for i in range(4)], data=2, parity=2, config=base + "/p",
                    settings=settings) as pool, Checkpointer(pool, "r") as saved:
    saved.save(1, {"w": torch.zeros(1000, 1000)}).result()
    torch.ones(1000, 1000).copy_(torch.zeros(1000, 1000).t())
pid = os.fork()
if not pid:
    with hpstore.open(base + "/p") as pool, Checkpointer(pool, "r") as again:
        state = {"w": torch.ones(1000, 1000)}
        assert again.restore(state) == 1
        again.save(2, state).result()
    os._exit(0 if torch.get_num_threads() == 1 and not state["w"].any() else 3)
print(os.waitpid(pid, 0)[1])
"""


def test_a_forked_child_saves_and_restores(tmp_path: Path) -> None:
    """t13_forkseg: the parent saved and torch has worked with threads; the child hung, or ended by
    SIGSEGV in torch's OpenMP, whose threads it does not have."""
    found = subprocess.run(
        [sys.executable, "-c", FORKED, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "4", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert found.stdout.strip() == "0", found.stderr
    assert "this process was forked" in found.stderr
