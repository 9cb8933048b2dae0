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

from hpstore.errors import ConfigError
from hpstore.format.xz_files import open_xz
from hpstore.loaders.ingestion.source_paths import SourceFile

COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
# what a damaged or cut file makes a decompressor raise
STREAM_ERRORS = (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError)
_PIECE_BYTES = 1 << 20


@contextmanager
def decompressed(file: SourceFile) -> Iterator[IO[bytes]]:
    """The bytes that a file holds, to be read forward. Raises ConfigError where zstd needs pyarrow;
    reading raises STREAM_ERRORS."""
    name = file.name.lower()
    with file.open("rb") as raw:
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
    try:
        import pyarrow
    except ImportError as error:
        raise ConfigError("zstd files need pyarrow: pip install 'hpstore[parquet]'") from error
    return pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, "r"), "zstd")
