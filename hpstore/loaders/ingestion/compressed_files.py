"""Files read forward, decompressed by the ending of their name: gzip, bzip2, xz, zstd."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, BinaryIO, cast

from hpstore.format.xz_files import open_xz
from hpstore.loaders.ingestion.optional_packages import needed
from hpstore.loaders.ingestion.source_paths import SourceFile

COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
# what a damaged or cut file makes a decompressor raise
STREAM_ERRORS = (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError)
_PIECE_BYTES = 1 << 20


class FilePosition:
    """How far the file is that is read now; of a compressed one in its stored bytes."""

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self._last = 0

    def follow(self, file: IO[bytes]) -> None:
        """This file is read from now on."""
        self._file, self._last = file, 0

    def reached(self) -> int:
        """Bytes read so far, with what lies in buffers; of a closed file, those at the last call.
        Called by the thread that reads."""
        if self._file is not None:
            with contextlib.suppress(OSError, ValueError):  # closed, or no file that knows
                self._last = self._file.tell()
        return self._last


@contextmanager
def decompressed(file: SourceFile, position: FilePosition | None = None) -> Iterator[IO[bytes]]:
    """The bytes that a file holds, to be read forward. Raises ConfigError where zstd needs pyarrow;
    reading raises STREAM_ERRORS. `position` follows the stored bytes."""
    name = file.name.lower()
    with file.open("rb") as raw:
        if position is not None:
            position.follow(raw)
        if name.endswith((".gz", ".tgz")):
            with gzip.open(raw) as inflated:
                yield cast("IO[bytes]", inflated)
        elif name.endswith(".bz2"):
            with bz2.open(raw) as unpacked:
                yield cast("IO[bytes]", unpacked)
        elif name.endswith(".xz"):
            yield cast("IO[bytes]", open_xz(cast("BinaryIO", raw)))
        elif name.endswith(".zst"):
            with contextlib.closing(_zstd(raw)) as stream:
                yield cast("IO[bytes]", io.BufferedReader(stream, _PIECE_BYTES))
        else:
            yield raw


def _zstd(raw: IO[bytes]) -> Any:  # Any: pyarrow ships no types
    with needed("zstd files need pyarrow", extra="parquet"):
        import pyarrow
    return pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, "r"), "zstd")
