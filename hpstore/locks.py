"""Locks between processes that share a directory: an operator's orders, pools on stores.

What a pool's processes exclude each other by follows its devices: see device_registers.py. The
descriptor is opened for each use, after any fork, so a child never shares its parent's lock.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hpstore.config import private_directory
from hpstore.errors import ConfigError, LockTimeout
from hpstore.runtime.clock import Clock

_POLL_SECONDS = 0.01
_WORD_BYTES = 200  # of who holds a lock


@contextmanager
def file_lock(
    directory: Path, name: str, clock: Clock, deadline_seconds: float, what: str
) -> Iterator[None]:
    """Hold `directory/name` exclusively. Raises LockTimeout, which says who waits for what."""
    until = clock.monotonic() + deadline_seconds
    while (fd := _try_lock(directory, name)) is None:
        if clock.monotonic() >= until:
            raise LockTimeout(
                f"{what}: {_holder(directory / name)} holds {directory / name} for more "
                f"than {deadline_seconds:.0f} s. Nothing was changed; try again later."
            )
        clock.wait(_POLL_SECONDS)
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"process {os.getpid()} ({what})".encode()[:_WORD_BYTES], 0)
        yield
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)  # for copies that forks have left, too
        os.close(fd)


def _holder(path: Path) -> str:
    """Who holds a lock, by the word that it has left there."""
    try:
        with path.open("rb") as file:
            word = file.read(_WORD_BYTES).decode(errors="replace")
    except OSError:
        word = ""
    return word or "another process on this host"


def _try_lock(directory: Path, name: str) -> int | None:
    """The descriptor of the lock, or None: it is held, or its file was removed meanwhile, as those
    who tidy temporary folders do, and another may be made and held."""
    path = directory / name
    try:
        private_directory(directory)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise ConfigError(f"lock directory {directory} is not usable: {error.strerror}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(fd), os.stat(path)):
            return fd
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None
