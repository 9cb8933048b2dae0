"""A cache's directory that others have written to: no file of the user's is touched, no byte of
theirs is served, nothing hangs."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

import numpy as np
import pytest
import xxhash

from hpstore.errors import ConfigError
from hpstore.loaders.cache import Cache
from hpstore.loaders.cache.disk_file import HEADER_BYTES, PLACE_BYTES
from hpstore.loaders.cache.disk_tier import LOCK
from tests.integration.cache_sources import NumberedSource, read_epoch

COUNT, SIZE = 100, 3000
STEM = xxhash.xxh3_64_hexdigest(b"train/0")
ENDINGS = ("blocks", "table", "learned.npz", "learned.npz.new")
PRECIOUS = b"precious" * 4096


def run(folder: Path, passes: int = 3) -> dict[str, float]:
    """Passes over a source, a quarter of it in memory, every byte checked; the counters."""
    source, rng = NumberedSource(COUNT, SIZE), np.random.default_rng(0)
    with Cache(COUNT * SIZE // 4, disk_path=folder, disk_bytes=COUNT * PLACE_BYTES) as cache:
        reader = cache.attach(source, batch_blocks=10)
        for _ in range(passes):
            reader.begin_epoch(COUNT)
            read_epoch(reader, source, rng.permutation(COUNT), 10)
            cache.flush()
        return cache.stats()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "tier"
    made.mkdir()
    return made


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    made = tmp_path / "precious"
    made.write_bytes(PRECIOUS)
    return made


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("lay", [Path.symlink_to, Path.hardlink_to])
def test_a_link_under_a_known_name_leads_nowhere(
    folder: Path, precious: Path, ending: str, lay: object
) -> None:
    """The names follow from the source's: who knows it lays links before the cache is made."""
    assert callable(lay)
    lay(folder / f"{STEM}.{ending}", precious)
    assert run(folder)["disk_hit_total"] > 0
    assert precious.read_bytes() == PRECIOUS
    assert run(folder, 1)["disk_hit_total"] > 0


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_pipe_under_a_known_name_hangs_nothing(folder: Path, ending: str) -> None:
    os.mkfifo(folder / f"{STEM}.{ending}")
    assert run(folder)["disk_hit_total"] > 0


def test_a_link_under_the_name_of_the_trial_leads_nowhere(folder: Path, precious: Path) -> None:
    (folder / "hpstore-cache.try").symlink_to(precious)
    assert run(folder)["disk_hit_total"] > 0
    assert precious.read_bytes() == PRECIOUS


@pytest.mark.parametrize("lay", [Path.symlink_to, Path.hardlink_to])
def test_a_lock_that_is_a_link_is_an_error_and_nothing_is_written(
    folder: Path, precious: Path, lay: object
) -> None:
    """It is not removed: a process may hold it."""
    assert callable(lay)
    lay(folder / LOCK, precious)
    with pytest.raises(ConfigError, match="not usable"):
        run(folder)
    assert precious.read_bytes() == PRECIOUS


