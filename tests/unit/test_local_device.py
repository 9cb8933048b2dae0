"""A directory as a device: lost, replaced, forked, O_DIRECT refused, modes, recycling, sweeping."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from hpstore.devices import confined_names
from hpstore.devices.base import RECYCLE, TMP
from hpstore.devices.horizon_guard import MARK, HorizonGuard
from hpstore.devices.local import LocalDevice
from hpstore.errors import (
    ConfigError,
    DeviceError,
    DeviceFull,
    DeviceMissing,
    DeviceReadOnly,
    DeviceTimeout,
)
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


# --- not there -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["file", "missing", "dangling"])
def test_a_path_that_is_no_directory_is_a_missing_device(tmp_path: Path, kind: str) -> None:
    """A file, nothing, or a dangling link: DeviceMissing with the path, and nothing is made."""
    path = tmp_path / "d"
    if kind == "file":
        path.write_text("x")
    elif kind == "dangling":
        path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(DeviceMissing, match=str(path)) as caught:
        LocalDevice(str(path))
    assert not isinstance(caught.value, (FileNotFoundError, ConfigError))
    assert caught.value.device == str(path)


WRITES: dict[str, Callable[[LocalDevice], object]] = {
    "create": lambda d: d.create(PAGE),
    "write_small": lambda d: d.write_small("pool.json", b"x"),
    "sweep": lambda d: d.sweep(),
    "prepare": lambda d: d.prepare(),
    "probe": lambda d: d.probe(write=True),
    "probe read-only": lambda d: d.probe(write=False),
    "check_mounted": lambda d: d.check_mounted(),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_directory_deleted_underneath_is_missing_not_absent(
    device: LocalDevice, name: str
) -> None:
    """What needs the device's own directories says DeviceMissing, never "file not found"."""
    shutil.rmtree(device.url)
    with pytest.raises(DeviceMissing):
        WRITES[name](device)
    assert not Path(device.url).exists()


@pytest.mark.parametrize(
    "name", ["create", "write_small", "sweep", "raise_counter", "guarded publish"]
)
def test_nothing_is_made_on_a_device_that_was_wiped(device: LocalDevice, name: str) -> None:
    """All that is on it is gone, the directory stays, as with rm -r of what is on a mount: a
    counter was made there, so that it looked as if somebody had taken it back (fault suite)."""
    handle = device.create(PAGE)
    handle.write(0, [pattern(PAGE)])
    for entry in Path(device.url).iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    calls: dict[str, Callable[[LocalDevice], object]] = {
        **WRITES,
        "raise_counter": lambda d: d.raise_counter(MARK, 5),
        "guarded publish": lambda _: handle.publish(PATH, HorizonGuard(counter=1)),
    }
    with pytest.raises(DeviceMissing):
        calls[name](device)
    handle.abort()
    assert os.listdir(device.url) == []


def test_a_writer_whose_device_was_wiped_is_missing(device: LocalDevice) -> None:
    """Publishing into a directory that is gone: DeviceMissing, and abort does not raise."""
    handle = device.create(PAGE)
    handle.write(0, [pattern(PAGE)])
    shutil.rmtree(device.url)
    with pytest.raises(DeviceMissing):
        handle.publish(PATH)
    handle.abort()


@pytest.mark.parametrize("how", ["replaced", "moved away", "link"])
def test_check_mounted_sees_another_directory_under_the_path(
    device: LocalDevice, tmp_path: Path, how: str
) -> None:
    """As after a lazy unmount: same path, other inode. Nothing is written there."""
    device.check_mounted()
    os.rename(device.url, tmp_path / "old")
    if how == "replaced":
        os.mkdir(device.url)
    elif how == "link":
        (tmp_path / "other").mkdir()
        os.symlink(tmp_path / "other", device.url)
    with pytest.raises(DeviceMissing):
        device.check_mounted()
    with pytest.raises(DeviceMissing):
        device.probe(write=True)
    if how != "moved away":
        assert os.listdir(device.url) == []


def test_calls_stay_on_the_directory_that_was_opened(device: LocalDevice, tmp_path: Path) -> None:
    """The held descriptor leads to the old directory; the one put in its place gets no byte."""
    os.rename(device.url, tmp_path / "old")
    os.mkdir(device.url)
    store(device, "objects/new/@1", pattern(PAGE, 5))
    assert (tmp_path / "old/objects/new/@1").read_bytes() == pattern(PAGE, 5).tobytes()
    assert os.listdir(device.url) == []


def test_close_and_use_opens_the_same_directory_again(device: LocalDevice, tmp_path: Path) -> None:
    """After close() the next call reopens; another directory under the path is refused."""
    device.close()
    assert fetch(device, PATH) == pattern(PAGE).tobytes()
    device.close()
    os.rename(device.url, tmp_path / "old")
    store(make(Path(device.url)), PATH, pattern(PAGE, 9))
    with pytest.raises(DeviceMissing):
        device.open(PATH)


