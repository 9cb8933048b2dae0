"""Files of a local device: recycling, sweeping, durable names, and what a fork leaves intact."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hpstore.devices.base import DIRECTORIES, ORPHAN_SECONDS, RECYCLE, TMP
from hpstore.devices.durable_names import DurableNames
from hpstore.devices.local import LocalDevice
from hpstore.errors import DeviceError, DeviceMissing, ReadAbandoned
from hpstore.runtime.buffers import aligned_array
from hpstore.testing import PAGE, all_files, fetch, pattern, store
from hpstore.testing.device_contract import PATH
from hpstore.units import MIB


def make(path: Path, *, recycle_bytes: int = 64 * MIB, direct: bool = True) -> LocalDevice:
    path.mkdir(exist_ok=True)
    device = LocalDevice(str(path), recycle_bytes=recycle_bytes, direct=direct)
    device.prepare()
    device.probe(write=True)
    return device


@pytest.fixture
def device(tmp_path: Path) -> LocalDevice:
    """A device with one file."""
    made = make(tmp_path / "d")
    store(made, PATH, pattern(PAGE))
    return made


# --- recycling, sweeping, locks ------------------------------------------------------------------


def test_a_retired_file_is_blank_and_reused(device: LocalDevice) -> None:
    """Its header is zeroed in recycle/; the next file of its size is the same inode."""
    store(device, "objects/r/@1", pattern(2 * MIB))
    inode = os.stat(f"{device.url}/objects/r/@1").st_ino
    device.retire("objects/r/@1")
    (kept,) = all_files(device, RECYCLE)
    assert Path(f"{device.url}/{kept}").read_bytes()[:PAGE] == bytes(PAGE)
    store(device, "objects/s/@1", pattern(2 * MIB, 1))
    assert os.stat(f"{device.url}/objects/s/@1").st_ino == inode
    assert all_files(device, RECYCLE) == []


def test_a_recycled_file_that_was_not_blanked_is_blanked_before_its_reuse(
    device: LocalDevice,
) -> None:
    """A crash between the renaming and the blanking left an old header in recycle/."""
    Path(f"{device.url}/{RECYCLE}/{2 * MIB}-crashed").write_bytes(pattern(2 * MIB).tobytes())
    handle = device.create(2 * MIB)
    assert all_files(device, RECYCLE) == []
    handle.publish("objects/s/@1")
    assert Path(f"{device.url}/objects/s/@1").read_bytes()[:PAGE] == bytes(PAGE)


def test_recycling_is_bounded_by_bytes(tmp_path: Path) -> None:
    """What would pass the limit is removed instead; small files are not kept."""
    device = make(tmp_path / "d", recycle_bytes=3 * MIB)
    for i, size in enumerate((2 * MIB, 2 * MIB, MIB, PAGE)):
        store(device, f"objects/{i}/@1", pattern(size))
        device.retire(f"objects/{i}/@1")
        total = sum(os.stat(f"{device.url}/{p}").st_size for p in all_files(device, RECYCLE))
        assert total <= 3 * MIB
    assert all_files(device, "objects") == []


def test_a_file_being_recycled_is_absent_for_readers(device: LocalDevice) -> None:
    """Under the exclusive lock of whoever retires or writes it."""
    fd = os.open(f"{device.url}/{PATH}", os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(FileNotFoundError):
        device.open(PATH)
    os.close(fd)
    device.open(PATH).close()


def test_a_recycled_file_that_a_reader_still_holds_is_not_reused(device: LocalDevice) -> None:
    """A reader that opened just before the retirement keeps its lock: its blocks are left alone."""
    store(device, "objects/r/@1", pattern(2 * MIB))
    device.retire("objects/r/@1")
    (kept,) = all_files(device, RECYCLE)
    fd = os.open(f"{device.url}/{kept}", os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_SH)
    before = os.pread(fd, 2 * MIB, 0)
    store(device, "objects/s/@1", pattern(2 * MIB, 1))
    assert os.pread(fd, 2 * MIB, 0) == before
    os.close(fd)


def test_a_file_closed_under_a_read_stays_open_until_the_read_ends(
    device: LocalDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PROTOCOL 21: a late read goes on; its descriptor's number must not name another file then."""
    reader, target, plain = device.open(PATH), aligned_array(PAGE), os.preadv
    closer = threading.Thread(target=reader.close)

    def close_first(fd: int, *rest: Any) -> int:  # Any: of preadv
        closer.start()
        closer.join()
        return plain(fd, *rest)

    descriptor = reader.descriptor
    monkeypatch.setattr(os, "preadv", close_first)
    reader.read_into(0, target)
    assert target.tobytes() == pattern(PAGE).tobytes()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    assert reader.descriptor == -1
    with pytest.raises(ReadAbandoned):
        reader.read_into(0, target)
    reader.close()


