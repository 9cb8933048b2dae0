"""Modes of what a local device makes, whatever the umask: others of the pool's group use it, too.

A pool's mode is that of `objects/` on its devices: what a process makes there has the rights that
group and others have on it, beside those of its own settings. Directories keep the set-group-id bit
that they inherit, so that all has the device's group (docs/decisions/0088).
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from dataclasses import dataclass

from hpstore.devices.confined_names import (
    SHARED,
    open_beneath,
    parent_beneath,
    rename_beneath,
    widen,
)
from hpstore.devices.file_handles import temporary_path
from hpstore.format.keys import OBJECTS
from hpstore.runtime.rights import give_to_group


@dataclass(frozen=True, slots=True, kw_only=True)
class Modes:
    """Of files and directories that a process makes on a device."""

    file: int
    directory: int

    @property
    def shared(self) -> bool:
        """Whether another user has rights on them."""
        return bool((self.file | self.directory) & SHARED)


def modes_on(root: int, settings: Modes) -> Modes:
    """Those of the settings, with what `objects/` grants. Raises OSError but for an absent one."""
    try:
        bits = os.stat(OBJECTS, dir_fd=root, follow_symlinks=False).st_mode & SHARED
    except FileNotFoundError:
        return settings
    return Modes(file=settings.file | bits & 0o066, directory=settings.directory | bits)


def make_directory(root: int, path: str, mode: int) -> None:
    """os.mkdir() beneath `root`; it has its mode before it has its name.

    Else another user could find it closed, for good where this process dies. Raises
    FileExistsError, FileNotFoundError.
    """
    if not mode & SHARED:
        with parent_beneath(root, path) as (directory, last):
            os.mkdir(last, mode, dir_fd=directory)
        return
    with parent_beneath(root, path) as (directory, last):
        if _is_there(directory, last):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
    name = temporary_path()
    os.mkdir(name, mode, dir_fd=root)
    try:
        widen_directory(root, name, mode)
        rename_beneath(root, name, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.rmdir(name, dir_fd=root)
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):  # it was made and filled meanwhile
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path) from error
        raise


def share_root(root: int, modes: Modes, group: int) -> None:
    """Give a new device the pool's mode, and to a group (-1: none). Raises OSError, and ConfigError
    for a group that this user is not in."""
    if not modes.shared:
        return
    if group >= 0 and os.fstat(root).st_gid != group:
        give_to_group(root, group, os.readlink(f"/proc/self/fd/{root}"))
    found = stat.S_IMODE(os.fstat(root).st_mode)
    wanted = found | modes.directory | (stat.S_ISGID if group >= 0 else 0)
    if wanted != found:
        os.fchmod(root, wanted)


def widen_directory(root: int, path: str, mode: int) -> None:
    """As widen(), of a directory beneath `root`."""
    fd = open_beneath(root, path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        widen(fd, mode)
    finally:
        os.close(fd)


def _is_there(directory: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True
