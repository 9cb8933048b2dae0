"""The table of faults: what is done to a device, and how it ends."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

import hpstore
from hpstore.config import Settings
from hpstore.maintenance.rebuild import RebuildReport
from hpstore.pool.pool import Pool
from hpstore.testing.faultfs import fuse_problem
from hpstore.testing.fuse import FaultRule
from hpstore.testing.loopfs import HANGING, Kind, loop_mounts_problem
from hpstore.testing.scratch import run, throttle_problem
from hpstore.units import MIB
from tests.fault.common import Call, poll, tree
from tests.fault.suite.rig import Healed, Rig, heal

SLOW_BYTES_PER_SECOND = MIB  # less than the reader asks of each device
DELAY_SECONDS = 0.05
FLAPS, WIPE_SECONDS, HANG_SECONDS = 4, 30.0, 0.5
IO = ("read", "write", "fsync")
COLUMNS = "/objects/"  # where columns lie, by backing path


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One row of the suite.

    `prepare` does what takes time and harms nothing. `script` breaks something and proves that it
    is broken; at each yield work goes on for a while. Then, while training goes on, the devices of
    `evict` are given up and rebuilt, and `lift` ends the fault. When training is over, `back`
    brings the device back, or another one. `seen`: a process must notice by itself; else it is for
    a scrub (`scrub`).
    """

    name: str
    method: str
    script: Callable[[Rig], Iterator[None]]
    prepare: Callable[[Rig], None] | None = None
    evict: tuple[int, ...] = ()
    lift: Callable[[Rig], None] | None = None
    back: Callable[[Rig, Healed], None] | None = None
    fuse: bool = False
    throttles: bool = False
    hangs: bool = False
    kind: Kind = "ext4"
    seen: bool = True
    scrub: bool = False

    def problem(self) -> str | None:
        """Why it cannot be run here, or None."""
        found = loop_mounts_problem(self.kind)
        if found is None and self.fuse:
            found = fuse_problem()
        if found is None and self.throttles:
            found = throttle_problem()
        return found


# --- proofs ---------------------------------------------------------------------------------


def refused(root: str, expected: int) -> None:
    """A new file cannot be written there now, with this errno."""
    with pytest.raises(OSError) as caught:
        write_proof(root, MIB)
    assert caught.value.errno == expected, f"the fault gives {caught.value}"


def write_proof(root: str, nbytes: int) -> None:
    """Allocate, write and sync a file, and remove it."""
    path = f"{root}/.proof"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        os.posix_fallocate(fd, 0, nbytes)
        os.write(fd, bytes(nbytes))
        os.fsync(fd)
    finally:
        os.close(fd)
        with contextlib.suppress(OSError):  # what has ended the write ends this too
            os.unlink(path)


@contextlib.contextmanager
def hanging(call: Callable[[], object]) -> Iterator[None]:
    """All through the block `call` does not end. Its thread goes on when the fault is lifted."""
    waiting = Call(call)
    yield
    assert not waiting.ended(HANG_SECONDS), "the device has answered"


# --- breaking -------------------------------------------------------------------------------


def shutdown(*numbers: int) -> Callable[[Rig], Iterator[None]]:
    """EIO on everything, as after a power cut of these devices."""

    def script(rig: Rig) -> Iterator[None]:
        for number in numbers:
            rig.disks[number].shutdown()
            refused(rig.paths[number], errno.EIO)
        yield

    return script


def yank(rig: Rig) -> Iterator[None]:
    rig.disks[0].yank()
    fd = os.open(rig.disks[0].loop, os.O_RDONLY)
    left = os.lseek(fd, 0, os.SEEK_END)
    os.close(fd)
    assert left < rig.disks[0].size_bytes, "the device has kept its size"
    yield


def kill_server(rig: Rig) -> Iterator[None]:
    rig.faulty.kill()
    refused(rig.paths[0], errno.ENOTCONN)
    yield


def lazy_unmount(rig: Rig) -> Iterator[None]:
    rig.disks[0].lazy_unmount()
    yield
    assert os.listdir(rig.paths[0]) == [], "something was written into the parent file system"


def wipe(rig: Rig) -> Iterator[None]:
    poll(WIPE_SECONDS, lambda: wiped(rig.paths[0]))
    yield
    left = [name for name in os.listdir(rig.paths[0]) if name.endswith(".json")]
    assert not left, f"a wiped device was taken back: {left}"


def wiped(root: str) -> bool:
    """Remove everything; whether it is empty now. Others may be at work in it."""
    for entry in os.scandir(root):
        if entry.is_dir():
            shutil.rmtree(entry.path, ignore_errors=True)
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(entry.path)
    return not os.listdir(root)


