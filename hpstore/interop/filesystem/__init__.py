"""The fsspec file system `hpstore://`."""

from __future__ import annotations

from hpstore.interop.filesystem.filesystem import PoolFileSystem

__all__ = ["PoolFileSystem"]
