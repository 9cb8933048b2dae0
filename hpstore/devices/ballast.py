"""Spare files and directories of a local device, for deletes on a full filesystem.

Other programs may fill a filesystem to its last byte or inode. A spare has both already: it is
renamed into tmp/, written over in place and renamed to its name, which takes nothing new. While
spares are missing, small files that are retired become spares, and new ones are made when there is
room (docs/decisions/0061).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
from collections.abc import Callable, Iterator

from hpstore.devices.confined_names import is_foreign, open_beneath, rename_beneath
from hpstore.devices.file_handles import allocate, is_full, temporary_path, unlock_and_close
from hpstore.devices.file_modes import make_directory
from hpstore.devices.reserve import SPARE_BYTES, Spares, plan_spares

BALLAST = "ballast"
_FILE, _DIRECTORY = "file-", "directory-"


class DeviceBallast:
    """The spares of one device. Any thread; processes that share the device share them.

    All calls take the device's root descriptor and raise OSError.
    """

    def __init__(self, file_mode: int, directory_mode: int) -> None:
        self._file_mode, self._directory_mode = file_mode, directory_mode
        self._drawn = False  # this process has taken some: what it retires is kept

    def count(self, root: int) -> int:
        """How many spare files there are."""
        return len(self._names(root, _FILE))

    def fill(self, root: int) -> None:
        """Make what is missing, as far as there is room. One process at a time: others skip it."""
        with contextlib.suppress(FileExistsError):
            make_directory(root, BALLAST, self._directory_mode)
        with self._locked(root) as alone:
            if not alone:
                return
            wanted = _wanted(root)
            files = wanted.files - self.count(root)
            directories = wanted.directories - len(self._names(root, _DIRECTORY))
            for _ in range(files):
                self._make_file(root)
            for _ in range(directories):
                make_directory(root, _name(_DIRECTORY), self._directory_mode)
            self._drawn = False

    def refill(self, root: int) -> None:
        """After something was removed: make what this process has taken, if there is room now."""
        if self._drawn:
            with contextlib.suppress(OSError):  # the next removal, probe or open tries again
                self.fill(root)

    def take(
        self, root: int, name: str, size_bytes: int, open_file: Callable[[str], int], *, leave: int
    ) -> int | None:
        """Rename a spare to `name` (in tmp/) and return its descriptor, locked; None when no more
        than `leave` are there. It has `size_bytes` or more, from other spares where need be."""
        self._drawn = True
        names = self._names(root, _FILE)
        while len(names) > leave:
            fd = self._lock_and_rename(root, names.pop(), name, open_file)
            if fd < 0:
                continue  # another one took it, or it is not ours to take
            try:
                while not _has_room(fd, size_bytes):
                    if len(names) <= leave:
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(f"{BALLAST}/{names.pop()}", dir_fd=root)
            except OSError:
                unlock_and_close(fd)
                os.unlink(name, dir_fd=root)
                raise
            return fd
        return None

    def _lock_and_rename(
        self, root: int, spare: str, name: str, open_file: Callable[[str], int]
    ) -> int:
        """The lock comes first: what lies in tmp/ without one, and is old, is swept."""
        fd = -1
        try:
            fd = open_file(f"{BALLAST}/{spare}")
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_nlink > 1:  # a power cut has left it another name
                os.unlink(f"{BALLAST}/{spare}", dir_fd=root)
                raise FileNotFoundError(spare)
            rename_beneath(root, f"{BALLAST}/{spare}", name)
        except (FileNotFoundError, BlockingIOError, PermissionError):  # another user's
            if fd >= 0:
                os.close(fd)
            return -1
        except OSError as error:
            if fd < 0 and is_foreign(error):
                os.unlink(f"{BALLAST}/{spare}", dir_fd=root)  # the link, not what it leads to
                return -1
            unlock_and_close(fd)
            raise
        return fd

    def take_directory(self, root: int, path: str) -> bool:
        """Rename a spare directory to `path`; False when there is none."""
        self._drawn = True
        for name in self._names(root, _DIRECTORY):
            try:
                rename_beneath(root, f"{BALLAST}/{name}", path)
            except FileNotFoundError:
                continue  # another one took it
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    return True  # it was made meanwhile
                raise
            return True
        return False

    def wants(self, root: int, size_bytes: int) -> bool:
        """Whether a file that is retired should become a spare."""
        enough = SPARE_BYTES // 2  # a tombstone
        return self._drawn and size_bytes >= enough and self.count(root) < _wanted(root).files

    def place(self) -> str:
        """A new name for a spare file."""
        return _name(_FILE)

    def _names(self, root: int, kind: str) -> list[str]:
        try:
            fd = open_beneath(root, BALLAST, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            return []
        try:
            return [name for name in os.listdir(fd) if name.startswith(kind)]
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def _locked(self, root: int) -> Iterator[bool]:
        fd = open_beneath(root, BALLAST, os.O_RDONLY | os.O_DIRECTORY)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True
        finally:
            unlock_and_close(fd)

    def _make_file(self, root: int) -> None:
        """In tmp/ first: what another one has taken must not get longer any more."""
        name = temporary_path()
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        fd = open_beneath(root, name, flags, self._file_mode)
        try:
            allocate(fd, SPARE_BYTES)
            rename_beneath(root, name, _name(_FILE))
        except OSError:
            os.unlink(name, dir_fd=root)
            raise
        finally:
            os.close(fd)


def _has_room(fd: int, size_bytes: int) -> bool:
    try:
        allocate(fd, size_bytes)
    except OSError as error:
        if not is_full(error):
            raise
        return False
    return True


def _wanted(root: int) -> Spares:
    found = os.fstatvfs(root)
    return plan_spares(found.f_blocks * found.f_frsize, found.f_files)


def _name(kind: str) -> str:
    return f"{BALLAST}/{kind}{secrets.token_hex(8)}"
