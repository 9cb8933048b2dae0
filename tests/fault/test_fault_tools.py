"""The tools of the fault suite do what they say: FUSE faults, flips, throttles, sweeps."""

from __future__ import annotations

import errno
import mmap
import os
import select
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import hpstore
from hpstore.config import Settings
from hpstore.testing.faultfs import FaultFilesystem, fuse_problem, read_log
from hpstore.testing.fuse import FaultRule
from hpstore.testing.loopfs import HANGING, Kind, LoopFilesystem, loop_mounts_problem
from hpstore.testing.scratch import (
    loops,
    mount_points,
    owner_is_dead,
    run,
    scratch_directory,
    sweep,
    throttle_problem,
)
from hpstore.units import KIB, MIB
from tests.fault.common import Bench, Call, MakeDisks, exit_status, forked, payload, poll

pytestmark = [pytest.mark.fault, pytest.mark.root]
DATA = payload("tools", 300 * KIB)


@pytest.fixture(scope="module")
def fuse() -> None:
    """Skip, with the reason, where FUSE cannot be mounted."""
    problem = fuse_problem()
    if problem is not None:
        pytest.skip(problem)


@pytest.fixture(scope="module")
def server(fuse: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultFilesystem]:
    """One for all tests: a server takes a second to start. Its log is `log` in the directory."""
    root = tmp_path_factory.mktemp("fuse")
    (root / "backing").mkdir()
    with FaultFilesystem(str(root / "backing"), root, log=str(root / "log")) as found:
        yield found


@pytest.fixture
def faulty(server: FaultFilesystem) -> FaultFilesystem:
    """A healthy one, with a file of known bytes and nothing else."""
    server.behave()
    for entry in Path(server.path).iterdir():
        entry.unlink()
    Path(server.path, "file").write_bytes(DATA)
    return server


def test_healthy_fuse_is_an_ordinary_file_system(faulty: FaultFilesystem) -> None:
    """Names, directories, renames over, truncation, times, holes, unlinked open files."""
    root = Path(faulty.path)
    assert (root / "file").read_bytes() == DATA
    (root / "a" / "b").mkdir(parents=True)
    os.rename(root / "file", root / "a" / "b" / "moved")
    assert os.listdir(root) == ["a"]
    assert [entry.name for entry in (root / "a" / "b").iterdir()] == ["moved"]
    (root / "other").write_bytes(b"y" * 10)
    os.replace(root / "a" / "b" / "moved", root / "other")
    assert (root / "other").read_bytes() == DATA
    with open(root / "other", "r+b") as file:
        os.posix_fallocate(file.fileno(), 0, MIB)
        file.truncate(MIB + 5)
        os.unlink(root / "other")
        assert os.fstat(file.fileno()).st_size == MIB + 5
        assert file.read() == DATA + bytes(MIB + 5 - len(DATA))
    os.removedirs(root / "a" / "b")
    os.utime(root, ns=(10**9, 2 * 10**9 + 7))
    assert root.stat().st_mtime_ns == 2 * 10**9 + 7
    many = {f"file-{number:04d}" for number in range(500)}
    for name in many:
        (root / name).touch()
    assert set(os.listdir(root)) == many
    with pytest.raises(FileNotFoundError):
        (root / "none").stat()


def test_each_rule_does_what_it_says(faulty: FaultFilesystem) -> None:
    """Errors, flips, drops, short writes; none where the rule is not about; all end with it."""
    path = Path(faulty.path, "file")
    before = faulty.behave(FaultRule(operations=("read",), error=errno.EIO))
    assert faulty.applied() == before
    for times in (1, 2):  # to be asked how often changes nothing
        with pytest.raises(OSError, match="Input/output error"):
            path.read_bytes()
        assert faulty.applied() >= before + times
    faulty.behave(FaultRule(operations=("read",), path="/elsewhere", error=errno.EIO))
    assert path.read_bytes() == DATA
    faulty.behave(FaultRule(operations=("read",), flip=True))
    found = path.read_bytes()
    wrong = [a ^ b for a, b in zip(found, DATA, strict=True) if a != b]
    assert wrong  # one a request of the kernel
    assert all(bits.bit_count() == 1 for bits in wrong)
    faulty.behave(FaultRule(operations=("write",), drop=True))
    Path(faulty.path, "lost").write_bytes(b"x" * 100)
    faulty.behave(FaultRule(operations=("write",), short=True))
    fd = os.open(Path(faulty.path, "half"), os.O_WRONLY | os.O_CREAT)
    assert os.write(fd, b"x" * 100) == 50
    os.close(fd)
    faulty.behave()
    assert Path(faulty.backing, "lost").read_bytes() == b""
    assert path.read_bytes() == DATA


