"""What is acted on is whole, and who is taken for alive is: PROTOCOL 8, 18, 19."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import hpstore
from hpstore.checkpoint import Checkpointer
from hpstore.checkpoint.catalog.writer_fence import SaveAttempt, attempt_lives, began, here
from hpstore.checkpoint.format.checkpoint_manifest import manifest_key
from hpstore.checkpoint.save import after_commit
from hpstore.config import Settings
from hpstore.testing.memory_pool import Harness
from hpstore.units import MIB

pytestmark = pytest.mark.usefixtures("segments_apart")

KEY = manifest_key("run", 2)


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    """2+2 over four devices, with two steps; a crash has left one copy of the second's manifest."""
    made = Harness(tmp_path, data=2, parity=2, devices=4, settings=Settings(memory_bytes=32 * MIB))
    with made.open() as pool, Checkpointer(pool, "run", rng=False) as ckpt:
        for step in (1, 2):
            ckpt.save(step, {"x": torch.full((70_000,), float(step))}).result()
    held = [url for url in made.urls if any(KEY in f for f in made.devices[url].files)]
    for url in held[1:]:
        for file in [f for f in made.devices[url].files if f"{KEY}/@" in f]:
            del made.devices[url].files[file]
    return made


def restored(pool: hpstore.Pool) -> tuple[int | None, float]:
    state = {"x": torch.zeros(70_000)}
    with Checkpointer(pool, "run", rng=False) as ckpt:
        return ckpt.restore(state), float(state["x"][0])


def test_a_manifest_is_settled_before_it_is_restored(harness: Harness) -> None:
    """PROTOCOL 8: else the step that was gone on from would go with one device."""
    with harness.open() as pool:
        assert pool.stat(KEY).spare_columns == 0
        assert restored(pool) == (2, 2.0)
        assert pool.stat(KEY).spare_columns == 2
    for url in harness.urls:
        harness.lose([url])
        with harness.open() as pool:
            assert restored(pool) == (2, 2.0)
        harness.bring_back()


def test_a_manifest_that_cannot_be_settled_is_restored_all_the_same(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    with harness.open(read_only=True) as pool:
        assert restored(pool) == (2, 2.0)
        assert pool.stat(KEY).spare_columns == 0
    kept = next(u for u in harness.urls if any(f"{KEY}/@" in f for f in harness.devices[u].files))
    harness.lose([url for url in harness.urls if url != kept][:2])
    with harness.open() as pool, caplog.at_level(logging.WARNING):
        assert restored(pool) == (2, 2.0)
    assert "has fewer copies than it should" in caplog.text


def test_postponed_retention_is_said_once_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PROTOCOL 19: a frozen tensor's segment lacks a column, so that older steps stay."""
    monkeypatch.setattr(after_commit, "LEFT_BYTES", 0)  # retention at each save
    harness = Harness(tmp_path, data=2, parity=2, devices=4)
    frozen, moving = torch.randn(300_000), torch.zeros(300_000)
    with harness.open() as pool, Checkpointer(pool, "run", rng=False, keep_last=1) as ckpt:
        ckpt.save(1, {"frozen": frozen, "x": moving}).result()
        ckpt.wait()  # its retention looks at the pool as it is now
        segment = ckpt.steps.manifest(1).segments[0].key
        lost = next(u for u in harness.urls if any(segment in f for f in harness.devices[u].files))
        harness.lose([lost])
        for step in (2, 3, 4):
            moving += 1
            ckpt.save(step, {"frozen": frozen, "x": moving}).result()
        ckpt.wait()
        assert ckpt.counters["retentions_postponed_total"] == 3
        assert len(ckpt.steps()) == 4
    assert caplog.text.count("older steps under 'run' are kept") == 1


@pytest.fixture
def sleeper() -> Iterator[int]:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(99)"])
    yield child.pid
    child.kill()
    child.wait()


def test_another_process_with_the_id_of_a_dead_save_is_not_it(sleeper: int) -> None:
    """PROTOCOL 18: ids are used again, and in every container the trainer has id 1."""
    host, boot, space = here()
    ticks = began(sleeper)
    assert ticks
    note = SaveAttempt(
        step=1,
        nonce="aa",
        host=host,
        boot=boot,
        pid=sleeper,
        namespace=space,
        started_ms=0,
        ticks=ticks,
    )
    note = SaveAttempt.decode(note.encode(), where="here")
    assert attempt_lives(note, 10**15)
    assert not attempt_lives(replace(note, ticks=ticks - 1), 10**15)
    assert attempt_lives(replace(note, ticks=0), 10**15)  # of a version that did not say
    assert began(2**22 + 1) is None


def test_a_save_notes_when_its_process_began(pool: hpstore.Pool) -> None:
    found: list[SaveAttempt] = []

    def look(done: int, total: int) -> None:
        keys = pool.list("run/attempts/")
        found.extend(SaveAttempt.decode(pool.get(key), where=key) for key in keys)

    with Checkpointer(pool, "run") as ckpt:
        ckpt.save(1, {"x": torch.zeros(90_000)}, progress=look).result()
    assert found
    assert found[0].ticks == began(os.getpid())
