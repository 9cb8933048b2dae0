"""The fsspec file system `hpstore://`."""

from __future__ import annotations

from hpstore.interop.filesystem.filesystem import HpstoreFileSystem

__all__ = ["HpstoreFileSystem"]
