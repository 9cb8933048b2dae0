"""Files of a run directory stay young while an agent looks after the pool."""

from __future__ import annotations

import os
from pathlib import Path

from hpstore.agent.run_files import RunFiles
from tests.unit.agents_of_hosts import HostAgents


def test_an_agent_keeps_its_lock_and_what_lies_beside_it_from_being_tidied_away(
    tmp_path: Path,
) -> None:
    """systemd-tmpfiles removes files of /tmp that were not touched for ten days: then a second
    agent takes a lock of its own, and words of operators are lost."""
    fleet = HostAgents(tmp_path)
    fleet.start("a")
    fleet.rounds(10.0)
    lock = fleet.agents["a"].run_directory / "agent.lock"
    os.utime(lock, (1.0, 1.0))
    fleet.rounds(3700.0, step=20.0)
    assert lock.stat().st_mtime > 1e9
    fleet.stop()


def test_files_are_touched_once_an_hour_and_links_are_not_followed(tmp_path: Path) -> None:
    """A directory that is gone is passed over."""
    kept, outside = tmp_path / "run", tmp_path / "outside"
    files = RunFiles(kept)
    files.keep(0.0)
    kept.mkdir()
    outside.touch()
    (kept / "link").symlink_to(outside)
    (kept / "f").touch()
    for path in (outside, kept / "f"):
        os.utime(path, (1.0, 1.0))
    files.keep(3599.0)
    assert (kept / "f").stat().st_mtime == 1.0
    files.keep(3600.0)
    assert (kept / "f").stat().st_mtime > 1.0
    assert outside.stat().st_mtime == 1.0
