"""The table of faults: what is done to a device, and how it ends."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import hpstore
from hpstore.buffers import aligned_array
from hpstore.config import Settings
from hpstore.pool import Pool
from hpstore.testing.faultfs import Rule, fuse_problem
from hpstore.testing.leftovers import run, throttle_problem
from hpstore.testing.loopfs import HANGING, Kind, loop_mounts_problem
from hpstore.units import MIB
from tests.fault.common import tree
from tests.fault.suite.rig import Healed, Rig, heal

SLOW_BYTES_PER_SECOND = 4 * MIB
SAMPLE_BYTES = MIB  # of a device that should be slow
DELAY_SECONDS = 0.05
FLAPS = 4
IO = ("read", "write", "fsync")
COLUMNS = "/objects/"  # where columns lie, by backing path


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One row of the suite.

    `script` breaks something; at each yield work goes on for a while. Then, while training goes on,
    the devices of `evict` are given up and rebuilt, and `lift` ends the fault. When training is
    over, `back` brings the device back, or another one. `seen`: somebody must notice by himself;
    else it is for a scrub (`scrub`), or for an agent that there is none of here.
    """

    name: str
    method: str
    script: Callable[[Rig], Iterator[None]]
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


# --- breaking -------------------------------------------------------------------------------


def shutdown(*numbers: int) -> Callable[[Rig], Iterator[None]]:
    """EIO on everything, as after a power cut of these devices."""

    def script(rig: Rig) -> Iterator[None]:
        for number in numbers:
            rig.disks[number].shutdown()
        yield

    return script


def yank(rig: Rig) -> Iterator[None]:
    rig.disks[0].yank()
    yield


def kill_server(rig: Rig) -> Iterator[None]:
    rig.faulty.kill()
    yield


def lazy_unmount(rig: Rig) -> Iterator[None]:
    rig.disks[0].lazy_unmount()
    yield
    assert os.listdir(rig.paths[0]) == [], "something was written into the parent file system"


def wipe(rig: Rig) -> Iterator[None]:
    for entry in os.scandir(rig.paths[0]):
        if entry.is_dir():
            shutil.rmtree(entry.path, ignore_errors=True)
        else:
            os.unlink(entry.path)
    yield
    left = [name for name in os.listdir(rig.paths[0]) if name.endswith(".json")]
    assert not left, f"a wiped device was taken back: {left}"


def foreign(rig: Rig) -> Iterator[None]:
    other = rig.extra_disk()
    beside = rig.root / "beside"
    beside.mkdir()
    theirs = Settings(run_directory=str(rig.root / "run"))
    with hpstore.create(
        [other.path, str(beside)], data=1, parity=1, config=rig.root / "other.toml", settings=theirs
    ) as pool:
        pool.put("theirs", b"x" * MIB)
    before = tree(other.path)
    rig.disks[0].lazy_unmount()
    run("mount", other.loop, rig.paths[0])
    yield
    changed = {k for k, v in tree(other.path).items() if before.get(k) != v}
    assert not {k for k in changed if not k.startswith("tmp")}, f"written to: {sorted(changed)}"


def read_only(rig: Rig) -> Iterator[None]:
    rig.disks[0].read_only()
    yield


def full(rig: Rig) -> Iterator[None]:
    rig.disks[0].fill()
    yield


def flip_columns(rig: Rig) -> Iterator[None]:
    for file in rig.columns(rig.disks[0]):
        rig.disks[0].flip(file, 4096 + 700)
    yield


def misbehave(*rules: Rule) -> Callable[[Rig], Iterator[None]]:
    """Faults by FUSE, of device 0."""

    def script(rig: Rig) -> Iterator[None]:
        before = rig.faulty.behave(*rules)
        yield
        assert rig.faulty.behave(*rules) > before, "no call met the fault"

    return script


def hang_calls(rig: Rig) -> Iterator[None]:
    rig.silent.add(rig.paths[0])
    rig.faulty.behave(Rule(operations=IO, hang=True))
    yield


def flap(rig: Rig) -> Iterator[None]:
    for _ in range(FLAPS):
        rig.faulty.behave(Rule(error=errno.EIO))
        yield
        rig.faulty.behave()
        yield


def hang(rig: Rig) -> Iterator[None]:
    rig.silent.add(rig.paths[0])
    rig.disks[0].throttle(HANGING)
    yield


def throttled(bytes_per_second: int) -> Callable[[Rig], Iterator[None]]:
    """Slow, below the file system."""

    def script(rig: Rig) -> Iterator[None]:
        rig.disks[0].throttle(bytes_per_second)
        yield
        least = SAMPLE_BYTES / bytes_per_second / 2  # a moment's worth passes at once
        assert write_seconds(rig.disks[0].path, SAMPLE_BYTES) > least, "the device was not slow"

    return script


def write_seconds(path: str, nbytes: int) -> float:
    """How long a write past the page cache takes on a device."""
    name = f"{path}/tmp/sample"
    file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
    try:
        began = time.monotonic()
        os.write(file, aligned_array(nbytes).data)
        return time.monotonic() - began
    finally:
        os.close(file)
        os.unlink(name)


