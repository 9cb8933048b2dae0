"""Optional compression of items, frame by frame."""

from __future__ import annotations

from hpstore.codec import compression
from hpstore.codec.galois import Bytes
from hpstore.errors import CheckpointError, ConfigError

CODECS = ("lz4", "zstd", "shuffle-lz4")


def decode(name: str, stored: Bytes, out: Bytes) -> None:
    """Decompress one frame into `out`. Raises IntegrityError when it does not give its length."""
    try:
        compression.decode(name, stored, out)
    except ConfigError as error:
        raise CheckpointError(str(error)) from error