def test_a_symbolic_link_is_not_followed_to_a_file(device: LocalDevice, tmp_path: Path) -> None:
    """A column is a regular file of the device; a link out of it is an error, not content."""
    (tmp_path / "secret").write_bytes(bytes(PAGE))
    os.symlink(tmp_path / "secret", f"{device.url}/objects/@link")
    with pytest.raises(DeviceError):
        device.open("objects/@link")
    with pytest.raises(DeviceError):
        device.read_small("objects/@link", 1 << 20)


# --- modes ---------------------------------------------------------------------------------------


def modes(root: Path) -> tuple[set[int], set[int]]:
    """Permissions of all files and of all directories below a root."""
    paths = list(root.rglob("*"))
    return (
        {stat.S_IMODE(p.stat().st_mode) for p in paths if p.is_file()},
        {stat.S_IMODE(p.stat().st_mode) for p in paths if p.is_dir()},
    )


@pytest.mark.parametrize(("file_mode", "directory_mode"), [(0o600, 0o700), (0o640, 0o750)])
def test_files_and_directories_have_the_modes_of_the_settings(
    tmp_path: Path, request: pytest.FixtureRequest, file_mode: int, directory_mode: int
) -> None:
    """Columns, small files, temporary files, and every directory; private by default."""
    before = os.umask(0o022)
    request.addfinalizer(lambda: os.umask(before))
    (tmp_path / "d").mkdir()
    private = (file_mode, directory_mode) == (0o600, 0o700)
    settings = {} if private else {"file_mode": file_mode, "directory_mode": directory_mode}
    device = LocalDevice(str(tmp_path / "d"), recycle_bytes=8 * MIB, **settings)  # type: ignore[arg-type]
    device.prepare()
    device.probe(write=True)
    device.write_small("pool.json", b"x")
    store(device, PATH, pattern(2 * MIB))
    store(device, "objects/r/@1", pattern(2 * MIB))
    device.retire("objects/r/@1")
    store(device, "objects/q/@1", pattern(PAGE))
    device.quarantine("objects/q/@1")
    device.create(PAGE)
    assert modes(tmp_path / "d") == ({file_mode}, {directory_mode})


# --- O_DIRECT ------------------------------------------------------------------------------------