# --- ending ---------------------------------------------------------------------------------


def release(rig: Rig) -> None:
    rig.disks[0].release()


def restart_server(rig: Rig) -> None:
    rig.faulty.start()


def remount_all(rig: Rig) -> None:
    """Those that still work, too: it costs them nothing."""
    for disk in rig.disks:
        disk.remount()


def readmit(
    *numbers: int, after: Callable[[Rig], None] | None = None
) -> Callable[[Rig, Healed], None]:
    """Devices that were evicted and work again: mounted anew, taken back, filled."""

    def back(rig: Rig, healed: Healed) -> None:
        if after is not None:
            after(rig)
        for number in numbers:
            heal(rig, healed, lambda pool, n=number: pool.readmit(rig.paths[n]))  # type: ignore[misc]
        heal(rig, healed, Pool.rebuild)

    return back


def remount(rig: Rig, healed: Healed) -> None:
    """A member that was away: mounted again, brought up to date."""
    rig.disks[0].remount()
    heal(rig, healed, Pool.rebuild)


def replace(rig: Rig, healed: Healed) -> None:
    """A new disk instead of one that is gone for good."""
    rig.paths[0] = rig.extra_disk(like_others=True).path
    heal(rig, healed, lambda pool: pool.add_device(rig.paths[0]))
    heal(rig, healed, Pool.rebuild)


def add_wiped(rig: Rig, healed: Healed) -> None:
    """The wiped disk, as a new device."""
    for entry in Path(rig.paths[0]).iterdir():
        shutil.rmtree(entry)
    heal(rig, healed, lambda pool: pool.add_device(rig.paths[0]))
    heal(rig, healed, Pool.rebuild)


FAULTS = (
    Fault(name="shutdown", method="ioctl 0x8004587d, power cut", script=shutdown(0), evict=(0,),
          back=readmit(0, after=remount_all)),
    Fault(name="shutdown, XFS", method="the same on XFS", script=shutdown(0), evict=(0,),
          back=readmit(0, after=remount_all), kind="xfs"),
    Fault(name="two shut down", method="the same, m devices at once", script=shutdown(0, 1),
          evict=(0, 1), back=readmit(0, 1, after=remount_all)),
    Fault(name="backing vanished", method="truncate, losetup -c", script=yank, evict=(0,),
          back=replace),
    Fault(name="server killed", method="SIGKILL of the FUSE server: ENOTCONN", script=kill_server,
          evict=(0,), back=readmit(0, after=restart_server), fuse=True),
    Fault(name="lazy unmount", method="umount -l", script=lazy_unmount, back=remount),
    Fault(name="wiped", method="rm -r of all that is on it", script=wipe, evict=(0,),
          back=add_wiped),
    Fault(name="foreign", method="a device of another pool mounted in its place", script=foreign,
          back=remount),
    Fault(name="read-only", method="trigger_fs_error", script=read_only, back=remount),
    Fault(name="full", method="fallocate until ENOSPC", script=full, lift=release),
    Fault(name="EIO, 1 in 5", method="FUSE: reads, writes and fsyncs", fuse=True, lift=Rig.relieve,
          script=misbehave(Rule(operations=IO, error=errno.EIO, probability=0.2))),
    Fault(name="flipped at rest", method="a bit of each column, on the device below ext4",
          script=flip_columns, scrub=True),
    Fault(name="flipped on read", method="FUSE: a bit of 1 in 5 reads", fuse=True, lift=Rig.relieve,
          script=misbehave(Rule(operations=("read",), path=COLUMNS, flip=True, probability=0.2)),
          scrub=True),
    Fault(name="flipped on write", method="FUSE: a bit of 3 in 10 writes", fuse=True, seen=False,
          lift=Rig.relieve, scrub=True,
          script=misbehave(Rule(operations=("write",), flip=True, probability=0.3))),
    Fault(name="dropped writes", method="FUSE: 3 in 10 say done, are not", fuse=True, seen=False,
          lift=Rig.relieve, scrub=True,
          script=misbehave(Rule(operations=("write",), drop=True, probability=0.3))),
    Fault(name="slow", method="blkio throttle, 4 MiB/s", seen=False, throttles=True,
          script=throttled(SLOW_BYTES_PER_SECOND), lift=Rig.relieve),
    Fault(name="slow calls", method="FUSE: 50 ms a read, write or fsync", fuse=True, seen=False,
          script=misbehave(Rule(operations=IO, delay_seconds=DELAY_SECONDS)), lift=Rig.relieve),
    Fault(name="hang", method="blkio throttle, 1 byte/s", throttles=True, script=hang, hangs=True,
          evict=(0,), lift=Rig.relieve, back=readmit(0)),
    Fault(name="hanging calls", method="FUSE: reads, writes and fsyncs never end", fuse=True,
          script=hang_calls, hangs=True, evict=(0,),
          lift=Rig.relieve, back=readmit(0)),
    Fault(name="flapping", method="FUSE: EIO on everything, four times on and off", fuse=True,
          script=flap),
)  # fmt: skip

__all__ = ["FAULTS", "Fault"]
