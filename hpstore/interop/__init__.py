"""Other people's interfaces to a pool: fsspec (`hpstore://NAME/key`)."""

from hpstore.interop.filesystem import HpstoreFileSystem

__all__ = ["HpstoreFileSystem"]
