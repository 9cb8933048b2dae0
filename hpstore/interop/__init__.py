"""Other people's interfaces to a pool: fsspec (`hpstore://NAME/key`)."""

from hpstore.interop.filesystem import PoolFileSystem

__all__ = ["PoolFileSystem"]