@pytest.fixture
def no_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """A filesystem that refuses O_DIRECT at open."""
    real = os.open

    def refuse(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(confined_names, "_supported", False)  # then it is os.open() that opens
    monkeypatch.setattr(os, "open", refuse)


@pytest.mark.usefixtures("no_direct")
def test_a_filesystem_without_o_direct_is_used_buffered_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """mode and alignment change, one log line names the device; it works."""
    with caplog.at_level(logging.WARNING, "hpstore.devices.local"):
        device = make(tmp_path / "d")
    assert (device.mode, device.memory_alignment) == ("buffered", 1)
    assert [record.message for record in caplog.records].count("") == 0
    assert len(caplog.records) == 1
    assert device.url in caplog.text
    store(device, PATH, pattern(2 * PAGE))
    assert fetch(device, PATH) == pattern(2 * PAGE).tobytes()


def test_a_device_opened_for_reading_finds_out_about_o_direct_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """`open(read_only=True)` probes without writing; reads must work all the same."""
    store(make(tmp_path / "d"), PATH, pattern(PAGE))
    request.getfixturevalue("no_direct")
    device = LocalDevice(str(tmp_path / "d"))
    device.probe(write=False)
    assert fetch(device, PATH) == pattern(PAGE).tobytes()
    assert device.mode == "buffered"


def test_folding_is_found_out_with_and_without_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where names fold, keys are escaped; a read-only open that misses it finds no such key."""
    real = os.stat

    def fold(path: str, *, dir_fd: int | None = None, follow_symlinks: bool = True) -> object:
        try:
            return real(path, dir_fd=dir_fd, follow_symlinks=follow_symlinks)
        except FileNotFoundError:
            if dir_fd is None:
                raise
            return real(path.lower(), dir_fd=dir_fd, follow_symlinks=follow_symlinks)

    assert not make(tmp_path / "d").folds_names
    monkeypatch.setattr(os, "stat", fold)
    assert make(tmp_path / "d").folds_names
    reader = LocalDevice(str(tmp_path / "d"))
    reader.probe(write=False)
    assert reader.folds_names


def test_an_io_error_of_the_probe_is_not_taken_for_missing_o_direct(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EIO is a sick device: DeviceError, no silent fall back to the page cache."""
    device = make(tmp_path / "d")

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pwritev", fail)
    with pytest.raises(DeviceError):
        device.probe(write=True)
    assert device.mode == "direct"
    assert all_files(device, TMP) == []


def test_a_device_that_returns_other_bytes_fails_its_probe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Write, sync, read back, compare."""
    device = make(tmp_path / "d")
    real = os.preadv

    def lie(fd: int, buffers: list[memoryview], offset: int) -> int:
        count = real(fd, buffers, offset)
        buffers[0][7] ^= 1
        return count

    monkeypatch.setattr(os, "preadv", lie)
    with pytest.raises(DeviceError, match="other bytes"):
        device.probe(write=True)


# --- errors of the hardware ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, DeviceFull),
        (errno.EDQUOT, DeviceFull),
        (errno.EROFS, DeviceReadOnly),
        (errno.EIO, DeviceError),
        (errno.ENODEV, DeviceMissing),
        (errno.ESTALE, DeviceMissing),
        (errno.ETIMEDOUT, DeviceTimeout),
    ],
)
def test_an_errno_becomes_the_class_that_fits(
    device: LocalDevice, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[DeviceError]
) -> None:
    """For a write, with the device and the reason in the message."""
    handle = device.create(PAGE)

    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pwritev", fail)
    with pytest.raises(kind, match="write failed") as caught:
        handle.write(0, [pattern(PAGE)])
    assert type(caught.value) is kind
    assert device.url in str(caught.value)
    assert os.strerror(number) in str(caught.value)
    handle.abort()
    assert all_files(device, TMP) == []


def test_short_writes_and_reads_are_continued(
    device: LocalDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel may move fewer bytes than asked, also ending inside a page or a buffer."""
    write, read = os.pwritev, os.preadv

    offsets: list[int] = []

    def short_write(fd: int, buffers: list[memoryview], offset: int) -> int:
        offsets.append(offset)
        return write(fd, [bytes(buffers[0])[: PAGE + 100]], offset)

    def short_read(fd: int, buffers: list[memoryview], offset: int) -> int:
        return read(fd, [buffers[0][: 2 * PAGE]], offset)

    plain = make(Path(device.url), direct=False)
    monkeypatch.setattr(os, "pwritev", short_write)
    monkeypatch.setattr(os, "preadv", short_read)
    rows = [pattern(3 * PAGE, 1), pattern(PAGE, 2), pattern(4 * PAGE, 3)]
    handle = plain.create(8 * PAGE)
    handle.write(0, rows)
    handle.publish("objects/x/@1")
    assert fetch(plain, "objects/x/@1") == b"".join(row.tobytes() for row in rows)
    assert len(offsets) == 8
    assert all(offset % PAGE == 0 for offset in offsets)  # as O_DIRECT asks


def test_a_full_disk_frees_recycled_files_first(
    device: LocalDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """ENOSPC at reserving: recycle/ is emptied, said once, and the reservation is tried again."""
    store(device, "objects/r/@1", pattern(2 * MIB))
    device.retire("objects/r/@1")
    real = os.posix_fallocate
    refused: list[int] = []

    def once(fd: int, offset: int, length: int) -> None:
        if not refused:
            refused.append(length)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", once)
    with caplog.at_level(logging.WARNING):
        store(device, "objects/s/@1", pattern(PAGE))
    assert device.entries(RECYCLE) == []
    assert "recycled files freed" in caplog.text
    assert fetch(device, "objects/s/@1") == pattern(PAGE).tobytes()


def test_a_disk_that_stays_full_leaves_no_temporary_file(
    device: LocalDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeviceFull before any data moved."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DeviceFull):
        device.create(PAGE)
    assert all_files(device, TMP) == []


def test_a_filesystem_without_fallocate_is_used_all_the_same(
    device: LocalDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EOPNOTSUPP: the size is set, the space comes with the writes."""

    def unsupported(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    store(device, "objects/s/@1", pattern(3 * PAGE))
    assert fetch(device, "objects/s/@1") == pattern(3 * PAGE).tobytes()


def test_a_sync_that_has_failed_fails_again_and_nothing_gets_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel says once that pages are lost: a sync that is asked for again, as by another host
    whose answer was lost, must not pass for durable (PROTOCOL 4)."""
    device = LocalDevice(str(tmp_path))
    device.prepare()
    writer = device.create(PAGE)
    writer.write(0, [pattern(PAGE)])
    real, failures = os.fdatasync, [OSError(errno.EIO, "Input/output error")]

    def once(fd: int) -> None:
        if failures:
            raise failures.pop()
        real(fd)

    monkeypatch.setattr(os, "fdatasync", once)
    for act in (writer.sync, writer.sync, lambda: writer.publish("objects/a")):
        with pytest.raises(DeviceError, match="Input/output error"):
            act()
    writer.abort()
    assert device.stamp("objects/a") is None
    assert device.entries("tmp") == []
    device.close()
