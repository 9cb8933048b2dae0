"""A process that shares a cache is stopped (SIGSTOP): the others wait for it once."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from hpstore.errors import ConfigError
from hpstore.loaders.cache import Cache, cache_core, messages
from tests.fault.common import forked, poll
from tests.fault.shared_cache import COUNT, PATIENCE, SIZE, owner, said
from tests.integration.cache_sources import NumberedSource, read_checked, read_epoch


def test_readers_go_on_beside_an_owner_that_was_stopped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGSTOP: they wait for it once, and a cache made now says that it does not answer. When the
    owner goes on, it hands out nothing to who has left."""
    monkeypatch.setattr(messages, "ANSWER_SECONDS", 1.0)
    name = f"test-{os.getpid()}-stopped"
    with forked(owner(name, tmp_path / "ready")) as pid:
        poll(PATIENCE, (tmp_path / "ready").exists)
        source = NumberedSource(COUNT, SIZE)
        with Cache(1 << 20, share=name) as cache:
            reader = cache.attach(source, batch_blocks=10)
            read_epoch(reader, source, np.arange(COUNT // 2), 10)
            os.kill(pid, signal.SIGSTOP)
            began = time.monotonic()
            read_epoch(reader, source, np.arange(COUNT), 10)
            assert time.monotonic() - began < 5.0
            assert cache.stats()["owner_lost_total"] == 1
            assert said(caplog, "or was stopped") == 1
            with (
                Cache(1 << 20, share=name) as late,
                pytest.raises(ConfigError, match="or was stopped"),
            ):
                late.attach(source, batch_blocks=10)
            os.kill(pid, signal.SIGCONT)
            other = NumberedSource(COUNT, SIZE)
            with Cache(1 << 20, share=name) as again, again.attach(other, batch_blocks=10) as more:
                read_epoch(more, other, np.arange(COUNT), 10)
                read_epoch(more, other, np.arange(COUNT), 10)
            assert other.fetches.max() <= 1


def test_a_reader_stopped_in_mid_fetch_holds_others_up_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits fetches for himself, and nobody waits for those blocks again. What the stopped one
    brings when it goes on is taken by nobody, and no page is lost."""
    monkeypatch.setattr(cache_core, "LATE_SECONDS", 0.5)
    name = f"test-{os.getpid()}-slept"
    source = NumberedSource(COUNT, SIZE)

    def fetch_late() -> None:
        stuck = NumberedSource(COUNT, SIZE)
        stuck.gate = threading.Event()
        reader = Cache(1 << 20, share=name).attach(stuck, batch_blocks=10)
        done = threading.Thread(
            target=reader.read, args=(np.arange(10), np.zeros((10, SIZE), np.uint8)), daemon=True
        )
        done.start()
        poll(PATIENCE, (tmp_path / "go").exists)
        stuck.gate.set()
        done.join(PATIENCE)
        (tmp_path / "came").touch()
        signal.pause()

    with Cache(1 << 20, share=name) as cache:
        reader = cache.attach(source, batch_blocks=10)
        assert cache._owned is not None
        core = cache._owned.core
        flights = core.stocks[source.name].flights
        with forked(fetch_late):
            poll(PATIENCE, lambda: len(flights) == 10)
            for _ in range(5):
                read_checked(reader, source, np.arange(10))
            assert source.fetches[:10].tolist() == [2] * 10  # in its place, then into the cache
            assert cache.stats()["overdue_total"] == 1
            assert said(caplog, "fetched again by those who wait") == 1
            free = core.room.free.free_count
            (tmp_path / "go").touch()
            poll(PATIENCE, (tmp_path / "came").exists)
            read_checked(reader, source, np.arange(10))
            assert source.fetches[:10].tolist() == [2] * 10
            assert core.room.free.free_count == free
