"""Spare files of a directory on a full filesystem: taken, given back, killed in between."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from hpstore.devices import confined_names
from hpstore.devices.base import TMP
from hpstore.devices.horizon_guard import HORIZON, MARK
from hpstore.devices.local import LocalDevice
from hpstore.devices.reserve import SPARE_BYTES, plan_spares
from hpstore.errors import DeviceFull
from hpstore.runtime.buffers import aligned_array
from hpstore.testing import PAGE, all_files, fetch, pattern, store
from tests.full import no_room

PATH, NEW = "objects/a/@old", "objects/a/@new"


@pytest.fixture(autouse=True)
def spare_files() -> None:
    """As many as the filesystem would have: these tests are about them."""


@pytest.fixture
def device(tmp_path: Path) -> LocalDevice:
    """With one object."""
    (tmp_path / "d").mkdir()
    made = LocalDevice(str(tmp_path / "d"))
    made.prepare()
    store(made, PATH, pattern(3 * PAGE))
    return made


def spares(device: LocalDevice, kind: str = "file-") -> list[os.stat_result]:
    """The spare files or directories of a device."""
    folder = Path(device.url) / "ballast"
    return [path.stat() for path in folder.iterdir() if path.name.startswith(kind)]


def wanted(device: LocalDevice) -> int:
    found = os.statvfs(device.url)
    return plan_spares(found.f_blocks * found.f_frsize, found.f_files).files


def put_tombstone(device: LocalDevice, path: str = NEW) -> None:
    handle = device.create(2 * PAGE, vital=True)
    handle.write(0, [pattern(2 * PAGE, 5)])
    handle.sync()
    handle.publish(path)
    device.sync_directory(path)


def test_a_new_device_has_spares_with_blocks_and_its_counters(device: LocalDevice) -> None:
    """As many as the plan says; each has all its blocks. Opening it again makes no more."""
    found = spares(device)
    assert len(found) == wanted(device)
    assert all(s.st_size == SPARE_BYTES and s.st_blocks * 512 >= SPARE_BYTES for s in found)
    assert len(spares(device, "directory-")) == max(2, len(found) // 4)
    assert all((Path(device.url) / name).stat().st_blocks for name in (HORIZON, MARK))
    again = LocalDevice(device.url)
    again.probe(write=True)
    assert {s.st_ino for s in spares(again)} == {s.st_ino for s in found}


def test_a_device_of_an_earlier_release_gets_them_when_it_is_opened(device: LocalDevice) -> None:
    """At the probe with which a pool opens for writing; a probe that only reads makes nothing."""
    folder = Path(device.url) / "ballast"
    for path in folder.iterdir():
        path.rmdir() if path.is_dir() else path.unlink()
    folder.rmdir()
    LocalDevice(device.url).probe(write=False)
    assert not folder.exists()
    LocalDevice(device.url).probe(write=True)
    assert len(spares(device)) == wanted(device)


def test_spares_are_not_touched_while_there_is_room(device: LocalDevice) -> None:
    """Tombstones and records are ordinary files then."""
    before = {s.st_ino for s in spares(device)}
    put_tombstone(device)
    device.write_small("pool.json", b"x")
    device.retire(PATH)
    assert {s.st_ino for s in spares(device)} == before


def test_a_retired_file_takes_the_place_of_a_spare_that_was_used(
    device: LocalDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PROTOCOL 11: it is blank when it is used, and an open reader keeps its bytes."""
    inode = (Path(device.url) / PATH).stat().st_ino
    no_room(monkeypatch)
    put_tombstone(device)
    put_tombstone(device, "objects/a/@second")
    assert len(spares(device)) == wanted(device) - 2
    reader = device.open(NEW)
    device.retire(PATH)
    assert inode in {s.st_ino for s in spares(device)}
    device.retire(NEW)  # it is read: its bytes are not given away
    put_tombstone(device, "objects/a/@third")
    page = aligned_array(2 * PAGE)
    reader.read_into(0, page)
    assert page.tobytes() == pattern(2 * PAGE, 5).tobytes()
    reader.close()
    assert len(spares(device)) == wanted(device) - 2


