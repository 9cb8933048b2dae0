"""The cache while others change what is looked at: one state or the other is seen."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from hpstore.loaders.cache import Cache
from hpstore.loaders.cache.cache_counters import CacheTally
from hpstore.loaders.cache.disk_tier import DiskTier
from hpstore.loaders.cache.prefetch import _fetch, next_work
from hpstore.runtime.buffers import aligned_array
from hpstore.units import KIB
from tests.integration.cache_sources import NumberedSource


@pytest.mark.parametrize("action", ["offer", "trim"])
def test_blocks_may_come_and_go_while_room_is_looked_for(tmp_path: Path, action: str) -> None:
    """numpy's nonzero refuses an array that changes under it; a trainer must not see that."""
    tier = DiskTier(str(tmp_path), 1 << 30, CacheTally())
    part = tier.part(NumberedSource(1 << 20, 64))
    assert part is not None
    part.limit_bytes = 1 << 30
    done = threading.Event()

    def come_and_go() -> None:
        while not done.is_set():
            part.file.checks[::4096] ^= np.uint64(1)

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        blocks = np.arange(1, 1025)
        for _ in range(200):
            if action == "offer":
                part.offer(blocks, np.zeros(1024, np.float32), 0, lambda b: np.zeros(len(b), "f4"))
            else:
                part.used_bytes = part.limit_bytes + 1
                part.trim()
    finally:
        done.set()
        thread.join()
        tier.close()


def test_a_prefetch_whose_reader_has_gone_is_no_error() -> None:
    """The last reader leaves between the decision and the read: given up, no word, no flight."""
    source = NumberedSource(100, 512)
    with Cache(64 * KIB, prefetch_threads=0) as cache:
        reader = cache.attach(source)
        reader.expect(0, np.arange(100))
        assert cache._owned is not None
        core = cache._owned.core
        with core.lock:
            work = next_work(core)
        assert work is not None
        reader.close()
        _fetch(core, work, aligned_array(0))
        assert cache.stats().get("prefetch_error_total", 0) == 0
        assert source.calls == []
        assert work.stock.flights == {}
        assert work.stock.ahead_bytes == 0
        again = cache.attach(source)
        target = np.empty((1, 512), np.uint8)
        again.read(work.blocks[:1], target)
        assert np.array_equal(target[0], source.bytes_of(int(work.blocks[0])))
        again.close()
