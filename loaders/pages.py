"""Compression of pages, one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hpstore.codec.galois import Bytes
from hpstore.errors import ConfigError

CODECS = ("lz4", "zstd", "blosc")


def checked_compression(name: str | None) -> str:
    """A codec's name, "" for none. Raises ConfigError."""
    if not name:
        return ""
    if name not in CODECS:
        raise ConfigError(f"compression {name!r} is not one of {', '.join(CODECS)}")
    return name


def compress_pages(
    name: str, payload: Bytes, unit_bytes: int
) -> tuple[Bytes, npt.NDArray[np.uint32]]:
    """Pages compressed and stored back to back at multiples of 4 KiB, and their stored lengths."""
    raise ConfigError(f"compression {name!r} is not there yet")


def read_compressed(data: Any, stream: Any, places: Any) -> list[Bytes]:
    raise ConfigError("compression is not there yet")


__all__ = ["CODECS", "checked_compression", "compress_pages"]
