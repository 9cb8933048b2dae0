"""A pool on real devices that can be broken, and how its state is told from outside."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import hpstore
from hpstore.config import Settings
from hpstore.maintenance.rebuild import RebuildReport
from hpstore.pool.pool import Pool
from hpstore.runtime.closing import Closing
from hpstore.testing.faultfs import FaultFilesystem
from hpstore.testing.loopfs import Kind, LoopFilesystem
from hpstore.units import KIB, MIB
from tests.fault.suite.workload import DECIDED, PROBE, Reader, fill

DEVICES, DATA, PARITY = 6, 3, 2
UNIT_BYTES = 128 * KIB
SHORT = Settings(  # where a device hangs: elsewhere, a busy machine must not look like that
    device_deadline_seconds=4.0,
    straggler_seconds=2.0,
    open_deadline_seconds=2.0,
    lock_deadline_seconds=20.0,
)
FULL_SHARE = 0.01  # free space below which a device takes nothing new


class Rig(Closing):
    """Six loop devices with a 3+2 pool; the first may be seen through FUSE. Always cleans up."""

    def __init__(
        self,
        root: Path,
        *,
        size_bytes: int = 256 * MIB,
        kind: Kind = "ext4",
        fuse: bool = False,
        hangs: bool = False,
    ) -> None:
        self.root, self.toml = root, root / "pool.toml"
        self._stack = ExitStack()
        self._faulty: FaultFilesystem | None = None
        self.disks: list[LoopFilesystem] = []
        self.extras: list[LoopFilesystem] = []
        self.silent: set[str] = set()  # paths where a call would hang
        with ExitStack() as undo:
            undo.callback(self.close)
            for _ in range(DEVICES):
                disk = LoopFilesystem(root, size_bytes=size_bytes, kind=kind)
                self.disks.append(self._stack.enter_context(disk))
            if fuse:
                faulty = FaultFilesystem(self.disks[0].path, root)
                self._faulty = self._stack.enter_context(faulty)
            self.paths = [disk.path for disk in self.disks]
            if self._faulty is not None:
                self.paths[0] = self._faulty.path
            settings = replace(SHORT if hangs else Settings(), run_directory=str(root / "run"))
            with hpstore.create(
                self.paths,
                data=DATA,
                parity=PARITY,
                config=self.toml,
                settings=settings,
                unit_bytes=UNIT_BYTES,
            ) as pool:
                fill(pool)
            undo.pop_all()

    @property
    def faulty(self) -> FaultFilesystem:
        """The FUSE file system of device 0; only with `fuse`."""
        assert self._faulty is not None
        return self._faulty

    def extra_disk(self, *, like_others: bool = False) -> LoopFilesystem:
        """One more device, in no pool."""
        size = self.disks[0].size_bytes if like_others else 64 * MIB
        extra = self._stack.enter_context(LoopFilesystem(self.root, size_bytes=size))
        self.extras.append(extra)
        return extra

    def relieve(self) -> None:
        """Let every call that hangs or is slow go on, whatever was done before. Never raises."""
        for disk in self.disks:
            with contextlib.suppress(OSError):
                disk.throttle(0)
        if self._faulty is not None and self._faulty.serving:
            with contextlib.suppress(OSError):
                self._faulty.behave()
        self.silent.clear()

    def columns(self, disk: LoopFilesystem, prefix: str = PROBE) -> list[Path]:
        """Files of objects on a device: of those that are read, or of those at rest."""
        found = sorted(Path(disk.path, "objects", prefix).glob("*/@*"))
        assert found, f"{disk.path} has no columns to damage"
        return found

    def files(self) -> dict[tuple[str, int], int]:
        """Size of every column file, by path and inode; of devices that answer."""
        found = {}
        for path in set(self.paths) - self.silent:
            for directory, _, names in os.walk(f"{path}/objects"):
                for name in names:
                    file = f"{directory}/{name}"
                    with contextlib.suppress(OSError):  # removed meanwhile
                        status = os.lstat(file)
                        found[(file, status.st_ino)] = status.st_size
        return found

    def close(self) -> None:
        """Relieve, unmount, remove. Idempotent."""
        self.relieve()
        self._stack.close()


# --- looking --------------------------------------------------------------------------------

Observer = Callable[[], str]  # what it sees of a fault; "" for nothing


def status_observer(rig: Rig) -> Observer:
    """What a fresh process is told by `status`, as an operator asks for it: states and space."""

    def look() -> str:
        try:
            with hpstore.open(rig.toml) as pool:
                for device in pool.status().devices:
                    if device.state != "online":
                        return f"status: {device.state}"
                    if device.problem:
                        return "status: problem"
                    if device.free_bytes < FULL_SHARE * device.total_bytes:
                        return "status: full"
        except hpstore.errors.DeviceReadOnly:
            return "status: read-only"
        return ""

    return look


def reader_observer(reader: Reader) -> Observer:
    """What a process that reads counts by itself, and how it judges devices."""
    before, judged = dict(reader.counters()), set(reader.states())

    def look() -> str:
        for state in set(reader.states()) - judged:
            return f"reads: {state}"
        more = {
            name: value for name, value in reader.counters().items() if value > before.get(name, 0)
        }
        for name in more:  # not reads that were decoded: a spare for a late read is, in good times
            if name != DECIDED:
                return "reads: " + name.removesuffix("_total").replace("_", " ")
        return ""

    return look


@dataclass(kw_only=True)
class Detection:
    """When a fault was first seen, and by whom."""

    began: float
    observers: list[Observer]
    seconds: float | None = None
    by: str = ""

    def look(self) -> bool:
        """Ask all observers, unless one has seen it; whether it was seen."""
        for observer in self.observers:
            if self.by:
                break
            self.by = observer()
            if self.by:
                self.seconds = time.monotonic() - self.began
        return bool(self.by)

    def seen_by(self, what: str) -> None:
        """Somebody else saw it now, for example a scrub."""
        if not self.by:
            self.by, self.seconds = what, time.monotonic() - self.began


# --- healing --------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Healed:
    """What healing wrote."""

    columns: int = 0
    bytes: int = 0
    damaged: int = 0
    reports: list[RebuildReport] = field(default_factory=list)


def heal(rig: Rig, healed: Healed, act: Callable[[Pool], object]) -> None:
    """Open the pool, do something that may heal, add up new files of objects that were there."""
    before = rig.files()
    objects = {
        str(Path(path).parent.relative_to(root))
        for path, _ in before
        for root in rig.paths
        if path.startswith(f"{root}/")
    }
    with hpstore.open(rig.toml) as pool:
        report = act(pool)
    if isinstance(report, RebuildReport):
        healed.reports.append(report)
        healed.columns += report.columns_written
        healed.damaged += report.damaged_columns
    for (path, inode), size in rig.files().items():
        root = next(root for root in rig.paths if path.startswith(f"{root}/"))
        if (path, inode) not in before and str(Path(path).parent.relative_to(root)) in objects:
            healed.bytes += size


def problems(pool: Pool, *, devices: int = DEVICES) -> list[str]:
    """Everything that is not as good as new."""
    status = pool.status()
    online = sum(device.state == "online" for device in status.devices)
    counts = {
        "degraded": status.degraded,
        "unreadable": status.unreadable,
        "in debt": status.debts,
    }
    found = [f"{count} objects {what}" for what, count in counts.items() if count]
    if status.losses_tolerated != PARITY:
        found.append(f"{status.losses_tolerated} more devices may be lost, not {PARITY}")
    if online != devices:
        found.append(f"{online} devices are online, not {devices}")
    report = pool.scrub(resume=False)
    if not report.clean:
        found.append(
            f"the last scrub: {report.damaged_columns} damaged, {report.columns_written} written, "
            f"unreadable {sorted(report.unreadable)}, not healed {sorted(report.failed)}"
        )
    return found
