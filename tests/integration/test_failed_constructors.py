"""A Checkpointer whose constructor fails has taken nothing: no signal, process, thread or group."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as _distributed

from hpstore.checkpoint import Checkpointer, SaveOptions, Tier
from hpstore.errors import CheckpointError, ConfigError
from hpstore.pool.pool import Pool
from tests.integration.ranks import launch, make_pool, open_pool, raised, together

dist: Any = _distributed  # its groups have no public types
UNSAVED = {"x": object()}  # an example that no save takes


@pytest.fixture(autouse=True)
def unhandled() -> Iterator[None]:
    """SIGTERM as a process has it at its start; as it was, afterwards."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


def taken() -> tuple[object, set[str], set[str]]:
    """The handler of SIGTERM, our threads, and the processes that this one has started."""
    threads = {thread.name for thread in threading.enumerate() if "hpstore" in thread.name}
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return signal.getsignal(signal.SIGTERM), threads, set(children)


@pytest.mark.parametrize("on_sigterm", ["save", "finish"])
@pytest.mark.parametrize("background", ["thread", "process"])
def test_a_constructor_that_fails_gives_all_back(
    pool: Pool,
    on_sigterm: str,
    background: str,
) -> None:
    """A notebook goes on after the error: SIGTERM, which it left disarmed, ends it as before."""
    with Checkpointer(pool, "run", save=SaveOptions(background=background)) as ckpt:
        ckpt.save(1, {"x": 1}).result()  # what stays of a first use is there
    before = taken()
    options = SaveOptions(on_sigterm=on_sigterm, background=background)
    with pytest.raises(CheckpointError, match="state 'x' is a builtins"):
        Checkpointer(pool, "run", save=options, example=UNSAVED)
    assert taken() == before
    with pytest.raises(ConfigError):
        Checkpointer(pool, "run", save=options, tiers=[Tier(pool=pool)])
    assert taken() == before
    with Checkpointer(pool, "run", save=options) as ckpt:
        assert ckpt.latest_valid() == 1
    assert taken() == before


def _fails_on_all(rank: int, world: int, directory: Path) -> None:
    del rank, world
    groups = len(dist.distributed_c10d._world.pg_names)
    with open_pool(directory) as pool:
        said = raised(lambda: Checkpointer(pool, "run", example=UNSAVED))
        together("'x' is a" in said, said)
        together(len(dist.distributed_c10d._world.pg_names) == groups, groups)
        with Checkpointer(pool, "run") as ckpt:
            ckpt.save(1, {"x": 1}).result()
            together(ckpt.steps() == [1], ckpt.steps())


def test_its_groups_end_too(tmp_path: Path) -> None:
    """Each has threads and connections; a job that tries again would have two more."""
    make_pool(tmp_path)
    launch(tmp_path, 2, _fails_on_all)
