"""Eight ext4 file systems on loop devices with a 4+2 pool over them, and how each is broken."""

from __future__ import annotations

import contextlib
import os
import random
from contextlib import ExitStack
from pathlib import Path

import hpstore
from hpstore.config import Settings
from hpstore.runtime.closing import Closing
from hpstore.testing.loopfs import HANGING, LoopFilesystem
from hpstore.units import KIB, MIB
from tests.fault.soak.load import write_data_set
from tests.fault.soak.schedule import DEVICES, Event

DATA, PARITY = 4, 2
DISK_BYTES = 320 * MIB
SLOW_BYTES_PER_SECOND = MIB
FLIPS = 6  # columns that one flip of bits hits
GRACE_SECONDS, REMOVED_SECONDS = 8.0, 1.0
SETTINGS = Settings(
    memory_bytes=64 * MIB,
    device_deadline_seconds=8.0,
    open_deadline_seconds=4.0,
    straggler_seconds=3.0,
    lock_deadline_seconds=20.0,
    put_deadline_seconds=120.0,
    tombstone_seconds=180.0,
)
AGENT = f"""
[agent]
tick_seconds = 0.5
probe_seconds = 2.0
survey_seconds = 5.0
scrub_days = {60 / 86_400}
smart_hours = 0.0

[agent.policy]
removed_seconds = {REMOVED_SECONDS}
grace_seconds = {GRACE_SECONDS}
return_seconds = 2.0
retry_seconds = 5.0
probation_seconds = 2.0
release_seconds = 10.0
sitout_seconds = 20.0
fault_quiet_seconds = 10.0
removal_seconds = 10.0
removals_per_hour_ratio = 1.0
changes_per_hour = 1000
"""


class Node(Closing):
    """The disks and their pool. Always cleans up; what hangs or is slow is relieved first."""

    def __init__(self, root: Path) -> None:
        self.root, self.toml = root, root / "pool.toml"
        self.disks: list[LoopFilesystem] = []
        self.problems: list[str] = []
        self._stack = ExitStack()
        with ExitStack() as undo:
            undo.callback(self.close)
            for _ in range(DEVICES):
                disk = LoopFilesystem(root, size_bytes=DISK_BYTES)
                self.disks.append(self._stack.enter_context(disk))
            self.paths = [disk.path for disk in self.disks]
            with hpstore.create(
                self.paths,
                data=DATA,
                parity=PARITY,
                config=self.toml,
                unit_bytes=128 * KIB,
            ) as pool:
                write_data_set(pool)
                self.pool_id = pool.admin.record.pool_id
            self._configure()
            undo.pop_all()

    def _configure(self) -> None:
        """Short deadlines from here on: making the pool may take its time."""
        lines = [f"run_directory = '{self.root / 'run'}'"]
        plain = Settings()
        for name in SETTINGS.__dataclass_fields__:
            value = getattr(SETTINGS, name)
            if value != getattr(plain, name):
                lines.append(f"{name} = {value}")
        text = self.toml.read_text()
        assert "[settings]" not in text
        self.toml.write_text("\n".join([text, "[settings]", *lines, AGENT]))

    def break_device(self, number: int, event: Event) -> str:
        """Begin a fault that needs no operator; what else is to be noted of it."""
        disk = self.disks[number]
        match event.fault:
            case "pull":
                disk.shutdown()
            case "unmount":
                disk.lazy_unmount()
            case "slow":
                disk.throttle(SLOW_BYTES_PER_SECOND)
            case "hang":
                disk.throttle(HANGING)
            case "fill":
                disk.fill()
            case "flip":
                return f"{self._flip(disk, random.Random(event.seed))} bits"
        return ""

    def lift(self, number: int, fault: str) -> None:
        """End it."""
        disk = self.disks[number]
        match fault:
            case "pull":
                disk.replug()
            case "unmount":
                if left := os.listdir(disk.path):
                    self.problems.append(f"written into the parent file system: {left[:3]}")
                disk.mount()
            case "slow" | "hang":
                disk.throttle(0)
            case "fill":
                disk.release()

    def _flip(self, disk: LoopFilesystem, rng: random.Random) -> int:
        """One bit of some columns; of those that are still there."""
        # os.walk, not Path.glob: directories go while it looks
        tops = os.walk(Path(disk.path, "objects"))
        files = sorted(
            Path(top, name) for top, _, names in tops for name in names if name[0] == "@"
        )
        flipped = 0
        for file in rng.sample(files, min(FLIPS, len(files))):
            with contextlib.suppress(OSError):  # removed meanwhile, or a hole
                disk.flip(file, rng.randrange(file.stat().st_size))
                flipped += 1
        return flipped

    def relieve(self) -> None:
        """Let every call that hangs or is slow go on. Never raises."""
        for disk in self.disks:
            with contextlib.suppress(OSError):
                disk.throttle(0)

    def close(self) -> None:
        """Relieve, unmount, remove. Idempotent."""
        self.relieve()
        self._stack.close()
