"""The keeper of a node's memory and its loaders, each killed or stopped in the midst of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpstore.loaders import DataLoader, Dataset, DatasetWriter, Field
from hpstore.node_memory.keeper_session import KeeperSession
from hpstore.node_memory.meeting_place import keeper_directory
from hpstore.pool.pool import Pool
from hpstore.runtime.local_messages import Lost
from hpstore.testing.process_stop import stop_process
from hpstore.units import KIB
from tests.fault.common import poll

COUNT, PAGE_ROWS = 240, 4
SECONDS = 60.0

# a trainer: reads until all is in memory, then writes "whole"; with a number of pages: stops there
TRAINER = """
import sys, time
from contextlib import closing
import hpstore
from hpstore.loaders import DataLoader, Dataset
from hpstore.loaders.batching import node_pages

toml, pages = sys.argv[1], int(sys.argv[2])
arrived = node_pages.NodePageMemory._has_arrived
count = 0

def slowly(slab, page, slot):
    global count
    count += 1
    if count > pages >= 0:
        print("stopped", flush=True)
        time.sleep(3600)
    arrived(slab, page, slot)

node_pages.NodePageMemory._has_arrived = slowly
with hpstore.open(toml) as pool, closing(DataLoader(Dataset(pool, "d"), 8, shuffle=True)) as loader:
    while True:
        list(loader)
        stats = loader.stats()
        if stats["pages_in_memory"] == stats["pages_to_keep"]:
            print("whole", stats["node_memory"], flush=True)
            sys.stdin.read()
            break
"""


@pytest.fixture
def toml(pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A pool with a dataset of 60 pages; the keeper that is started is ended with the test."""
    monkeypatch.setenv("HPSTORE_NODE_MEMORY", "on")
    fields = {"x": Field("uint8", (16 * KIB,)), "label": Field("int64")}
    with DatasetWriter(pool, "d", fields, unit_bytes=PAGE_ROWS * 16 * KIB) as out:
        for i in range(COUNT):
            out.write({"x": np.full(16 * KIB, i % 251, np.uint8), "label": np.int64(i)})
    yield tmp_path / "pool.toml"
    for process in keepers(pool):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def keepers(pool: Pool) -> list[int]:
    """Processes that keep for this pool, whether they answer or not."""
    wanted = os.fsencode(str(keeper_directory(pool.config.settings)))
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                line = (entry / "cmdline").read_bytes()
                if b"keeper_process" in line and wanted in line:
                    found.append(int(entry.name))
    return found


@contextmanager
def trainer(toml: Path, pages: int = -1) -> Iterator[subprocess.Popen[str]]:
    """A trainer that has said its first word: "whole" or "stopped"."""
    made = subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(toml), str(pages)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert made.stdout is not None
        word = made.stdout.readline()
        assert word == ("whole shared\n" if pages < 0 else "stopped\n")
        yield made
    finally:
        made.kill()
        made.communicate()


def wrong(loader: DataLoader) -> list[int]:
    return [
        label
        for batch in loader
        for row, label in enumerate(batch["label"].tolist())
        if (batch["x"][row] != label % 251).any()
    ]


def whole(loader: DataLoader) -> dict[str, Any]:
    """Read until all pages are there, every byte checked; the figures."""
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        assert not wrong(loader)
        stats = loader.stats()
        if stats["pages_in_memory"] == stats["pages_to_keep"]:
            assert not wrong(loader)
            return stats
    raise AssertionError(f"pages do not come: {stats}")


def listed(pool: Pool) -> list[dict[str, Any]]:
    with closing(KeeperSession(keeper_directory(pool.config.settings))) as session:
        if not session.connect():
            return []
        found: list[dict[str, Any]] = session.ask({"op": "list"})["datasets"]
        return found


def test_memory_outlives_a_trainer_that_is_killed(pool: Pool, toml: Path) -> None:
    with trainer(toml) as running:
        running.kill()
    with closing(DataLoader(Dataset(pool, "d"), 8, shuffle=True)) as loader:
        assert not wrong(loader)
        stats = loader.stats()
    assert (stats["node_memory"], stats["records_read"]) == ("shared", 0)
    assert stats["pages_adopted"] == stats["pages_to_keep"] == COUNT // PAGE_ROWS
    assert len(keepers(pool)) == 1


