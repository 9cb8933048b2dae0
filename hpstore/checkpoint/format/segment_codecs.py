"""Optional compression of items, frame by frame."""

from __future__ import annotations

from hpstore.codec import compression
from hpstore.codec.compression import encoder
from hpstore.codec.galois import Bytes
from hpstore.errors import CheckpointError, ConfigError

CODECS = ("lz4", "zstd", "shuffle-lz4")


def checked_codec(name: str | None) -> str:
    """A codec's name, "" for none. Raises CheckpointError."""
    if not name:
        return ""
    if name not in CODECS:
        raise CheckpointError(f"compression {name!r} is not one of {', '.join(CODECS)}")
    return name


def decode(name: str, stored: Bytes, out: Bytes) -> None:
    """Decompress one frame into `out`. Raises IntegrityError when it does not give its length."""
    try:
        compression.decode(name, stored, out)
    except ConfigError as error:
        raise CheckpointError(str(error)) from error


__all__ = ["CODECS", "checked_codec", "decode", "encoder"]