def test_hanging_calls_end_with_the_rule_and_a_killed_server_is_enotconn(
    faulty: FaultFilesystem,
) -> None:
    """A read waits until other rules come; after a kill everything fails, a start mends it."""
    path = Path(faulty.path, "file")
    faulty.behave(FaultRule(operations=("read",), hang=True))
    waiting = Call(path.read_bytes)
    assert not waiting.ended(0.2)
    faulty.behave()
    assert waiting.ended(30.0)
    assert waiting.result() == DATA
    faulty.kill()
    with pytest.raises(OSError) as caught:
        os.statvfs(faulty.path)
    assert caught.value.errno == errno.ENOTCONN
    faulty.start()
    assert path.read_bytes() == DATA


def test_log_holds_every_write_and_flush_in_order(faulty: FaultFilesystem) -> None:
    """Write, flush, write: played again, the writes give the file."""
    with open(Path(faulty.path, "image"), "wb", buffering=0) as file:
        file.write(b"a" * 5000)
        os.fsync(file.fileno())
        file.write(b"b" * 10)
    records = [
        record for record in read_log(Path(faulty.backing).parent / "log") if record.name == "image"
    ]
    assert [(r.flush, r.offset, bytes(r.data)) for r in records] == [
        (False, 0, b"a" * 5000),
        (True, 0, b""),
        (False, 5000, b"b" * 10),
    ]


def test_close_that_fails_costs_no_read_and_no_put(faulty: FaultFilesystem, bench: Bench) -> None:
    """As when the server of a file system dies between read and close: the bytes are there."""
    paths = [f"{faulty.path}/device", *(str(bench.root / f"d{number}") for number in range(3))]
    settings = Settings(run_directory=str(bench.root / "run"))
    with hpstore.create(paths, data=2, parity=1, config=bench.toml, settings=settings) as pool:
        try:
            for number in range(8):
                pool.put(f"x/{number}", DATA)
            faulty.behave(FaultRule(operations=("flush",), error=errno.ECONNABORTED))
            for number in range(8):
                assert pool.get(f"x/{number}") == DATA
                assert pool.put(f"y/{number}", DATA).losses_tolerated == 1
            for number in range(8):
                assert pool.get(f"y/{number}") == DATA
        finally:
            faulty.behave()
    shutil.rmtree(paths[0])


def test_bit_flipped_on_the_device_is_read_from_the_file(make_disks: MakeDisks) -> None:
    """One bit, below the file system; flipped again it is as before."""
    (disk,) = make_disks(1)
    file = Path(disk.path, "file")
    fd = os.open(file, os.O_WRONLY | os.O_CREAT)
    os.write(fd, DATA)
    os.fsync(fd)
    os.close(fd)
    for expected in (DATA[9000] ^ 0x10, DATA[9000]):
        disk.flip(file, 9000)
        found = file.read_bytes()
        assert found[9000] == expected
        assert found[:9000] + found[9001:] == DATA[:9000] + DATA[9001:]


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_file_system_that_was_shut_down_is_mounted_anew(kind: Kind, tmp_path: Path) -> None:
    """Nothing can be asked of an XFS then, not even whether it is a mount point."""
    problem = loop_mounts_problem(kind)
    if problem is not None:
        pytest.skip(problem)
    with LoopFilesystem(tmp_path, kind=kind) as disk:
        Path(disk.path, "file").write_bytes(DATA)
        run("sync", "-f", disk.path)
        disk.shutdown()
        assert disk.mounted
        with pytest.raises(OSError, match="Input/output error"):
            Path(disk.path, "other").write_bytes(DATA)
        disk.remount()
        assert Path(disk.path, "file").read_bytes() == DATA
        disk.unmount()
        assert not disk.mounted