def test_what_others_may_write_is_not_served(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Bytes with a checksum that matches, in files of mode 0666: they are dropped, and it is said.

    read_epoch() finds any byte that is not the source's.
    """
    run(folder)
    forge(folder)
    for ending in ("blocks", "table"):
        (folder / f"{STEM}.{ending}").chmod(0o666)
    caplog.set_level(logging.WARNING)
    found = run(folder, 1)
    assert found.get("disk_hit_total", 0) == 0
    assert sum("may be written by others" in one.getMessage() for one in caplog.records) == 2
    for ending in ("blocks", "table"):
        assert stat.S_IMODE((folder / f"{STEM}.{ending}").stat().st_mode) == 0o600


def forge(folder: Path) -> None:
    """Other bytes in place of every block that is there, and their checksums."""
    table = np.fromfile(folder / f"{STEM}.table", "<u8", offset=HEADER_BYTES)
    source = NumberedSource(COUNT, SIZE)
    seed = xxhash.xxh3_64_intdigest(source.identity.encode())
    bad = bytes(SIZE)
    with (
        (folder / f"{STEM}.blocks").open("r+b") as blocks,
        (folder / f"{STEM}.table").open("r+b") as checks,
    ):
        for block in np.flatnonzero(table).tolist():
            blocks.seek(block * PLACE_BYTES)
            blocks.write(bad)
            digest = xxhash.xxh3_64_intdigest(bad, (seed + block) & (1 << 64) - 1)
            checks.seek(HEADER_BYTES + 8 * block)
            checks.write(digest.to_bytes(8, "little"))


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another user")
@pytest.mark.parametrize("ending", ENDINGS[:3])
def test_what_another_user_made_is_not_used(folder: Path, ending: str) -> None:
    """Root reads everything: it must not believe everything."""
    run(folder)
    os.chown(folder / f"{STEM}.{ending}", 12345, -1)
    found = run(folder, 2)
    assert found["disk_hit_total"] > 0
    assert (folder / f"{STEM}.{ending}").stat().st_uid == 0
    assert found.get("learned_refused_total", 0) == (ending == "learned.npz")


@pytest.mark.parametrize("kind", ["fifo", "link"])
def test_what_is_no_plain_file_is_neither_waited_for_nor_followed(folder: Path, kind: str) -> None:
    """It is opened before it is judged, so nothing can take its place in between."""
    run(folder)
    learned = folder / f"{STEM}.learned.npz"
    learned.rename(folder / "moved")
    if kind == "fifo":
        os.mkfifo(learned, 0o600)
    else:
        learned.symlink_to("moved")
    assert run(folder, 2)["learned_refused_total"] == 1


@pytest.mark.parametrize("version", [0, 1])
def test_two_caches_on_one_path_serve_no_wrong_byte_without_the_lock(
    folder: Path, version: int
) -> None:
    """Those who tidy have deleted its file under the first one: both write the same files,
    of the same source or of a newer one with other bytes. Every byte is checked."""
    sources = NumberedSource(COUNT, SIZE), NumberedSource(COUNT, SIZE, version=version)
    rng = np.random.default_rng(0)

    def made() -> Cache:
        return Cache(COUNT * SIZE // 4, disk_path=folder, disk_bytes=COUNT * PLACE_BYTES)

    with made() as first:
        one = first.attach(sources[0], batch_blocks=10)
        read_epoch(one, sources[0], rng.permutation(COUNT), 10)
        (folder / LOCK).unlink()
        with made() as second:
            other = second.attach(sources[1], batch_blocks=10)
            for _ in range(4):
                for reader, source, cache in (
                    (one, sources[0], first),
                    (other, sources[1], second),
                ):
                    reader.begin_epoch(COUNT)
                    read_epoch(reader, source, rng.permutation(COUNT), 10)
                    cache.flush()
    found = run(folder, 2)
    assert found["disk_hit_total"] > 0


@pytest.mark.parametrize("ending", ["blocks", "table"])
def test_files_cut_under_a_running_cache_cost_hits_alone(folder: Path, ending: str) -> None:
    """Truncated to nothing between two passes: no wrong byte, now and in the next run."""
    source, rng = NumberedSource(COUNT, SIZE), np.random.default_rng(0)
    with Cache(COUNT * SIZE // 4, disk_path=folder, disk_bytes=COUNT * PLACE_BYTES) as cache:
        reader = cache.attach(source, batch_blocks=10)
        for cut in (False, False, True, False):
            if cut:
                os.truncate(folder / f"{STEM}.{ending}", 0)
            read_epoch(reader, source, rng.permutation(COUNT), 10)
            cache.flush()
        assert cache.stats().get("disk_failed_total", 0) == 0
    assert run(folder)["disk_hit_total"] > 0