def test_spares_are_made_again_when_there_is_room(
    device: LocalDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the process that took some, with its next delete."""
    with monkeypatch.context() as patch:
        no_room(patch)
        for number in range(3):
            put_tombstone(device, f"objects/b{number}/@t")
        assert len(spares(device)) == wanted(device) - 3
    device.delete("objects/b0/@t")
    assert len(spares(device)) == wanted(device)
    assert len(spares(device, "directory-")) == wanted(device) // 4


def test_a_record_larger_than_a_spare_takes_the_blocks_of_others(
    device: LocalDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spares are given up for it one by one, until its bytes are reserved."""
    with monkeypatch.context() as patch:
        no_room(patch)
        patch.setattr(os, "posix_fallocate", _needs(patch, device, 3))
        device.write_small("pool.json", b"r" * 3 * SPARE_BYTES)
        assert device.read_small("pool.json", 1 << 20) == b"r" * 3 * SPARE_BYTES
        assert len(spares(device)) == wanted(device) - 4  # itself, and three


def _needs(patch: pytest.MonkeyPatch, device: LocalDevice, given_up: int):  # type: ignore[no-untyped-def]
    plain, before = os.posix_fallocate, len(spares(device))

    def allocate(fd: int, offset: int, length: int) -> None:
        if before - len(spares(device)) > given_up:
            os.ftruncate(fd, length)
        else:
            plain(fd, offset, length)

    return allocate


def test_threads_that_want_spares_at_once_get_different_ones(
    device: LocalDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixteen tombstones by four threads: all are whole, in sixteen files."""
    no_room(monkeypatch)

    def work(thread: int) -> None:
        for number in range(4):
            handle = device.create(2 * PAGE, vital=True)
            handle.write(0, [pattern(2 * PAGE, 4 * thread + number)])
            handle.sync()
            handle.publish(f"objects/a/@{4 * thread + number}")

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(16):
        assert fetch(device, f"objects/a/@{number}") == pattern(2 * PAGE, number).tobytes()
    assert len(spares(device)) == wanted(device) - 16


def test_a_spare_that_has_another_name_is_not_written_over(
    device: LocalDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a power cut between two directories may leave it."""
    for path in (Path(device.url) / "ballast").iterdir():
        if path.name.startswith("file-"):
            path.unlink()
    store(device, "objects/b/@live", pattern(2 * PAGE, 9))
    os.link(Path(device.url) / "objects/b/@live", Path(device.url) / "ballast/file-twice")
    no_room(monkeypatch)
    with pytest.raises(DeviceFull):
        device.write_small("pool.json", b"new")
    assert fetch(device, "objects/b/@live") == pattern(2 * PAGE, 9).tobytes()
    assert spares(device) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_quota_counts_as_full(
    device: LocalDevice, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """What statvfs shows is then of no use: the error says which limit it was."""
    plain = os.open

    def refused(path: str, flags: int, *args: object, **options: object) -> int:
        if flags & os.O_EXCL:
            raise OSError(number, os.strerror(number))
        return plain(path, flags, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(confined_names, "_supported", False)  # then it is os.open() that opens
    monkeypatch.setattr(os, "open", refused)
    with pytest.raises(DeviceFull, match=os.strerror(number)):
        device.create(PAGE)
    put_tombstone(device)
    assert fetch(device, NEW) == pattern(2 * PAGE, 5).tobytes()


def test_a_delete_killed_at_any_call_leaves_whole_files(
    device: LocalDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fork, die before the n-th call that changes names or sizes: the tombstone is whole or not
    there, the object is whole or gone, no spare is a file with another name, and what is missing
    is made again."""
    inodes = {s.st_ino for s in spares(device)}
    for crash_at in range(100):
        pid = os.fork()
        if pid == 0:
            _delete_and_die(device.url, crash_at)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        _check(device)
        if status == 0:
            assert crash_at > 5
            return
        assert status == 9
        device.delete(NEW)
        device.delete(PATH)
        store(device, PATH, pattern(3 * PAGE))
        for path in all_files(device, TMP):
            device.delete(path)  # as a sweep does, a minute later
        device.probe(write=True)
        assert len(spares(device)) == wanted(device)
    pytest.fail(f"no end; {len(inodes)} spares")


def _delete_and_die(url: str, crash_at: int) -> None:
    patch, calls = pytest.MonkeyPatch(), [0]
    device = LocalDevice(url)
    no_room(patch)
    for name in ("rename", "unlink", "ftruncate", "fsync", "fdatasync", "pwrite", "pwritev"):
        plain = getattr(os, name)

        def call(*args: object, plain=plain, **options: object) -> object:  # type: ignore[no-untyped-def]
            calls[0] += 1
            if calls[0] > crash_at:
                os._exit(9)
            return plain(*args, **options)

        patch.setattr(os, name, call)
    try:
        put_tombstone(device)
        device.retire(PATH)
    except BaseException:  # noqa: BLE001 (the child must end here)
        os._exit(1)
    os._exit(0)


def _check(device: LocalDevice) -> None:
    found = all_files(device, "objects")
    if NEW in found:
        assert fetch(device, NEW) == pattern(2 * PAGE, 5).tobytes()
    if PATH in found:
        assert fetch(device, PATH) == pattern(3 * PAGE).tobytes()
    assert NEW in found or PATH in found
    assert all(s.st_nlink == 1 for s in spares(device))
    named = {(Path(device.url) / path).stat().st_ino for path in found}
    assert not named & {s.st_ino for s in spares(device)}