def test_throttled_device_hangs_until_it_is_relieved(make_disks: MakeDisks) -> None:
    """At one byte a second a synced write does not end; then it does."""
    problem = throttle_problem()
    if problem is not None:
        pytest.skip(problem)
    (disk,) = make_disks(1)

    def write() -> None:
        fd = os.open(f"{disk.path}/file", os.O_WRONLY | os.O_CREAT)
        os.write(fd, DATA)
        os.fsync(fd)
        os.close(fd)

    disk.throttle(HANGING)
    try:
        waiting = Call(write)
        assert not waiting.ended(0.3)
    finally:
        disk.throttle(0)
    assert waiting.ended(30.0)
    waiting.result()


def test_a_disk_comes_back_as_another_device_while_its_old_files_are_open(
    make_disks: MakeDisks,
) -> None:
    """Synced bytes are there under the same path; the old file has errors, its device goes last."""
    (disk,) = make_disks(1)
    path, old = Path(disk.path, "file"), disk.loop
    path.write_bytes(DATA)
    os.sync()
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    disk.shutdown()
    with pytest.raises(OSError, match="busy"):
        disk.unmount()
    disk.replug()
    assert disk.loop != old
    assert path.read_bytes() == DATA
    path.write_bytes(DATA[::-1])
    with pytest.raises(OSError, match="Input/output"):
        os.preadv(fd, [mmap.mmap(-1, 4096)], 0)
    os.close(fd)
    poll(30.0, lambda: old not in loops())
    assert path.read_bytes() == DATA[::-1]


def test_a_limit_of_calls_slows_small_ones_that_a_limit_of_bytes_does_not(
    make_disks: MakeDisks,
) -> None:
    """Three reads of 4 KiB, far below 1 MiB a second; at 4 calls a second they wait."""
    problem = throttle_problem()
    if problem is not None:
        pytest.skip(problem)
    (disk,) = make_disks(1)
    path = Path(disk.path, "file")
    path.write_bytes(bytes(64 * KIB))
    os.sync()

    def seconds() -> float:
        began, page = time.monotonic(), mmap.mmap(-1, 4096)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        for number in range(3):
            os.preadv(fd, [page], 4096 * number)
        os.close(fd)
        return time.monotonic() - began

    disk.throttle(MIB)
    quick = seconds()
    disk.throttle(0, calls_per_second=4)
    try:
        assert seconds() > quick + 0.2
    finally:
        disk.throttle(0)


def test_what_a_killed_process_left_is_swept_and_nothing_else(
    make_disks: MakeDisks, fuse: None, tmp_path: Path
) -> None:
    """SIGKILL a process with a loop file system and one on FUSE; one sweep removes both."""
    (mine,) = make_disks(1)
    theirs = tmp_path / "theirs"
    theirs.mkdir()

    def child() -> None:
        disk = LoopFilesystem(theirs, size_bytes=16 * MIB).__enter__()
        FaultFilesystem(disk.path, theirs).__enter__()
        os.kill(os.getpid(), signal.SIGKILL)

    with forked(child) as pid:
        assert exit_status(pid, 60.0) == -signal.SIGKILL
    left = [path for path in mount_points() if path.startswith(str(theirs))]
    assert left  # the FUSE server unmounts by itself when its input ends
    assert all(owner_is_dead(path) for path in left)
    assert left[0] in sweep()
    assert not [path for path in mount_points() if path.startswith(str(theirs))]
    poll(30.0, lambda: not [i for i in loops().values() if i.startswith(str(theirs))])
    assert not list(theirs.glob("*/image"))
    assert mine.mounted
    assert not owner_is_dead(scratch_directory(tmp_path))
    assert not owner_is_dead("/mnt/elsewhere")


def test_children_of_a_killed_test_end_with_it() -> None:
    """SIGKILL a process that has forked: the end of a pipe that only the grandchild has closes."""
    reading, writing = os.pipe()

    def grandchild() -> None:
        os.write(writing, b"x")
        signal.pause()

    def child() -> None:
        with forked(grandchild):
            os.close(writing)
            signal.pause()

    with forked(child) as pid:
        os.close(writing)
        assert os.read(reading, 1) == b"x"
        os.kill(pid, signal.SIGKILL)
        assert select.select([reading], [], [], 30.0)[0]
        assert os.read(reading, 1) == b""
    os.close(reading)
