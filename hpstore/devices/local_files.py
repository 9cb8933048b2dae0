"""Names, directories and descriptors of a local device."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from collections.abc import Iterator, Sequence

from hpstore.devices.ballast import DeviceBallast
from hpstore.devices.base import DirectoryEntry, Stamp
from hpstore.devices.confined_names import (
    open_beneath,
    parent_beneath,
    rename_beneath,
    stamp_beneath,
)
from hpstore.devices.durable_names import MOST, DurableNames
from hpstore.devices.file_handles import gone, is_full, open_root, raise_local_error
from hpstore.devices.file_modes import Modes, make_directory, modes_on
from hpstore.devices.local_counters import LocalCounters
from hpstore.devices.mount_table import read_mounts
from hpstore.errors import DeviceError, DeviceMissing
from hpstore.format.geometry import ALIGNMENT_BYTES
from hpstore.format.keys import OBJECTS

_log = logging.getLogger(__name__)
_PUBLISH_TRIES = 16
_IN_MEMORY = {"tmpfs", "ramfs"}
_LISTING_SECONDS = 0.05  # of listings of many directories at once


class LocalFiles(LocalCounters):
    """Part of LocalDevice: files under `path`, by a directory descriptor that is held open.

    The held descriptor keeps every operation on the filesystem that was opened: after a lazy
    unmount the path silently names the parent filesystem, the descriptor does not. After a fork
    the child opens its own and refuses when `st_dev` or the inode changed.
    """

    def __init__(
        self,
        path: str,
        *,
        direct: bool = True,
        file_mode: int = 0o600,
        directory_mode: int = 0o700,
    ) -> None:
        self.url = os.path.abspath(path)
        self._settings = Modes(file=file_mode, directory=directory_mode)
        self.mode = "direct" if direct else "buffered"
        self.folds_names = False
        self.memory_alignment = ALIGNMENT_BYTES if direct else 1
        self._roots: dict[int, int] = {}  # process id -> root descriptor; see root_fd
        self._durable: dict[int, DurableNames] = {}  # process id -> what it knows; no lock: root_fd
        self._identity: tuple[int, int] | None = None
        self._in_memory: bool | None = None  # once it was looked at
        self._take_modes(self.root_fd())

    def _take_modes(self, root: int) -> None:
        """Those of what this process makes there."""
        modes = self._settings
        with contextlib.suppress(OSError):  # it does not work, or this user has no rights on it
            modes = modes_on(root, modes)
        self._file_mode, self._directory_mode = modes.file, modes.directory
        self._ballast = DeviceBallast(modes.file, modes.directory)

    def root_fd(self) -> int:
        """The root descriptor of this process; a forked child opens its own at first use.

        No lock, since one could be held at the fork: threads that open at the same time agree on
        one descriptor by an atomic setdefault.
        """
        known = self._roots.get(os.getpid())
        if known is not None:
            return known
        fd, found = open_root(self.url)
        if self._identity not in (None, found):
            os.close(fd)
            raise DeviceMissing(
                f"device {self.url} is another directory than before the fork: was it unmounted?",
                device=self.url,
            )
        self._identity = found
        winner = self._roots.setdefault(os.getpid(), fd)
        if winner != fd:
            os.close(fd)
        return winner

    @property
    def in_memory(self) -> bool:
        """Whether its filesystem has no disk behind it: O_DIRECT is taken there, and means
        nothing. False where that cannot be found out."""
        if self._in_memory is None:
            number = os.fstat(self.root_fd()).st_dev
            name = f"{os.major(number)}:{os.minor(number)}"
            try:
                found = {mount.filesystem for mount in read_mounts() if mount.number == name}
            except OSError:
                found = set()
            self._in_memory = bool(found) and found <= _IN_MEMORY
        return self._in_memory

    @contextlib.contextmanager
    def _guard(self, operation: str, *, absent_is_gone: bool = False) -> Iterator[int]:
        """Turn OSErrors into DeviceErrors; where nothing may be absent, ENOENT is a lost device."""
        try:
            yield self.root_fd()
        except FileNotFoundError as error:
            if absent_is_gone and not isinstance(error, DeviceError):
                raise gone(self.url, operation) from error
            raise
        except OSError as error:
            raise_local_error(error, self.root_fd(), self.url, operation)

    def check_mounted(self) -> None:
        """Raise DeviceMissing when the path no longer names the filesystem that was opened."""
        with self._guard("check", absent_is_gone=True):
            status = os.stat(self.url)
            if (status.st_dev, status.st_ino) != self._identity:
                raise DeviceMissing(
                    f"device {self.url}: another filesystem lies under the path now; it was "
                    "unmounted or mounted over. Nothing was written there.",
                    device=self.url,
                )

    def _open(self, name: str, flags: int, mode: int = 0o600) -> int:
        if self.mode != "direct":
            return open_beneath(self.root_fd(), name, flags, mode)
        try:
            return open_beneath(self.root_fd(), name, flags | os.O_DIRECT, mode)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._fall_back(error.strerror)  # a read-only probe could not find out before
            return open_beneath(self.root_fd(), name, flags & ~os.O_EXCL, mode)

    def _fall_back(self, reason: str | None) -> None:
        self.mode, self.memory_alignment = "buffered", 1
        _log.warning("device %s: O_DIRECT does not work (%s); buffered I/O", self.url, reason)

    def rename_into_place(self, old: str, new: str) -> None:
        """Rename, making directories; retries when a pruner removes them underneath."""
        self._rename(old, new, vital=False)

    def rename_vital(self, old: str, new: str) -> None:
        """As rename_into_place; spare directories are taken where none can be made."""
        self._rename(old, new, vital=True)

    def _rename(self, old: str, new: str, *, vital: bool) -> None:
        root = self.root_fd()
        for attempt in range(_PUBLISH_TRIES):
            try:
                rename_beneath(root, old, new)
            except FileNotFoundError:
                if attempt == _PUBLISH_TRIES - 1:
                    raise
                self._make_parents(new, vital=vital)
            else:
                return

    def _make_parents(self, path: str, *, vital: bool) -> None:
        parts, root = path.split("/")[:-1], self.root_fd()
        for depth in range(1, len(parts) + 1):
            name = "/".join(parts[:depth])
            try:
                with contextlib.suppress(FileExistsError, FileNotFoundError):
                    make_directory(root, name, self._directory_mode)
            except OSError as error:
                if not (vital and is_full(error) and self._ballast.take_directory(root, name)):
                    raise

    def sync_directory(self, path: str) -> None:
        with self._guard(f"sync of the directory of {path}"):
            self._sync_directory(path)

    def _sync_directory(self, path: str) -> None:
        """fsync the directory of path and its ancestors, up to the first level below the root or
        one whose own name this process has made durable: another process may have made one a moment
        ago and not synced it yet."""
        parts, root = path.split("/")[:-1], self.root_fd()
        durable = self._durable.get(os.getpid()) or self._durable.setdefault(
            os.getpid(), DurableNames()
        )
        climbed: list[tuple[str, int]] = []
        known = False
        try:
            while parts and not known:
                name = "/".join(parts)
                flags = os.O_RDONLY | os.O_DIRECTORY
                climbed.append((name, open_beneath(root, name, flags)))
                os.fsync(climbed[-1][1])
                known = durable.known(*climbed[-1])
                if len(climbed) > MOST + 2:  # a key may have hundreds of parts
                    os.close(climbed.pop(1)[1])
                parts.pop()
            if not climbed:
                os.fsync(root)
            synced, climbed[1:-1] = climbed[1:-1], []
            durable.hold(synced)  # not the deepest, an object's own: there are too many
        finally:
            for _, fd in climbed:
                os.close(fd)

    def entries(self, path: str) -> list[DirectoryEntry]:
        with self._guard(f"list of {path}") as root:
            return self._scan(path, root)

    def listings(self, paths: Sequence[str]) -> list[list[DirectoryEntry]]:
        found = []
        until = time.monotonic() + _LISTING_SECONDS
        with self._guard(f"list of {paths[0]} and others") as root:
            for path in paths:
                found.append(self._scan(path, root))
                if time.monotonic() >= until:
                    break
        return found

    def _scan(self, path: str, root: int) -> list[DirectoryEntry]:
        try:
            fd = open_beneath(root, path or ".", os.O_RDONLY | os.O_DIRECTORY)
        except (FileNotFoundError, NotADirectoryError):
            if path.startswith(OBJECTS):
                self.require_objects()
            return []
        try:
            with os.scandir(fd) as entries:
                return [DirectoryEntry(e.name, e.is_dir(follow_symlinks=False)) for e in entries]
        finally:
            os.close(fd)

    def require_objects(self) -> None:
        """A directory may be absent, but not the one that holds them all (half-way through rm)."""
        try:
            os.stat(OBJECTS, dir_fd=self.root_fd())
        except FileNotFoundError as error:
            raise gone(self.url, "list") from error

    def stamp(self, path: str) -> Stamp | None:
        with self._guard(f"stat of {path}") as root:
            return stamp_beneath(root, path)

    def delete(self, path: str) -> None:
        with self._guard(f"delete of {path}") as root:
            with contextlib.suppress(FileNotFoundError):
                self._unlink(root, path)
            self._prune(path)

    def _unlink(self, root: int, path: str) -> None:
        with parent_beneath(root, path) as (directory, name):
            os.unlink(name, dir_fd=directory)

    def _prune(self, path: str) -> None:
        """Remove directories that became empty, below the top ones."""
        parts = path.split("/")[:-1]
        while len(parts) > 1:
            try:
                with parent_beneath(self.root_fd(), "/".join(parts)) as (directory, name):
                    os.rmdir(name, dir_fd=directory)
            except OSError:
                return
            parts.pop()

    def close(self) -> None:
        durable = self._durable.pop(os.getpid(), None)
        if durable is not None:
            durable.close()
        fd = self._roots.pop(os.getpid(), -1)
        if fd >= 0:
            os.close(fd)