def test_sweep_removes_what_dead_writers_left(device: LocalDevice) -> None:
    """Old and unlocked: removed. Old and locked, or young: kept."""
    handle = device.create(PAGE)
    (living,) = all_files(device, TMP)
    for name in ("old-1", "old-2", "young"):
        Path(f"{device.url}/{TMP}/{name}").write_bytes(b"x")
    Path(f"{device.url}/{TMP}/directory").mkdir()
    past = os.stat(device.url).st_mtime - ORPHAN_SECONDS - 3600
    for name in ("old-1", "old-2", "directory", living.removeprefix(f"{TMP}/")):
        os.utime(f"{device.url}/{TMP}/{name}", (past, past))
    assert device.sweep() == 2
    assert all_files(device, TMP) == sorted([living, f"{TMP}/young"])
    handle.abort()


# --- durability of names -------------------------------------------------------------------------


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Paths whose descriptors were fsynced, in order."""
    paths: list[str] = []
    real = os.fsync

    def note(fd: int) -> None:
        real(fd)
        paths.append(os.readlink(f"/proc/self/fd/{fd}"))

    monkeypatch.setattr(os, "fsync", note)
    return paths


def objects_synced(synced: list[str], device: LocalDevice) -> list[str]:
    found = [path.removeprefix(f"{device.url}/") for path in synced if "/objects" in path]
    synced.clear()
    return found


def test_ancestors_are_synced_up_to_one_that_is_durable(
    device: LocalDevice, synced: list[str]
) -> None:
    """PROTOCOL 4. The directory of an object always; those above it until one was synced before."""
    chain = ["objects/x/b/@1", "objects/x/b", "objects/x", "objects"]
    store(device, "objects/x/b/@1/1", pattern(PAGE))
    assert objects_synced(synced, device) == chain
    store(device, "objects/x/b/@1/2", pattern(PAGE))
    assert objects_synced(synced, device) == chain[:2]
    store(device, "objects/x/c/@1/1", pattern(PAGE))  # c is new, x is not
    assert objects_synced(synced, device) == ["objects/x/c/@1", "objects/x/c", "objects/x"]
    store(device, "objects/@1/1", pattern(PAGE))
    assert objects_synced(synced, device) == ["objects/@1", "objects"]


def test_an_ancestor_that_another_process_has_made_anew_is_synced_again(
    device: LocalDevice, synced: list[str]
) -> None:
    """PROTOCOL 4. Filesystems give its inode number to the next directory, unless it is held."""
    other = LocalDevice(device.url)
    for _ in range(3):
        store(device, "objects/x/b/@1/1", pattern(PAGE))
        assert len(objects_synced(synced, device)) == 4
        other.delete("objects/x/b/@1/1")  # removes what is empty then: x, too
        assert not os.path.exists(f"{device.url}/objects/x")
    other.close()


def test_a_directory_that_was_removed_is_not_known(tmp_path: Path) -> None:
    """Though what is looked at has the number that it had."""
    (tmp_path / "a").mkdir()
    fd = os.open(tmp_path / "a", os.O_RDONLY)
    durable = DurableNames()
    durable.hold([("a", os.dup(fd))])
    assert durable.known("a", fd)
    assert not durable.known("b", fd)
    (tmp_path / "a").rmdir()
    assert not durable.known("a", fd)
    os.close(fd)
    durable.close()


def test_a_failure_to_hold_closes_what_was_given_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A descriptor that is closed twice could be another file's by then."""
    fds = [os.open(tmp_path, os.O_RDONLY) for _ in range(2)]
    durable, fstat = DurableNames(), os.fstat

    def fail(fd: int) -> os.stat_result:
        if fd == fds[1]:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return fstat(fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", fail)
        with pytest.raises(OSError, match=os.strerror(errno.ESTALE)):
            durable.hold([("a", fds[0]), ("b", fds[1])])
    mine = [os.open(tmp_path, os.O_RDONLY) for _ in range(2)]
    assert sorted(mine) == sorted(fds)  # both were closed
    assert not durable.known("a", mine[0])
    durable.close()
    for fd in mine:
        os.close(fd)


def test_a_deep_key_takes_few_descriptors(
    device: LocalDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key may have hundreds of parts; a process may open 1,024 files."""
    before, most = len(os.listdir("/proc/self/fd")), [0]
    fsync = os.fsync

    def note(fd: int) -> None:
        most[0] = max(most[0], len(os.listdir("/proc/self/fd")) - before)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", note)
    for name in ("1", "2"):
        store(device, "objects/" + "a/" * 200 + f"@1/{name}", pattern(PAGE))
    assert most[0] <= 17
    assert len(os.listdir("/proc/self/fd")) - before <= 6


def test_few_directories_are_held(device: LocalDevice, synced: list[str]) -> None:
    """However many there are; none after close()."""
    before = len(os.listdir("/proc/self/fd"))
    for number in range(40):
        store(device, f"objects/{number}/@1/1", pattern(PAGE))
    assert 0 < len(os.listdir("/proc/self/fd")) - before <= 6
    objects_synced(synced, device)
    store(device, "objects/39/@2/1", pattern(PAGE))
    store(device, "objects/0/@2/1", pattern(PAGE))
    assert len(objects_synced(synced, device)) == 2 + 3
    device.close()
    assert len(os.listdir("/proc/self/fd")) < before


def test_an_ancestor_that_could_not_be_synced_is_synced_the_next_time(
    device: LocalDevice, synced: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error on the way up leaves no directory marked as durable."""
    note, parent = os.fsync, f"{device.url}/objects/n"

    def fail(fd: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}") == parent:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        note(fd)

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(DeviceError):
        store(device, "objects/n/m/@1", pattern(PAGE))
    monkeypatch.setattr(os, "fsync", note)
    device.sync_directory("objects/n/m/@1")
    assert parent in synced


def test_a_directory_made_again_by_its_writer_is_synced_again(
    device: LocalDevice, synced: list[str]
) -> None:
    """Pruned by another process, made anew (often with the same inode): its name is not durable."""
    store(device, "objects/n/m/@1", pattern(PAGE))
    other = LocalDevice(device.url)
    other.delete("objects/n/m/@1")
    synced.clear()
    store(device, "objects/n/m/@2", pattern(PAGE))
    assert f"{device.url}/objects/n" in synced
    assert f"{device.url}/objects" in synced


# --- fork ----------------------------------------------------------------------------------------


def in_child(work: Callable[[], bool]) -> bool:
    """Fork, run `work` there, return what it returned."""
    child = os.fork()
    if child == 0:  # only os._exit from here: pytest must not go on twice
        code = 1
        try:
            code = 0 if work() else 2
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_forked_child_opens_its_own_descriptor(device: LocalDevice) -> None:
    """It reads and writes; the parent's descriptor stays as it was."""
    before = device.root_fd()

    def child() -> bool:
        store(device, "objects/child/@1", pattern(PAGE, 3))
        same = fetch(device, PATH) == pattern(PAGE).tobytes()
        device.close()
        return same

    assert in_child(child)
    assert device.root_fd() == before
    assert fetch(device, "objects/child/@1") == pattern(PAGE, 3).tobytes()


def test_a_forked_child_refuses_another_directory(device: LocalDevice, tmp_path: Path) -> None:
    """Unmounted between open and fork: DeviceMissing in the child, not somebody else's files."""
    os.rename(device.url, tmp_path / "old")
    store(make(Path(device.url)), PATH, pattern(PAGE, 9))

    def child() -> bool:
        try:
            device.open(PATH)
        except DeviceMissing:
            return True
        return False

    assert in_child(child)


def test_two_threads_that_use_it_first_after_a_fork_share_one_descriptor(
    device: LocalDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both find the descriptor stale; neither may close the one that the other opened."""
    root, real, meet = os.stat(device.url), os.open, threading.Barrier(2)

    def both_inside(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        with contextlib.suppress(threading.BrokenBarrierError):
            meet.wait(0.5)  # with a lock round it only one comes here, and goes on alone
        return real(path, flags, mode, dir_fd=dir_fd)

    child = os.getpid() + 1
    with monkeypatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setattr(os, "getpid", lambda: child)
        patch.setattr(os, "open", both_inside)
        found = list(pool.map(lambda _: device.root_fd(), range(2)))
        found.append(device.root_fd())
    assert len(set(found)) == 1
    for fd in found:
        assert os.fstat(fd).st_ino == root.st_ino


def test_a_writer_does_not_lose_its_lock_to_a_forked_child(device: LocalDevice) -> None:
    """The child ends; the parent's unpublished file is still locked against sweeping."""
    handle = device.create(PAGE)
    assert in_child(lambda: True)
    (name,) = all_files(device, TMP)
    fd = os.open(f"{device.url}/{name}", os.O_RDWR)
    with pytest.raises(BlockingIOError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(fd)
    handle.abort()


def test_prepare_makes_what_is_missing_and_keeps_what_is_there(device: LocalDevice) -> None:
    """Idempotent: a device that lost its recycle/ gets it back, its objects stay."""
    os.rmdir(f"{device.url}/{RECYCLE}")
    device.prepare()
    assert {e.name for e in os.scandir(device.url)} >= set(DIRECTORIES)
    target = aligned_array(PAGE)
    handle = device.open(PATH)
    handle.read_into(0, target)
    handle.close()
    assert target.tobytes() == pattern(PAGE).tobytes()
