"""What this user may not do with a path, who may, and what gives the right: for errors."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path

from hpstore.errors import ConfigError

_MOST_GROUP = (1 << 32) - 1  # which fchown takes for "leave it"
_WANTED = {stat.S_IFDIR: os.R_OK | os.W_OK | os.X_OK, stat.S_IFREG: os.R_OK | os.W_OK}


def user_name(number: int) -> str:
    """A user for people: name and number."""
    try:
        return f"{pwd.getpwuid(number).pw_name} ({number})"
    except KeyError:
        return str(number)


def group_name(number: int) -> str:
    """A group for people: name and number."""
    try:
        return f"{grp.getgrgid(number).gr_name} ({number})"
    except KeyError:
        return str(number)


def group_number(group: str) -> int:
    """The number of a group given by name or number. Raises ConfigError where there is none."""
    try:
        if group.isascii() and group.isdigit() and int(group) < _MOST_GROUP:
            return int(group)
        return grp.getgrnam(group).gr_gid
    except (KeyError, ValueError) as error:  # Value: a NUL
        raise ConfigError(
            f"there is no group {group!r} on this host: make it first, or give its number"
        ) from error


def give_to_group(fd: int, group: int, where: str) -> None:
    """Give an open file or directory, which lies at `where`, to a group.

    Raises ConfigError where it is this user's own and the group is not, PermissionError for what is
    another user's, OSError.
    """
    try:
        os.fchown(fd, -1, group)
    except PermissionError as error:
        mine = group in {os.getegid(), *os.getgroups()}  # then it is the filesystem that refuses
        if mine or os.fstat(fd).st_uid != os.geteuid():
            raise
        raise ConfigError(
            f"{where} cannot be given to group {group_name(group)}: user "
            f"{user_name(os.geteuid())} is not in it, and only root gives files to groups of "
            "others. Add the user to the group (usermod -a -G, then log in again), or choose one "
            "of the user's own"
        ) from error


def keep_rights(fd: int, path: Path) -> None:
    """Give a new version of a file the owner, group and mode of the file at `path`, as far as this
    user may: root's `add` must not take a user's pool.toml away."""
    try:
        before = os.stat(path)
    except FileNotFoundError:
        return
    mode = before.st_mode & 0o777
    try:
        os.fchown(fd, before.st_uid, before.st_gid)
    except PermissionError:  # another user owns the file, and a member of its group rewrites it
        try:
            os.fchown(fd, -1, before.st_gid)
        except PermissionError:
            mode &= ~stat.S_IRWXG  # which were another group's
    os.fchmod(fd, mode)


def denied_path(path: str, below: tuple[str, ...] = ()) -> str:
    """The first component of an absolute path, or of the names `below` it, that this user may not
    use; `path` itself where none can be named. Asks the filesystem."""
    place = Path(path)
    for folder in (*reversed(place.parents), place):
        wanted = os.X_OK if folder != place else _wanted(folder)
        if _exists(folder) and not os.access(folder, wanted, effective_ids=True):
            return str(folder)
    for name in below:
        if _exists(place / name) and not _may_use(place / name):
            return str(place / name)
    return path


def rights_hint(path: str) -> str:
    """Who asked, whose `path` is, and what to do."""
    groups = ", ".join(group_name(g) for g in sorted({os.getegid(), *os.getgroups()}))
    this = f"user {user_name(os.geteuid())} of group {groups}"
    try:
        found = os.stat(path)
    except OSError:
        return f"{this} has no rights on {path}. {_WHAT_TO_DO}"
    return (
        f"{this} has no rights on {path}, which belongs to user {user_name(found.st_uid)} and "
        f"group {group_name(found.st_gid)} with mode {stat.S_IMODE(found.st_mode):04o}. "
        f"{_WHAT_TO_DO}"
    )


_WHAT_TO_DO = (
    "No device is at fault for that, and it says nothing of what is stored. Its owner can add this "
    "user to that group, or share the pool: `hpstore create --group`, for one that exists see "
    "Several users in docs/operations.md."
)


def _wanted(path: Path) -> int:
    """What it takes to use a path; of one that is not there nothing is known."""
    try:
        return _WANTED.get(stat.S_IFMT(os.stat(path).st_mode), os.R_OK)
    except OSError:
        return os.F_OK


def _may_use(path: Path) -> bool:
    return os.access(path, _wanted(path), effective_ids=True)


def _exists(path: Path) -> bool:
    try:
        path.stat()
    except OSError:
        return False
    return True
