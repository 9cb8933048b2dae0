"""Trainers, ingests, rebuilds, scrubs and agents that are killed at random moments.

`make kill-loop KILLS=2000` is the same loop, longer.
"""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest

from hpstore.pool.pool import Pool
from tests.fault.kills.runner import KillLoop
from tests.fault.kills.victims import BODIES
from tests.thorough import LONG

pytestmark = [pytest.mark.fault, pytest.mark.timeout(290)]
KILLS = 200 if LONG else 20
SEED = 20261117


def test_killed_processes_tear_nothing_and_lose_nothing_acknowledged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Kill 20 processes, 200 in a long run; after each, all it touched is whole, at the end all.

    Then a rebuild and a scrub leave nothing to mend, and old orphans in tmp/ are swept.
    """
    report = KillLoop(tmp_path, seed=SEED).run(KILLS)
    with capsys.disabled():
        print(f"\n{report.text()}", end="")
    assert report.problems == []
    assert report.total >= KILLS
    assert report.kills.keys() == BODIES.keys()
    assert all(report.operations.values())
    assert report.orphans_swept


def test_the_loop_finds_an_acknowledged_put_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool that keeps one put in three, and acknowledges all."""
    put, turn = Pool.put, count()

    def forgetful(pool: Pool, key: str, data: bytes) -> object:
        if key.startswith(("slot/", "once/")) and next(turn) % 3:
            return None
        return put(pool, key, data)

    loop = KillLoop(tmp_path, seed=SEED)
    monkeypatch.setattr(Pool, "put", forgetful)
    for _ in range(4):
        loop.kill("ingest")
    assert any("not" in text and "holds" in text for text in loop.report.problems)
