"""Scratch directories of fault tests that name their owner, and the sweep of a dead one's mounts.

A test process that is killed leaves mounts, loop devices and throttles behind. The name of the
directory holds process and start time, so the next run knows which ones have no owner any more.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from hpstore.runtime.process_identity import started

_NAME = re.compile(r"hpfault-(\d+)-(\d+)-[^/]+")
_BLKIO = Path("/sys/fs/cgroup/blkio")
_LIMITS = ("read_bps", "write_bps", "read_iops", "write_iops")
_MOUNTS_OVER_MOUNTS = 8
_LOSETUP_TRIES = 10


def scratch_directory(parent: str | os.PathLike[str]) -> str:
    """A new directory of this process."""
    pid = os.getpid()
    return tempfile.mkdtemp(prefix=f"hpfault-{pid}-{started(pid)}-", dir=os.fspath(parent))


def owner_is_dead(path: str) -> bool:
    """Whether a path lies in a scratch directory whose process is gone."""
    found = _NAME.search(path)
    return found is not None and started(int(found[1])) != found[2]


def run(*command: str) -> str:
    """Output of a command; OSError (EBUSY, else EIO) with what it said when it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        number = errno.EBUSY if "busy" in done.stderr else errno.EIO
        raise OSError(number, f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout.strip()


def fails(*command: str) -> bool:
    """Whether a command does."""
    try:
        run(*command)
    except OSError:
        return True
    return False


def mount_points() -> list[str]:
    """All of this machine, in the order in which they were mounted."""
    lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    return [line.split()[4].replace("\\040", " ") for line in lines]


def unmounted(path: str) -> bool:
    """Unmount everything at `path`, lazily where it is busy; whether nothing is mounted there."""
    for _ in range(_MOUNTS_OVER_MOUNTS):
        if path not in mount_points():  # os.path.ismount is wrong where the server is dead
            return True
        if fails("umount", path):
            fails("umount", "-l", path)
    return path not in mount_points()


def attach(image: str, *flags: str) -> str:
    """A loop device on an image; again when another process took the free one."""
    for _ in range(_LOSETUP_TRIES - 1):
        with contextlib.suppress(OSError):
            return run("losetup", "--show", "-f", *flags, image)
    return run("losetup", "--show", "-f", *flags, image)


def loops() -> dict[str, str]:
    """Image file by loop device."""
    found = {}
    for block in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            found[f"/dev/{block.parts[3]}"] = block.read_text().strip()
        except OSError:
            continue  # detached meanwhile
    return found


def throttle_problem() -> str | None:
    """Why a device cannot be throttled here, or None."""
    if not os.access(_BLKIO / "blkio.throttle.read_bps_device", os.W_OK):
        return "needs the blkio controller of cgroup v1"
    return None


def throttle(loop: str, bytes_per_second: int, calls_per_second: int = 0) -> None:
    """Limit reads and writes of a loop device, each; 0 lifts a limit. For all processes."""
    number = Path(f"/sys/block/{os.path.basename(loop)}/dev").read_text(encoding="utf-8").strip()
    for limit in _LIMITS:
        value = bytes_per_second if limit.endswith("bps") else calls_per_second
        (_BLKIO / f"blkio.throttle.{limit}_device").write_text(f"{number} {value}")


def sweep() -> list[str]:
    """Undo what dead test processes left: limits, mounts, loop devices, images; what it was."""
    swept, tops = [], set()
    left = {loop: image for loop, image in loops().items() if owner_is_dead(image)}
    if throttle_problem() is None:
        for loop in left:
            throttle(loop, 0)
    for path in reversed(mount_points()):
        if owner_is_dead(path) and unmounted(path):
            swept.append(path)
            tops.add(_top(path))
    for loop, image in left.items():
        if not fails("losetup", "-d", loop):
            swept.append(f"{loop} on {image}")
        tops.add(_top(image))
    for top in tops:
        if not any(point.startswith(f"{top}/") for point in mount_points()):
            shutil.rmtree(top, ignore_errors=True)
    return swept


def _top(path: str) -> str:
    found = _NAME.search(path)
    assert found is not None
    return path[: found.end()]
