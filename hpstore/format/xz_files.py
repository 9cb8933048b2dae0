"""Bytes of a .xz file, in bounded memory.

Python's lzma.open takes as much memory for the dictionary as a header of 13 bytes says: 4 GiB.
"""

from __future__ import annotations

import io
import lzma
from typing import BinaryIO

DECODER_BYTES = 256 << 20  # `xz -9` wants 65 MiB
_PIECE_BYTES = 64 << 10


def open_xz(file: BinaryIO) -> io.BufferedReader:
    """What a .xz file holds, to be read and sought forward; `file` stays the caller's.

    Raises lzma.LZMAError, while it is read, for what is damaged or wants more than DECODER_BYTES,
    EOFError for what is cut short.
    """
    return io.BufferedReader(_Inflated(file), _PIECE_BYTES)


class _Inflated(io.RawIOBase):
    """One stream after another. Forward only."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._at = file, 0
        self._decoder: lzma.LZMADecompressor | None = _decoder()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # as it is called
        data = self._read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Forward from the beginning only."""
        if whence != io.SEEK_SET or offset < self._at:
            raise io.UnsupportedOperation("a compressed file is read forward")
        while self._at < offset and self._read(min(offset - self._at, _PIECE_BYTES)):
            pass
        return self._at

    def _read(self, most: int) -> bytes:
        while self._decoder is not None and most:
            if self._decoder.eof:
                self._decoder = self._next_stream(self._decoder.unused_data)
                continue
            raw = self._file.read(_PIECE_BYTES) if self._decoder.needs_input else b""
            if self._decoder.needs_input and not raw:
                raise EOFError("the compressed file is cut short")
            data = self._decoder.decompress(raw, most)
            if data:
                self._at += len(data)
                return data
        return b""

    def _next_stream(self, rest: bytes) -> lzma.LZMADecompressor | None:
        """A decoder of what follows a stream, padding left out; None at the end."""
        rest = rest.lstrip(b"\0")
        while not rest:
            more = self._file.read(_PIECE_BYTES)
            if not more:
                return None
            rest = more.lstrip(b"\0")
        made = _decoder()
        made.decompress(rest, 0)
        return made


def _decoder() -> lzma.LZMADecompressor:
    return lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=DECODER_BYTES)
