"""A loader that is closed: nothing reads any more, nobody takes part of an epoch for all of it."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpstore.errors import AlreadyClosed
from hpstore.loaders import DataLoader, Dataset
from hpstore.loaders.batching.page_memory import PageMemory
from hpstore.loaders.dataset import open_objects
from hpstore.loaders.dataset.open_objects import OpenShards
from tests.fault.common import Bench, Call, Gates, poll
from tests.integration.loader_cases import COUNT, MODES, PLAIN, flat, labels, write

LIMIT = 20.0


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """A 2+1 pool with the data set "rows"."""
    made = Bench(tmp_path)
    with made.create(4, data=2, parity=1) as pool:
        write(pool, "rows", PLAIN, COUNT).close()
    return made


def settings(mode: str) -> dict[str, Any]:
    return {"batch_size": 8, "seed": 3, "shuffle": "global", **MODES[mode]}


def reading() -> list[str]:
    """Threads that read for a loader."""
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith(("hpstore-fill", "hpstore-loader"))]


@pytest.mark.parametrize("mode", MODES)
def test_an_iterator_of_a_closed_loader_does_not_end_as_if_the_epoch_were_over(
    bench: Bench, mode: str
) -> None:
    """It raises, as often as it is asked. The state goes on where the run stood."""
    with bench.open() as pool:
        loader = DataLoader(Dataset(pool, "rows"), **settings(mode))
        run = iter(loader)
        found = labels(next(run)) + labels(next(run))
        loader.close()
        for _ in range(2):
            with pytest.raises(AlreadyClosed, match="epoch is not over"):
                next(run)
        loader.load_state_dict(loader.state_dict())
        assert sorted(found + flat(loader)) == list(range(COUNT))
        loader.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dropped", [True, False])
def test_a_closed_loader_has_waited_for_its_reads(bench: Bench, mode: str, dropped: bool) -> None:
    """Also for those of an iterator that is there still or was dropped: the data set's files may be
    closed after it, and a read of a file that is closed would be one of whatever has its number.
    """
    gates = Gates()
    with bench.open(wrap=gates.wrap) as pool:
        data = Dataset(pool, "rows")
        loader = DataLoader(data, **settings(mode))
        gates.shut = {("*", "read")}
        run = iter(loader)
        poll(LIMIT, lambda: gates.waiting > 0)
        if dropped:
            del run
        closing = Call(loader.close)
        assert not closing.ended(0.05)
        gates.let_go()
        assert closing.ended(LIMIT)
        closing.result()
        assert not reading()
        data.close()


class _Lingering(threading.Thread):
    """Lives on after its function, and what this belonged to, are gone."""

    def run(self) -> None:
        super().run()
        time.sleep(0.2)


@pytest.mark.parametrize("mode", MODES)
def test_a_closed_loader_has_waited_for_threads_of_runs_that_are_gone(
    bench: Bench, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread is waited for by itself: what it belongs to may be collected before it has ended."""
    monkeypatch.setattr(threading, "Thread", _Lingering)
    with bench.open() as pool, Dataset(pool, "rows") as data:
        loader = DataLoader(data, **settings(mode))
        run = iter(loader)
        next(run)
        del run
        gc.collect()
        loader.close()
        assert not reading()


def test_closing_a_pool_is_no_fault_of_the_pages_that_are_being_read(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is told or counted; who waits for pages goes on, and nobody fills any more."""
    with bench.open() as pool, caplog.at_level(logging.INFO):
        data = Dataset(pool, "rows")
        (stream,) = data.streams
        slab = PageMemory(data, stream, int(stream.page_starts[-1]))
        pages = np.arange(2)
        places = slab.reserve(pages)
        assert places is not None
        pool.close()
        slab.read(places)
        slab.wait(pages, lambda: False)
        assert slab.reserve(pages + 2) is None
        assert pool.metrics.value("page_load_error_total") == 0
        assert "record by record" not in caplog.text


class _Opened:
    """A reader of a shard whose closing is looked at."""

    def __init__(self, shards: OpenShards, free: list[bool]) -> None:
        self._shards, self._free = shards, free

    def share(self) -> _Opened:
        return self

    def close(self) -> None:
        self._free.append(not self._shards._lock.locked())


def test_a_file_that_nobody_uses_is_closed_while_others_are_opened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a device that hangs close() may wait: not under the lock that every opening takes."""
    monkeypatch.setattr(open_objects, "LEAST_READERS", 1)
    monkeypatch.setattr(open_objects, "FILES_SHARE", 1 << 40)
    shards, free = OpenShards(1), list[bool]()
    for key in ("a", "b", "c"):
        shards.get(key, lambda keys: {k: _Opened(shards, free) for k in keys})  # type: ignore[misc]
    assert len(free) >= 3  # the thread's own and what they came from
    assert all(free)


LEFT = """
import sys, hpstore, torch
from hpstore.loaders import DataLoader, Dataset

def shifted(sample):
    picture = torch.ones(1000, 1000)
    for _ in range(40):
        picture = torch.roll(picture, (1, 1), (0, 1))
    return {"label": sample["label"]}

def main():
    with hpstore.open(sys.argv[1]) as pool:
        for batch in DataLoader(Dataset(pool, "rows"), 8, transform=shifted, shuffle=True):
            return 7

sys.exit(main())
"""


def test_a_program_that_leaves_in_mid_epoch_ends_with_its_own_status(bench: Bench) -> None:
    """Threads that torch works on for a run that was dropped are waited for: they would come back
    out of C++ without an interpreter, and abort the process."""
    done = subprocess.run(
        [sys.executable, "-c", LEFT, str(bench.toml)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stderr) == (7, "")
