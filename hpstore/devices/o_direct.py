"""What a filesystem asks of direct I/O: statx where the kernel has it, else a real attempt."""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct

_AT_EMPTY_PATH = 0x1000
_STATX_DIOALIGN = 0x2000
_STATX_BYTES = 256
_MASK_AT, _ALIGN_AT = 0, 0x98  # stx_mask; stx_dio_mem_align and stx_dio_offset_align


def statx_alignment(fd: int) -> tuple[int, int] | None:
    """Return the (memory, offset) alignment of O_DIRECT by statx (Linux 6.1); None if unknown.

    (0, 0) means that the file does not take O_DIRECT.
    """
    statx = getattr(ctypes.CDLL(None, use_errno=True), "statx", None)
    if statx is None:
        return None
    buffer = ctypes.create_string_buffer(_STATX_BYTES)
    if statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, buffer) != 0:
        return None
    (mask,) = struct.unpack_from("<I", buffer.raw, _MASK_AT)
    if not mask & _STATX_DIOALIGN:
        return None
    memory, offset = struct.unpack_from("<II", buffer.raw, _ALIGN_AT)
    return memory, offset


def is_direct(fd: int) -> bool:
    """Whether reads of a descriptor go past the page cache. Raises OSError."""
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


def set_direct(fd: int, *, on: bool) -> None:
    """Switch O_DIRECT of an open descriptor. Raises OSError where it is not taken."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)
