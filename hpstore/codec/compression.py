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

    Raises IntegrityError when it does not give its length, ConfigError for a codec not known.
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
        found = np.frombuffer(codec().decode(stored), np.uint8)
    except (RuntimeError, ValueError, OverflowError) as error:
        raise IntegrityError(f"a compressed frame cannot be read: {error}") from error
    if len(found) != len(out):
        raise IntegrityError(f"a compressed frame gives {len(found)} bytes, not {len(out)}")
    out[:] = found


def _require_header(name: str, stored: Bytes, length: int) -> None:
    """Raise IntegrityError for lengths that lie: each codec allocates what the header says, and
    Blosc would read past the end of `stored`."""
    head = stored[:18].tobytes()
    if name in SHUFFLED:
        wrong = len(head) < 16 or (head[4:8], head[12:16]) != (_u32(length), _u32(len(stored)))
    elif name == "lz4":
        wrong = head[:4] != _u32(length)
    else:
        wrong = _zstd_content_bytes(head) != length
    if wrong:
        raise IntegrityError(f"a compressed frame does not begin as one of {length} bytes")


def _zstd_content_bytes(head: bytes) -> int | None:
    """What a frame says that it holds (RFC 8878, 3.1.1.1); None when it does not say."""
    if head[:4] != b"\x28\xb5\x2f\xfd" or len(head) < 5:
        return None
    flags = head[4]
    alone = flags >> 5 & 1  # then there is no window descriptor
    at = 5 + (1 - alone) + (0, 1, 2, 4)[flags & 3]
    width = (alone, 2, 4, 8)[flags >> 6]
    field = head[at : at + width]
    if not width or len(field) < width:
        return None
    return int.from_bytes(field, "little") + (256 if width == 2 else 0)


def _u32(number: int) -> bytes:
    return number.to_bytes(4, "little")


__all__ = ["NAMES", "SHUFFLED", "Encode", "decode", "encoder"]
