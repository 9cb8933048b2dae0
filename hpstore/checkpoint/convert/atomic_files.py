"""Files and directories that appear under their name whole and durable, or not at all."""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hpstore.errors import ConfigError
from hpstore.runtime.rights import keep_rights

_HERE, _EXCHANGE = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
# of filesystems (overlayfs: EXDEV), of old kernels, of sandboxes
_NO_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.EXDEV, errno.EOPNOTSUPP, errno.EPERM)


def check_target(
    target: Path, *, directory: bool, force: bool, ours: Callable[[str], bool]
) -> None:
    """Raise ConfigError for a target that must not be written.

    One that exists needs `force`; a directory is replaced only when `ours` knows all names in it.
    """
    if not target.parent.is_dir():
        raise ConfigError(f"{target.parent} is not a directory")
    if not os.path.lexists(target):
        return
    kind = target.is_dir() if directory else target.is_file()
    if not kind or target.is_symlink():
        wanted = "directory" if directory else "regular file"
        raise ConfigError(f"{target} exists and is no {wanted}; nothing was written")
    if directory:
        names = sorted(entry.name for entry in target.iterdir())
        foreign = [name for name in names if not ours(name)]
        if foreign:
            raise ConfigError(
                f"{target} holds other files ({', '.join(foreign[:4])}); export into "
                "a directory of its own. Nothing was written"
            )
        if not names:
            return
    if not force:
        raise ConfigError(f"{target} exists; force=True (--yes) replaces it. Nothing was written")


@contextmanager
def published(
    target: Path, *, directory: bool, force: bool, ours: Callable[[str], bool]
) -> Iterator[Path]:
    """Where to write what shall be `target`: a hidden neighbour, synced and renamed at the end.

    On an error it is removed. A kill may leave it; its name ends in `.part`, it may be deleted. A
    directory that is replaced changes places with it in one step. Where the filesystem cannot do
    that there are two, and a kill between them leaves what was there before under a name that ends
    in `.old`.
    """
    check_target(target, directory=directory, force=force, ours=ours)
    part = target.with_name(f".{target.name[:40]}.{secrets.token_hex(4)}.part")
    try:
        if directory:
            part.mkdir()
        yield part
        _sync(part)
        check_target(target, directory=directory, force=force, ours=ours)
        if target.is_file():
            _keep_rights(part, target)
        _rename(part, target)
    finally:
        _remove(part)
    _sync(target.parent, inside=False)


def _keep_rights(part: Path, target: Path) -> None:
    with part.open("rb") as file:
        keep_rights(file.fileno(), target)


def _rename(part: Path, target: Path) -> None:
    if not (part.is_dir() and target.is_dir() and any(target.iterdir())):
        part.replace(target)
        return
    if _exchanged(part, target):
        return  # what was there before has the other name, and goes
    old = target.with_name(f".{target.name[:40]}.{secrets.token_hex(4)}.old")
    target.rename(old)  # a kill between the two renames leaves both versions beside the name
    try:
        part.rename(target)
    except BaseException as error:
        try:
            old.rename(target)
        except OSError:  # another process has taken the name
            error.add_note(f"what was {target} is {old} now")
        raise
    shutil.rmtree(old)


def _exchanged(one: Path, other: Path) -> bool:
    """Swap what two names are of (renameat2, Linux 3.15). False where that cannot be done."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _NO_EXCHANGE:
        return False
    raise OSError(number, os.strerror(number), str(other))


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync(path: Path, *, inside: bool = True) -> None:
    """Sync a file, or a directory with the files in it."""
    if inside and path.is_dir():
        for child in path.iterdir():
            _sync(child)
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
