"""Devices on which somebody else has put links, pipes and second names: nothing outside is touched.

t3_symlink: a put overwrote any file that a link in recycle/ led to, and wrote into any directory
that stood in for a key's.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import hpstore
from hpstore.config import Settings
from hpstore.devices import confined_names
from hpstore.devices.base import TMP, recycled_path
from hpstore.devices.confined_names import open_beneath, parent_beneath
from hpstore.devices.local import LocalDevice
from hpstore.errors import HpstoreError, TooFewDevices
from hpstore.pool.pool import Pool

PRECIOUS = b"PRECIOUS" * 600_000  # as large as a column


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file outside of all devices."""
    path = tmp_path / "victim"
    path.write_bytes(PRECIOUS)
    return path


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A directory outside of all devices."""
    path = tmp_path / "outside"
    path.mkdir()
    return path


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    settings = Settings(run_directory=str(tmp_path / "run"), direct=False)
    paths = [tmp_path / f"d{n}" for n in range(6)]
    with hpstore.create(
        paths, data=4, parity=2, config=tmp_path / "pool.toml", settings=settings
    ) as made:
        yield made


def put_and_get(pool: Pool, key: str, size: int = 8 << 20) -> None:
    body = os.urandom(size)
    pool.put(key, body)
    assert pool.get(key) == body


@pytest.mark.parametrize("kind", ["link", "hard link", "pipe"])
def test_what_lies_in_recycle_and_is_not_ours_is_not_overwritten(
    pool: Pool, tmp_path: Path, victim: Path, kind: str
) -> None:
    name = tmp_path / "d0" / recycled_path(len(PRECIOUS))
    if kind == "link":
        name.symlink_to(victim)
    elif kind == "hard link":
        name.hardlink_to(victim)
    else:
        os.mkfifo(name)
    put_and_get(pool, "y")
    assert victim.read_bytes() == PRECIOUS
    assert not os.path.lexists(name)  # nor met again
    assert pool.stat("y").spare_columns == 2


def test_a_link_in_the_place_of_a_directory_leads_nowhere(
    pool: Pool, tmp_path: Path, outside: Path
) -> None:
    """The device fails for this key; others take its place."""
    (tmp_path / "d1" / "objects" / "z").symlink_to(outside)
    put_and_get(pool, "z", 300_000)
    put_and_get(pool, "z/sub", 3)
    pool.delete("z")
    pool.rebuild()
    pool.scrub()
    assert list(outside.iterdir()) == []


def test_a_delete_takes_nothing_away_behind_a_link(
    pool: Pool, tmp_path: Path, outside: Path
) -> None:
    """The directory is moved out once its files are there, and a link left."""
    put_and_get(pool, "k", 300_000)
    (tmp_path / "d2" / "objects" / "k").rename(outside / "k")
    (tmp_path / "d2" / "objects" / "k").symlink_to(outside / "k")
    before = sorted(path.name for path in (outside / "k").iterdir())
    pool.delete("k")
    pool.rebuild()
    assert sorted(path.name for path in (outside / "k").iterdir()) == before
    with pytest.raises(hpstore.errors.ObjectNotFound):
        pool.get("k")


def test_a_pipe_in_the_place_of_a_column_keeps_nobody_waiting(pool: Pool, tmp_path: Path) -> None:
    put_and_get(pool, "k", 300_000)
    body = pool.get("k")
    column = next((tmp_path / "d0" / "objects" / "k").iterdir())
    column.unlink()
    os.mkfifo(column)
    assert pool.get("k") == body
    pool.scrub()
    assert pool.get("k") == body


@pytest.mark.parametrize("name", ["pool.json", "horizon.json", "hpstore.json"])
def test_a_record_that_is_a_link_is_not_written_through(
    pool: Pool, tmp_path: Path, victim: Path, name: str
) -> None:
    path = tmp_path / "d3" / name
    path.unlink(missing_ok=True)
    path.symlink_to(victim)
    put_and_get(pool, "k", 300_000)
    with hpstore.open(tmp_path / "pool.toml") as again:
        put_and_get(again, "j", 300_000)
        again.scrub()
    assert victim.read_bytes() == PRECIOUS


def test_links_in_tmp_are_swept_and_their_targets_stay(tmp_path: Path, victim: Path) -> None:
    (tmp_path / "d").mkdir()
    device = LocalDevice(str(tmp_path / "d"), direct=False)
    for part in (TMP, "objects"):
        (tmp_path / "d" / part).mkdir()
    link = tmp_path / "d" / TMP / "00000000000000000001-old"
    link.symlink_to(victim)
    os.utime(link, (1, 1), follow_symlinks=False)
    device.sweep()
    assert not os.path.lexists(link)
    assert victim.read_bytes() == PRECIOUS
    device.close()


@pytest.mark.parametrize("part", ["tmp", "recycle", "ballast", "quarantine"])
def test_a_top_directory_that_is_a_link_leads_nowhere(
    pool: Pool, tmp_path: Path, outside: Path, part: str
) -> None:
    """Renames into it, too."""
    put_and_get(pool, "k")
    put_and_get(pool, "k")  # leaves columns in recycle/
    place = tmp_path / "d4" / part
    if place.exists():
        place.rename(tmp_path / f"was-{part}")
    place.symlink_to(outside)
    for key in ("k", "m"):
        put_and_get(pool, key)
    pool.delete("k")
    pool.rebuild()
    assert list(outside.iterdir()) == []


# --- open_beneath -------------------------------------------------------------------------------


@pytest.fixture(params=[True, False], ids=["openat2", "without"])
def supported(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Kernels before 5.6 lack the call: the last component is looked at all the same."""
    monkeypatch.setattr(confined_names, "_supported", request.param)
    return bool(request.param)


