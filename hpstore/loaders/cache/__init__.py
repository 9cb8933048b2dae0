"""A cache of blocks in memory and on a local disk, for readers of slow sources."""

from hpstore.loaders.cache.attached import Attached
from hpstore.loaders.cache.cache import Cache
from hpstore.loaders.cache.client import SharedAttached
from hpstore.loaders.cache.source import BlockSource, MemoryLost

__all__ = ["Attached", "BlockSource", "Cache", "MemoryLost", "SharedAttached"]
