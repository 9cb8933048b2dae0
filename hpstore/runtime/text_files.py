"""Paths, and small text files that people and processes share: read within bounds, replaced as a
whole.
"""

from __future__ import annotations

import os
import secrets
import stat
import sys
from pathlib import Path

from hpstore.errors import ConfigError
from hpstore.runtime.rights import give_to_group, keep_rights
from hpstore.units import MIB

MOST_BYTES = 16 * MIB  # a pool.toml of 10,000 devices has one
_PATH_BYTES, _NAME_BYTES = 4095, 255  # at most, of Linux


def checked_path(path: str | os.PathLike[str], what: str, *, recorded: bool = False) -> str:
    """The text of a path that a file can have here. Nothing is looked up.

    `recorded`: it is written into files of hpstore, too, which are UTF-8. Raises ConfigError.
    """
    try:
        text = os.fspath(path)
    except TypeError as error:
        raise ConfigError(f"{what} must be a path, not {path!r}") from error
    if not isinstance(text, str):
        raise ConfigError(f"{what} must be a path as text, not {text!r}: os.fsdecode() makes it")
    try:
        if recorded:
            text.encode()
        encoded = os.fsencode(text)
    except UnicodeEncodeError as error:
        names = sys.getfilesystemencoding()
        hint = "Start Python with PYTHONUTF8=1, or in a UTF-8 locale" if names != "utf-8" else ""
        raise ConfigError(
            f"{what} {text!r} cannot be used: {text[error.start]!r} cannot be written as "
            f"{error.encoding}. Nothing was opened or made. {hint or 'Choose another name'}."
        ) from error
    problem = ""
    if not text or "\0" in text:
        problem = "holds a NUL" if text else "is empty"
    elif len(encoded) > _PATH_BYTES or max(map(len, encoded.split(b"/"))) > _NAME_BYTES:
        problem = f"is longer than {_PATH_BYTES} bytes, or one of its names than {_NAME_BYTES}"
    if problem:
        raise ConfigError(f"{what} {text[:40]!r} cannot be used: it {problem}")
    return text


def read_text_file(path: str | os.PathLike[str], most_bytes: int = MOST_BYTES) -> str:
    """A file as UTF-8, with or without a byte order mark, its line ends as newlines.

    Raises OSError, also for what is no file (a pipe would be waited for, /dev/zero has no end), and
    ValueError for one that is too long or is not UTF-8.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(f"{os.fspath(path)} is not a file")
    with open(fd, "rb") as file:
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
    # a part of its name: it may be as long as names can be
    temporary = path.with_name(f".{path.name[:40]}.{os.getpid()}-{secrets.token_hex(8)}")
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with open(
            os.open(temporary, flags, 0o666 if mode is None else 0o600), "w", encoding="utf-8"
        ) as file:
            if as_before:
                keep_rights(file.fileno(), path)
            if group >= 0:
                give_to_group(file.fileno(), group, str(path))
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            file.write(text)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        temporary.replace(path)
        if durable:
            _sync_directory(path.parent)
    except BaseException:  # text that is not UTF-8, Ctrl-C
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
