"""Real filesystems on loop devices that can be made to fail the way disks do. Needs root.

An image file becomes a loop device, the loop device an ext4 or XFS with 4 KiB blocks. Faults act
below the code under test: what it sees is what the kernel answers when power is cut, a disk
vanishes, fills up, turns read-only, gets slow, hangs, or returns other bits than it was given.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import struct
import tempfile
from contextlib import ExitStack
from typing import Literal

from hpstore.runtime.closing import Closing
from hpstore.testing.scratch import (
    attach,
    fails,
    mount_points,
    run,
    scratch_directory,
    throttle,
    unmounted,
)
from hpstore.units import MIB

_GOING_DOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN, _IOR('X', 125, __u32); the same number on XFS
_FLUSH_BUFFERS = 0x1261  # BLKFLSBUF
_FIBMAP = 1  # block of a file -> block of the device; needs root
_BLOCK = 4096
JOURNAL_FLUSHED = 1  # for shutdown(): metadata reaches the disk, data that was not synced does not
POWER_CUT = 2  # for shutdown(): neither does
HANGING = 1  # byte a second, for throttle(): no call ends before the limit is lifted
XFS_MIN_BYTES = 300 * MIB  # mkfs.xfs makes nothing smaller
Kind = Literal["ext4", "xfs"]


class LoopFilesystem(Closing):
    """A filesystem on a loop device, mounted at `path`; a context manager that always cleans up.

    `directory` is where image and mount point are made, in a folder of their own; what a killed
    process leaves there, `leftovers.sweep` removes. `direct`: the image is read and written past
    the page cache, which would otherwise answer for the disk. `inodes` of an ext4: by its size
    unless given. One thread at a time. Not for use in a read-only or unprivileged container:
    `loop_mounts_problem` returns the reason.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        size_bytes: int = 64 * MIB,
        kind: Kind = "ext4",
        direct: bool = False,
        inodes: int = 0,
    ) -> None:
        # as the kernel names it: mounts are found again by that, wherever this process goes
        self._work, self._inodes = scratch_directory(os.path.realpath(directory)), inodes
        self._image, self._kind, self._direct = f"{self._work}/image", kind, direct
        self._throttled = False
        self.path = f"{self._work}/mount"
        self.size_bytes = max(size_bytes, XFS_MIN_BYTES) if kind == "xfs" else size_bytes
        self.loop = ""  # /dev/loopN

    def __enter__(self) -> LoopFilesystem:
        with ExitStack() as undo:
            undo.callback(self.close)
            os.mkdir(self.path)
            with open(self._image, "wb") as image:
                image.truncate(self.size_bytes)
            if self._kind == "ext4":
                few = ("-N", str(self._inodes)) if self._inodes else ()
                run("mkfs.ext4", "-q", "-F", "-b", str(_BLOCK), "-m", "0", *few, self._image)
            else:
                run("mkfs.xfs", "-q", "-f", "-b", f"size={_BLOCK}", self._image)
            flags = ("--direct-io=on",) if self._direct else ()
            self.loop = attach(self._image, *flags)
            self._mount()
            undo.pop_all()
        return self

    def _mount(self) -> None:
        # no thread of the kernel writes empty inode tables beside what is tested or measured
        options = "errors=remount-ro,noinit_itable" if self._kind == "ext4" else "rw"
        run("mount", "-t", self._kind, "-o", options, self.loop, self.path)

    @property
    def mounted(self) -> bool:
        """Whether `path` is a mount point now."""
        return self.path in mount_points()  # os.path.ismount is wrong where an XFS is shut down

    def free_bytes(self) -> int:
        """What an ordinary user may still write."""
        found = os.statvfs(self.path)
        return found.f_bavail * found.f_frsize

    # --- faults -----------------------------------------------------------------------------

    def shutdown(self, flag: int = POWER_CUT) -> None:
        """Stop the filesystem at once; every later call on it is EIO until remount()."""
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(fd, _GOING_DOWN, struct.pack("I", flag))
        finally:
            os.close(fd)

    def remount(self) -> None:
        """Unmount and mount again; the journal is replayed, as after a power cut.

        Everything open on it must be closed before: else OSError EBUSY.
        """
        self.unmount()
        self._mount()

    def replug(self) -> None:
        """The disk is back as another device, as after a cable was pulled: same bytes, same path.

        After shutdown(). Unlike remount() it needs nothing to be closed: who has files of the old
        mount open keeps them, and their errors; the old device is gone with the last of them.
        """
        if self._throttled:
            self.throttle(0)
        _flush(self.loop)
        if self.mounted:
            self.lazy_unmount()
        again = f"{self._image}.again"  # of its own: the old device can never write into it
        run("cp", "--sparse=always", self._image, again)
        fails("losetup", "-d", self.loop)
        os.replace(again, self._image)
        self.loop = attach(self._image)
        self._mount()

    def unmount(self) -> None:
        """Unmount when mounted. OSError EBUSY while files are open on it."""
        while self.mounted:
            run("umount", self.path)

    def mount(self) -> None:
        """Mount again after unmount() or lazy_unmount()."""
        self._mount()

    def fill(self, keep_bytes: int = 0) -> None:
        """Fill it up with ballast until no more than `keep_bytes` are free."""
        step = max(self.free_bytes() - keep_bytes, 0)
        fd = os.open(f"{self.path}/.ballast", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            while (free := self.free_bytes()) > keep_bytes and step >= 4096:
                step = min(step, free - keep_bytes)
                try:
                    os.posix_fallocate(fd, os.fstat(fd).st_size, step)
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    step //= 2
            os.fsync(fd)
        finally:
            os.close(fd)

    def fill_inodes(self) -> None:
        """Make empty files until no inode is free."""
        folder = f"{self.path}/.inodes"
        try:
            os.makedirs(folder, exist_ok=True)
            while True:
                name = f"{folder}/{secrets.token_hex(8)}"
                os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise

    def release(self) -> None:
        """Give back what fill() and fill_inodes() took."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{self.path}/.ballast")
        shutil.rmtree(f"{self.path}/.inodes", ignore_errors=True)

    def read_only(self) -> None:
        """Let the kernel find an error: the filesystem turns read-only under open files."""
        with open(
            f"/sys/fs/ext4/{os.path.basename(self.loop)}/trigger_fs_error", "w", encoding="utf-8"
        ) as file:
            file.write("x")

    def lazy_unmount(self) -> None:
        """Detach: open files go on, the path silently names the parent filesystem."""
        run("umount", "-l", self.path)

    def throttle(self, bytes_per_second: int, *, calls_per_second: int = 0) -> None:
        """Limit reads and writes of the device, each, for all processes; 0 lifts it. Cgroup v1.

        Small calls far below a limit of bytes are as fast as ever; one of calls slows them, too.
        """
        throttle(self.loop, bytes_per_second, calls_per_second)
        self._throttled = bytes_per_second > 0 or calls_per_second > 0

    def flip(self, file: str | os.PathLike[str], offset: int) -> None:
        """Change one bit of a file's bytes on the device, below the filesystem.

        Synced bytes only. What the filesystem has in its page cache stays as it was.
        """
        fd = os.open(file, os.O_RDONLY)
        try:
            place = bytearray(struct.pack("i", offset // _BLOCK))
            fcntl.ioctl(fd, _FIBMAP, place)
            (block,) = struct.unpack("i", place)
            if not block:
                raise OSError(errno.ENXIO, f"no block of the device holds byte {offset} of {file}")
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
        image = os.open(self._image, os.O_RDWR)
        try:
            at = block * _BLOCK + offset % _BLOCK
            os.pwrite(image, bytes([os.pread(image, 1, at)[0] ^ 0x10]), at)
        finally:
            os.close(image)

    def yank(self, keep_bytes: int = MIB) -> None:
        """The disk vanishes but for its first bytes: EIO on what is not cached. Not undone."""
        os.truncate(self._image, keep_bytes)
        run("losetup", "-c", self.loop)
        with contextlib.suppress(OSError):
            _flush(self.loop)

    # --- end --------------------------------------------------------------------------------

    def close(self) -> None:
        """Unmount, detach, delete; also what is left after a failure. Idempotent, never raises."""
        if self._throttled:
            with contextlib.suppress(OSError):
                self.throttle(0)
        gone = unmounted(self.path)
        if self.loop:
            fails("losetup", "-d", self.loop)
            self.loop = ""
        if gone:
            shutil.rmtree(self._work, ignore_errors=True)


def _flush(loop: str) -> None:
    """Write what the page cache has of a device, and forget it."""
    fd = os.open(loop, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, _FLUSH_BUFFERS, 0)
    finally:
        os.close(fd)


def loop_mounts_problem(
    kind: Kind = "ext4", *, directory: str | os.PathLike[str] | None = None, direct: bool = False
) -> str | None:
    """Why loop filesystems cannot be used here, or None: really makes one and writes to it.

    Their images are in `directory`, the machine's temporary one unless given.
    """
    if os.geteuid() != 0:
        return "needs root (loop devices, mounts)"
    for program in (f"mkfs.{kind}", "losetup", "mount", "umount"):
        if shutil.which(program) is None:
            return f"needs {program}"
    try:
        with (
            tempfile.TemporaryDirectory(dir=directory) as work,
            LoopFilesystem(work, size_bytes=16 * MIB, kind=kind, direct=direct) as filesystem,
            open(f"{filesystem.path}/probe", "wb") as file,
        ):
            file.write(b"x")
    except OSError as error:
        return f"loop mounts do not work here: {error}"
    return None
