"""A cache of blocks in memory and on a local disk, for readers of slow sources."""

from hpstore.loaders.cache.block_cache import Cache
from hpstore.loaders.cache.block_source import BlockSource, MemoryLost
from hpstore.loaders.cache.local_reader import Attached
from hpstore.loaders.cache.shared_reader import SharedAttached

__all__ = ["Attached", "BlockSource", "Cache", "MemoryLost", "SharedAttached"]
