"""The cache's disk tier while its thread writes: whoever decides sees one state or the other."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from hpstore.loaders.cache.counts import Tally
from hpstore.loaders.cache.disk import DiskTier
from tests.integration.cache_sources import NumberedSource


@pytest.mark.parametrize("action", ["offer", "trim"])
def test_blocks_may_come_and_go_while_room_is_looked_for(tmp_path: Path, action: str) -> None:
    """numpy's nonzero refuses an array that changes under it; a trainer must not see that."""
    tier = DiskTier(str(tmp_path), 1 << 30, Tally())
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