def make_other_pool(rig: Rig) -> None:
    beside = rig.root / "beside"
    beside.mkdir()
    theirs = Settings(run_directory=str(rig.root / "run"))
    paths = [rig.extra_disk().path, str(beside)]
    with hpstore.create(
        paths, data=1, parity=1, config=rig.root / "other.toml", settings=theirs
    ) as pool:
        pool.put("theirs", b"x" * MIB)


def foreign(rig: Rig) -> Iterator[None]:
    (other,) = rig.extras
    before = tree(other.path)
    rig.disks[0].lazy_unmount()
    run("mount", other.loop, rig.paths[0])
    yield
    changed = {k for k, v in tree(other.path).items() if before.get(k) != v}
    assert not {k for k in changed if not k.startswith("tmp")}, f"written to: {sorted(changed)}"


def read_only(rig: Rig) -> Iterator[None]:
    rig.disks[0].read_only()
    refused(rig.paths[0], errno.EROFS)
    yield


def full(rig: Rig) -> Iterator[None]:
    rig.disks[0].fill()
    refused(rig.paths[0], errno.ENOSPC)
    yield


def flip_columns(rig: Rig) -> Iterator[None]:
    for file in rig.columns(rig.disks[0]):
        rig.disks[0].flip(file, 4096 + 700)
    yield


def misbehave(*rules: FaultRule) -> Callable[[Rig], Iterator[None]]:
    """Faults by FUSE, of device 0."""

    def script(rig: Rig) -> Iterator[None]:
        before = rig.faulty.behave(*rules)
        yield
        assert rig.faulty.applied() > before, "no call met the fault"

    return script


def flap(rig: Rig) -> Iterator[None]:
    for _ in range(FLAPS):
        before = rig.faulty.behave(FaultRule(error=errno.EIO))
        yield
        assert rig.faulty.behave() > before, "no call met the fault"
        yield


def hang_calls(rig: Rig) -> Iterator[None]:
    rig.silent.add(rig.paths[0])
    rig.faulty.behave(FaultRule(operations=IO, hang=True))
    with hanging(lambda: write_proof(rig.paths[0], MIB)):
        yield


def hang(rig: Rig) -> Iterator[None]:
    rig.silent.add(rig.paths[0])
    rig.disks[0].throttle(HANGING)
    with hanging(lambda: write_proof(rig.paths[0], MIB)):
        yield


