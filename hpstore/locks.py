"""Locks between the processes of one host: files in a local run directory, never on a device.

PROTOCOL 15: a lock has a deadline, so nothing that hangs on a device blocks the device's eviction.
The descriptor is opened for each use, after any fork, so a child never shares its parent's lock.
"""

from __future__ import annotations

import fcntl
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hpstore.clock import Clock
from hpstore.errors import ConfigError, LockTimeout

_POLL_SECONDS = 0.01
_KEY_LOCKS = 4096


@contextmanager
def file_lock(
    directory: Path, name: str, clock: Clock, deadline_seconds: float, what: str
) -> Iterator[None]:
    """Hold `directory/name` exclusively. Raises LockTimeout, which says who waits for what."""
    until = clock.monotonic() + deadline_seconds
    while (fd := _try_lock(directory, name)) is None:
        if clock.monotonic() >= until:
            raise LockTimeout(
                f"{what}: another process on this host holds {directory / name} for more "
                f"than {deadline_seconds:.0f} s. Nothing was changed; try again later."
            )
        clock.wait(_POLL_SECONDS)
    try:
        yield
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)  # for copies that forks have left, too
        os.close(fd)


def _try_lock(directory: Path, name: str) -> int | None:
    """The descriptor of the lock, or None: it is held, or its file was removed meanwhile, as those
    who tidy temporary folders do, and another may be made and held."""
    path = directory / name
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
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


def key_lock_name(key: str) -> str:
    """One of a bounded number of lock files: few keys wait for a stranger."""
    return f"key-{zlib.crc32(key.encode()) % _KEY_LOCKS:04d}.lock"


__all__ = ["file_lock", "key_lock_name"]
