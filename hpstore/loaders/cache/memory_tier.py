"""The memory of a cache, reserved at once: of this process, or of a file that others map."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable
from typing import Protocol

import numpy as np

from hpstore.codec.galois import Bytes
from hpstore.errors import ConfigError
from hpstore.loaders.cache.page_allocator import Int32s
from hpstore.runtime.budget import available_bytes
from hpstore.runtime.buffers import aligned_array
from hpstore.runtime.closing import Closing
from hpstore.units import format_bytes

_F_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1; not in Python's fcntl module yet
Pin = Callable[[Bytes], None]


class MemoryTier(Protocol):
    """Where pages are, and tables that whoever reads pages needs."""

    @property
    def data(self) -> Bytes: ...
    def table(self, name: str, shape: tuple[int, ...]) -> Int32s: ...
    def forget(self, name: str) -> None: ...


def check_fits(nbytes: int) -> None:
    """Raises ConfigError when the machine, or a control group, has less memory than that."""
    if nbytes <= 0:
        raise ConfigError(
            f"memory_bytes {nbytes}: a cache needs room for at least one batch of blocks"
        )
    available = available_bytes()
    if nbytes > available:
        raise ConfigError(
            f"memory_bytes {format_bytes(nbytes)}: only {format_bytes(available)} are available "
            "here (of the machine, or of this process's control group); nothing was reserved"
        )


class OwnMemory:
    """Anonymous memory of this process, populated. `pin` page-locks it, once."""

    def __init__(self, nbytes: int, pin: Pin | None = None) -> None:
        check_fits(nbytes)
        self.data: Bytes = aligned_array(nbytes, populate=True)
        if pin is not None:
            pin(self.data)

    def table(self, name: str, shape: tuple[int, ...]) -> Int32s:
        """Zeros, int32."""
        return np.zeros(shape, np.int32)

    def forget(self, name: str) -> None:
        """Nobody else has a table."""


class SharedMemory(Closing):
    """A file without a name, reserved: it is gone with the last process that maps it.

    Others get the descriptors, and can map them for reading only (the kernel sees to it). Raises
    ConfigError when the memory is not there: later a write would end the process (SIGBUS).
    """

    def __init__(self, nbytes: int, pin: Pin | None = None) -> None:
        check_fits(nbytes)
        self.fds: dict[str, int] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.data: Bytes = self._reserve("data", nbytes)
        if pin is not None:
            pin(self.data)

    def table(self, name: str, shape: tuple[int, ...]) -> Int32s:
        """Zeros, int32, in a file of their own; a table of the same name before it is let go."""
        made = self._reserve(name, max(4, 4 * int(np.prod(shape))))
        self.shapes[name] = shape
        return made.view(np.int32)[: int(np.prod(shape))].reshape(shape)

    def _reserve(self, name: str, nbytes: int) -> Bytes:
        fd = os.memfd_create(f"hpstore-cache-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            try:
                os.posix_fallocate(fd, 0, nbytes)
            except OSError as error:
                raise ConfigError(
                    f"{format_bytes(nbytes)} of shared memory for the cache could not be reserved "
                    f"({error.strerror}); lower memory_bytes. Nothing was changed."
                ) from error
            made = np.frombuffer(mmap.mmap(fd, nbytes), np.uint8)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        except BaseException:
            os.close(fd)
            raise
        self.forget(name)
        self.fds[name] = fd
        return made

    def forget(self, name: str) -> None:
        """Let go of a table; whoever maps it keeps it."""
        if name in self.fds:
            os.close(self.fds.pop(name))

    def close(self) -> None:
        """Close the descriptors; the memory goes with its last view. Idempotent."""
        while self.fds:
            os.close(self.fds.popitem()[1])


def mapped(fd: int, nbytes: int) -> Bytes:
    """The memory behind another process's descriptor, for reading; closes the descriptor."""
    try:
        return np.frombuffer(mmap.mmap(fd, nbytes, prot=mmap.PROT_READ), np.uint8)
    finally:
        os.close(fd)
