"""Small text files that people and processes share: read within bounds, replaced as a whole."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from hpstore.runtime.rights import keep_rights
from hpstore.units import MIB

MOST_BYTES = 16 * MIB  # a pool.toml of 10,000 devices has one


def read_text_file(path: str | os.PathLike[str], most_bytes: int = MOST_BYTES) -> str:
    """A file as UTF-8, with or without a byte order mark, its line ends as newlines.

    Raises OSError, also for what is no file (a pipe would be waited for, /dev/zero has no end), and
    ValueError for one that is too long or is not UTF-8.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(f"{os.fspath(path)} is not a file")
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise ValueError(f"it has more than {most_bytes} bytes")
    return data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")


def write_atomically(
    path: Path,
    text: str,
    *,
    durable: bool = True,
    mode: int | None = None,
    group: int = -1,
    as_before: bool = False,
) -> None:
    """Replace a text file. If it must be `durable`, its content is synced before it has the name,
    and then the name: pool.toml alone has the pool's key.
    `mode`: of the file, from its beginning; the umask decides unless given. `group`: it is given
    to, by its number. `as_before`: else they, and the owner, are those of the file before.

    The temporary name cannot be known beforehand: no link that lies there is followed.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(8)}")
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with open(
            os.open(temporary, flags, 0o666 if mode is None else 0o600), "w", encoding="utf-8"
        ) as file:
            if as_before:
                keep_rights(file.fileno(), path)
            if group >= 0:
                os.fchown(file.fileno(), -1, group)
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            file.write(text)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        temporary.replace(path)
        if durable:
            _sync_directory(path.parent)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def without_link(path: Path) -> Path:
    """The absolute path of a file, or of the one that it is a symbolic link to: a new version of
    that one must not take the link's place."""
    return Path(os.path.realpath(path)) if os.path.islink(path) else path.absolute()


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