def test_pages_of_a_trainer_that_is_killed_as_it_fills_are_whole_or_not_there(
    pool: Pool, toml: Path
) -> None:
    """It has read pages that it has not reported: they are read again, into other slots."""
    with trainer(toml, pages=10):
        pass
    poll(SECONDS, lambda: listed(pool)[0]["processes"] == [])
    with closing(DataLoader(Dataset(pool, "d"), 8, shuffle=True)) as loader:
        stats = whole(loader)
    assert stats["node_memory"] == "shared"
    assert 10 <= stats["pages_adopted"] < COUNT // PAGE_ROWS
    with closing(DataLoader(Dataset(pool, "d"), 8, shuffle=True)) as loader:
        assert whole(loader)["pages_adopted"] == COUNT // PAGE_ROWS


def test_a_trainer_that_is_stopped_as_it_fills_stops_no_other(
    pool: Pool, toml: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpstore.loaders.batching.node_pages.STALL_SECONDS", 0.5)
    with trainer(toml, pages=10) as stopped:
        stop_process(stopped.pid)
        with closing(DataLoader(Dataset(pool, "d"), 8, shuffle="window")) as loader:
            stats = whole(loader)
        assert stats["node_memory"] == "shared"
        os.kill(stopped.pid, signal.SIGCONT)


def test_a_keeper_that_is_stopped_holds_no_loader_up(pool: Pool, toml: Path) -> None:
    with trainer(toml):
        (keeper,) = keepers(pool)
        stop_process(keeper)
        began = time.monotonic()
        with closing(DataLoader(Dataset(pool, "d"), 8, shuffle=True)) as loader:
            next(iter(loader))
            first = time.monotonic() - began
            stats = whole(loader)
        os.kill(keeper, signal.SIGCONT)
    assert stats["pages_adopted"] == 0
    assert "does not answer" in stats["node_memory"]
    assert first < SECONDS / 2


def test_a_keeper_that_is_killed_leaves_what_is_mapped(pool: Pool, toml: Path) -> None:
    with trainer(toml) as running, closing(DataLoader(Dataset(pool, "d"), 8)) as loader:
        assert whole(loader)["pages_adopted"] == COUNT // PAGE_ROWS
        (keeper,) = keepers(pool)
        os.kill(keeper, signal.SIGKILL)
        poll(SECONDS, lambda: not Path(f"/proc/{keeper}").exists())
        assert not wrong(loader)
        running.communicate("", timeout=SECONDS)
        assert running.returncode == 0
    with closing(DataLoader(Dataset(pool, "d"), 8)) as loader:  # another keeper is started
        assert whole(loader)["node_memory"] == "shared"
    (another,) = keepers(pool)
    assert another != keeper


def test_two_processes_start_one_keeper(pool: Pool, toml: Path) -> None:
    running = [
        subprocess.Popen(
            [sys.executable, "-c", TRAINER, str(toml), "-1"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    words = [process.communicate("", timeout=2 * SECONDS)[0] for process in running]
    assert words == ["whole shared\n"] * 2
    poll(
        SECONDS, lambda: len(keepers(pool)) == 1
    )  # the second one started sees the first, and ends
    assert [found["pages"] for found in listed(pool)] == [COUNT // PAGE_ROWS]


def test_a_keeper_ends_with_its_directory(pool: Pool, toml: Path) -> None:
    with trainer(toml) as running:
        running.communicate("", timeout=SECONDS)
    (keeper,) = keepers(pool)
    (keeper_directory(pool.config.settings) / "keeper.sock").unlink()
    poll(SECONDS, lambda: not keepers(pool), lambda: f"ended, process {keeper}")


def test_sigterm_ends_a_keeper_and_with_it_the_memory(pool: Pool, toml: Path) -> None:
    with trainer(toml) as running:
        running.communicate("", timeout=SECONDS)
    (keeper,) = keepers(pool)
    with closing(KeeperSession(keeper_directory(pool.config.settings))) as old:
        assert old.connect()
        os.kill(keeper, signal.SIGTERM)
        poll(SECONDS, lambda: not keepers(pool))
        with pytest.raises(Lost):
            old.ask({"op": "list"})
