"""Compression of frames, each by itself, through numcodecs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

from hpstore.codec.galois import Bytes
from hpstore.errors import ConfigError, IntegrityError

SHUFFLED = ("shuffle-lz4", "blosc")  # two names of one codec: planes of bytes, then lz4
NAMES = ("lz4", "zstd", *SHUFFLED)
_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_ZSTD_RLE = 1  # one byte that is repeated
Encode = Callable[[Bytes, int], bytes]  # (frame, bytes of an element) -> stored bytes


@cache
def encoder(name: str) -> Encode:
    """Compresses one frame. Thread-safe."""
    from numcodecs import LZ4, Zstd
    from numcodecs.blosc import SHUFFLE, Blosc

    if name in SHUFFLED:
        shuffled = Blosc(cname="lz4", clevel=5, shuffle=SHUFFLE)

        def by_planes(frame: Bytes, itemsize: int) -> bytes:
            word = _WORDS.get(itemsize, np.uint8)
            return bytes(shuffled.encode(frame.view(word) if len(frame) % itemsize == 0 else frame))

        return by_planes
    plain = LZ4(acceleration=1) if name == "lz4" else Zstd(level=1)
    return lambda frame, _: bytes(plain.encode(frame))


def decode(name: str, stored: Bytes, out: Bytes) -> None:
    """Decompress one frame into `out`; one that is as long as `out` was stored as it is.

    No memory but `out` is taken, whatever the frame says of itself. Raises IntegrityError when it
    does not give its length, with anything in `out`; ConfigError for a codec not known.
    """
    from numcodecs import LZ4, Zstd
    from numcodecs.blosc import Blosc

    if len(stored) == len(out):
        out[:] = stored
        return
    codec = {"lz4": LZ4, "zstd": Zstd, **dict.fromkeys(SHUFFLED, Blosc)}.get(name)
    if codec is None:
        raise ConfigError(f"this hpstore has no compression {name!r}")
    _require_header(name, stored, len(out))
    try:
        codec().decode(stored, out)
    except (RuntimeError, ValueError, OverflowError) as error:
        raise IntegrityError(f"a compressed frame cannot be read: {error}") from error


def _require_header(name: str, stored: Bytes, length: int) -> None:
    """Raise IntegrityError for lengths that lie: codecs believe them. Blosc would read past the end
    of `stored`; zstd adds up those of all frames that follow, in 64 bits."""
    head = stored[:18].tobytes()
    if name in SHUFFLED:
        wrong = len(head) < 16 or (head[4:8], head[12:16]) != (_u32(length), _u32(len(stored)))
    elif name == "lz4":
        wrong = head[:4] != _u32(length)
    else:
        wrong = not _is_one_zstd_frame(stored, length)
    if wrong:
        raise IntegrityError(f"a compressed frame does not begin as one of {length} bytes")


def _is_one_zstd_frame(stored: Bytes, length: int) -> bool:
    """Whether these are one frame, and nothing after it, that says that it holds `length` bytes
    (RFC 8878, 3.1.1)."""
    head = stored[:18].tobytes()
    if head[:4] != b"\x28\xb5\x2f\xfd" or len(head) < 5:
        return False
    flags = head[4]
    alone = flags >> 5 & 1  # then there is no window descriptor
    at = 5 + (1 - alone) + (0, 1, 2, 4)[flags & 3]
    width = (alone, 2, 4, 8)[flags >> 6]
    field = head[at : at + width]
    says = int.from_bytes(field, "little") + (256 if width == 2 else 0)
    if not width or len(field) < width or says != length:
        return False
    end = _zstd_blocks_end(stored, at + width)
    return end is not None and end + (4 if flags & 4 else 0) == len(stored)


def _zstd_blocks_end(stored: Bytes, at: int) -> int | None:
    """Where the blocks of a frame end that begin there (RFC 8878, 3.1.1.2); None when they are cut
    off."""
    last = False
    while not last:
        if at + 3 > len(stored):
            return None
        header = int.from_bytes(stored[at : at + 3].tobytes(), "little")
        last, kind, size = bool(header & 1), header >> 1 & 3, header >> 3
        at += 3 + (1 if kind == _ZSTD_RLE else size)
    return at


def _u32(number: int) -> bytes:
    return number.to_bytes(4, "little")