def throttled(bytes_per_second: int) -> Callable[[Rig], Iterator[None]]:
    """Slow, below the file system."""

    def script(rig: Rig) -> Iterator[None]:
        rig.disks[0].throttle(bytes_per_second)
        yield
        began = time.monotonic()
        write_proof(rig.paths[0], bytes_per_second // 2)
        seconds = time.monotonic() - began
        assert seconds > 0.35, f"written in {seconds:.2f} s: nothing is throttled"

    return script


# --- ending ---------------------------------------------------------------------------------


def release(rig: Rig) -> None:
    rig.disks[0].release()


def restart_server(rig: Rig) -> None:
    rig.faulty.start()


def remount_all(rig: Rig) -> None:
    """Those that still work, too: it costs them nothing."""
    for disk in rig.disks:
        disk.remount()


def rebuild_everything(pool: Pool) -> RebuildReport:
    """Also what retention would drop with the next save: training is over, none comes."""
    return pool.rebuild(everything=True)


def readmit(
    *numbers: int, after: Callable[[Rig], None] | None = None
) -> Callable[[Rig, Healed], None]:
    """Devices that were evicted and work again: mounted anew, taken back, filled."""

    def back(rig: Rig, healed: Healed) -> None:
        if after is not None:
            after(rig)
        for number in numbers:
            heal(rig, healed, lambda pool, n=number: pool.readmit(rig.paths[n]))  # type: ignore[misc]
        heal(rig, healed, rebuild_everything)

    return back


def remount(rig: Rig, healed: Healed) -> None:
    """A member that was away: mounted again, brought up to date."""
    rig.disks[0].remount()
    heal(rig, healed, rebuild_everything)


def replace(rig: Rig, healed: Healed) -> None:
    """A new disk instead of one that is gone for good."""
    rig.paths[0] = rig.extra_disk(like_others=True).path
    heal(rig, healed, lambda pool: pool.add_device(rig.paths[0]))
    heal(rig, healed, rebuild_everything)


def add_wiped(rig: Rig, healed: Healed) -> None:
    """The wiped disk, as a new device."""
    assert wiped(rig.paths[0])
    heal(rig, healed, lambda pool: pool.add_device(rig.paths[0]))
    heal(rig, healed, rebuild_everything)


FAULTS = (
    Fault(
        name="shutdown",
        method="ioctl 0x8004587d, power cut",
        script=shutdown(0),
        evict=(0,),
        back=readmit(0, after=remount_all),
    ),
    Fault(
        name="shutdown, XFS",
        method="the same on XFS",
        script=shutdown(0),
        evict=(0,),
        back=readmit(0, after=remount_all),
        kind="xfs",
    ),
    Fault(
        name="two shut down",
        method="the same, m devices at once",
        script=shutdown(0, 1),
        evict=(0, 1),
        back=readmit(0, 1, after=remount_all),
    ),
    Fault(
        name="backing vanished",
        method="truncate, losetup -c",
        script=yank,
        evict=(0,),
        back=replace,
    ),
    Fault(
        name="backing vanished, XFS",
        method="the same on XFS",
        script=yank,
        evict=(0,),
        back=replace,
        kind="xfs",
    ),
    Fault(
        name="server killed",
        method="SIGKILL of the FUSE server: ENOTCONN",
        script=kill_server,
        evict=(0,),
        back=readmit(0, after=restart_server),
        fuse=True,
    ),
    Fault(name="lazy unmount", method="umount -l", script=lazy_unmount, back=remount),
    Fault(
        name="wiped", method="rm -r of all that is on it", script=wipe, evict=(0,), back=add_wiped
    ),
    Fault(
        name="foreign",
        method="a device of another pool mounted in its place",
        script=foreign,
        prepare=make_other_pool,
        back=remount,
    ),
    Fault(name="read-only", method="trigger_fs_error", script=read_only, back=remount),
    Fault(name="full", method="fallocate until ENOSPC", script=full, lift=release),
    Fault(name="full, XFS", method="the same on XFS", script=full, lift=release, kind="xfs"),
    Fault(
        name="no space for writes",
        method="FUSE: ENOSPC where statfs tells of room",
        fuse=True,
        script=misbehave(FaultRule(operations=("write", "fallocate"), error=errno.ENOSPC)),
        lift=Rig.relieve,
    ),
    Fault(
        name="EIO, 1 in 5",
        method="FUSE: reads, writes and fsyncs",
        fuse=True,
        lift=Rig.relieve,
        script=misbehave(FaultRule(operations=IO, error=errno.EIO, probability=0.2)),
    ),
    Fault(
        name="flipped at rest",
        method="a bit of each column, on the device below ext4",
        script=flip_columns,
        scrub=True,
    ),
    Fault(
        name="flipped at rest, XFS",
        method="the same below XFS",
        script=flip_columns,
        scrub=True,
        kind="xfs",
    ),
    Fault(
        name="flipped on read",
        method="FUSE: a bit of 1 in 5 reads",
        fuse=True,
        lift=Rig.relieve,
        script=misbehave(FaultRule(operations=("read",), path=COLUMNS, flip=True, probability=0.2)),
        scrub=True,
    ),
    Fault(
        name="flipped on write",
        method="FUSE: a bit of 3 in 10 writes",
        fuse=True,
        seen=False,
        lift=Rig.relieve,
        scrub=True,
        script=misbehave(FaultRule(operations=("write",), flip=True, probability=0.3)),
    ),
    Fault(
        name="dropped writes",
        method="FUSE: 3 in 10 say done, are not",
        fuse=True,
        seen=False,
        lift=Rig.relieve,
        scrub=True,
        script=misbehave(FaultRule(operations=("write",), drop=True, probability=0.3)),
    ),
    Fault(
        name="slow",
        method="blkio throttle, 1 MiB/s",
        throttles=True,
        script=throttled(SLOW_BYTES_PER_SECOND),
        lift=Rig.relieve,
    ),
    Fault(
        name="slow calls",
        method="FUSE: 50 ms a read, write or fsync",
        fuse=True,
        script=misbehave(FaultRule(operations=IO, delay_seconds=DELAY_SECONDS)),
        lift=Rig.relieve,
    ),
    Fault(
        name="hang",
        method="blkio throttle, 1 byte/s",
        throttles=True,
        script=hang,
        hangs=True,
        evict=(0,),
        lift=Rig.relieve,
        back=readmit(0),
    ),
    Fault(
        name="hanging calls",
        method="FUSE: reads, writes and fsyncs never end",
        fuse=True,
        script=hang_calls,
        hangs=True,
        evict=(0,),
        lift=Rig.relieve,
        back=readmit(0),
    ),
    Fault(
        name="flapping",
        method="FUSE: EIO on everything, four times on and off",
        fuse=True,
        script=flap,
    ),
)