def test_only_what_lies_beneath_is_opened(
    tmp_path: Path, victim: Path, outside: Path, supported: bool
) -> None:
    (outside / "file").write_bytes(b"x")
    root = tmp_path / "root"
    (root / "a" / "b").mkdir(parents=True)
    (root / "a" / "b" / "own").write_bytes(b"own")
    (root / "link").symlink_to(victim)
    (root / "away").symlink_to(outside)
    os.mkfifo(root / "pipe")
    at = os.open(root, os.O_RDONLY)
    try:
        fd = open_beneath(at, "a/b/own", os.O_RDONLY)
        assert os.read(fd, 9) == b"own"
        os.close(fd)
        refused = ["link", "pipe", *(["away/file", "../victim"] if supported else [])]
        for name in refused:
            with pytest.raises(OSError, match=r"\w") as raised:
                open_beneath(at, name, os.O_RDONLY)
            assert not isinstance(raised.value, FileNotFoundError)
        with pytest.raises(FileNotFoundError):
            open_beneath(at, "a/none", os.O_RDWR)
        with parent_beneath(at, "a/b/own") as (directory, name):
            assert (os.stat(name, dir_fd=directory).st_size, name) == (3, "own")
        with pytest.raises(OSError, match=r"directory|levels"), parent_beneath(at, "away/file"):
            pass
        fd = open_beneath(at, "a/new", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o640)
        assert os.fstat(fd).st_mode & 0o777 == 0o640 & ~_umask()
        os.close(fd)
    finally:
        os.close(at)


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


@pytest.mark.parametrize("kind", ["link", "file"])
def test_what_stands_in_the_place_of_a_directory_is_named(
    pool: Pool, tmp_path: Path, outside: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It was said to be a failed use of horizon.json, whose lock is held for the rename."""
    for n in range(5):
        place = tmp_path / f"d{n}" / "objects/taken"
        place.symlink_to(outside) if kind == "link" else place.write_bytes(b"")
    said = "objects/taken is " + ("a symbolic link" if kind == "link" else "no directory")
    with pytest.raises(TooFewDevices, match=rf"rename to objects/taken/@.*{said}.*Move it off"):
        pool.put("taken", os.urandom(1 << 20))
    caplog.clear()
    with pytest.raises(HpstoreError):
        pool.put("taken/below", b"x")
    assert len(caplog.records) < 30  # it is logged once for each device
    assert not os.listdir(outside)
