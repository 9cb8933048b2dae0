"""A cache of blocks in memory and on a local disk, for readers of slow sources."""

from hpstore.loaders.cache.block_cache import AnyAttached, Cache
from hpstore.loaders.cache.block_source import BlockSource, MemoryLost
from hpstore.loaders.cache.local_reader import Attached
from hpstore.loaders.cache.shared_reader import SharedAttached

__all__ = ["AnyAttached", "Attached", "BlockSource", "Cache", "MemoryLost", "SharedAttached"]
