"""How much memory pages of a loader may take: its own, and the node's."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hpstore.errors import ConfigError
from hpstore.loaders.batching.loader_options import LoaderMemory
from hpstore.loaders.batching.node_pages import NodePageMemory, NodePages
from hpstore.loaders.batching.page_memory import PageMemory
from hpstore.loaders.cache import Cache
from hpstore.loaders.dataset.record_reader import StoredData
from hpstore.loaders.dataset.record_stream import Stream
from hpstore.runtime.budget import available_bytes
from hpstore.units import bytes_argument

_log = logging.getLogger(__name__)
CACHE_SHARE = 0.25  # of the memory that is available, for pages, with cache="auto"
SWITCH = "HPSTORE_NODE_MEMORY"  # "off": no loader of this process uses the node's memory


@dataclass(frozen=True, slots=True, kw_only=True)
class PageBudget:
    """Bytes for the pages of a dataset.

    `own_bytes`: in memory of this process; `part`: of the node's memory, where `auto`, which a
    dataset of a mixture has less than all of; `keep_seconds`: 0 without the node's memory.
    """

    own_bytes: int
    auto: bool = False
    keep_seconds: float = 0.0
    part: float = 1.0

    def for_part(self, part: float) -> PageBudget:
        """Of one dataset of a mixture."""
        return replace(self, own_bytes=int(self.own_bytes * part), part=part)

    def node(self, data: StoredData) -> NodePages | None:
        """The node's memory for a dataset; None where it is not used."""
        if not self.keep_seconds or not self.own_bytes:
            return None
        return NodePages(data, lambda taken: self.bound(taken), self.keep_seconds)

    def bound(self, taken_bytes: int) -> int:
        """Of all that the node may keep for this user, of which so much is taken now."""
        share = int(CACHE_SHARE * (available_bytes() + taken_bytes))
        return max(share, int(self.own_bytes / self.part))

    def keeps_all(self, streams: Sequence[Stream], node: NodePages | None) -> bool:
        """Whether all pages of these streams stay in memory, this process's own or the node's.

        One copy serves all ranks of a node: with a keeper they need not divide the quarter. What
        lies in the node's memory already is used, however little room there is for more.
        """
        needed = sum(PageMemory.bytes_needed(s, int(s.page_starts[-1])) for s in streams)
        if needed <= self.own_bytes:
            return True
        if node is None or not self.auto:
            return False
        return node.use_all(streams, room=needed <= node.bound_bytes() * self.part)


def page_budget(cache: object, memory: LoaderMemory) -> PageBudget:
    """What the arguments of a loader give to its pages. Raises ConfigError."""
    return PageBudget(
        own_bytes=cache_budget(cache),
        auto=cache == "auto",
        keep_seconds=0.0 if _switched_off() else memory.node_minutes * 60.0,
    )


def cache_budget(cache: object) -> int:
    """Bytes for pages: as many as `cache` says, 0 for None or a Cache, and for "auto" a quarter of
    the memory that is available, which ranks on one node share (LOCAL_WORLD_SIZE, as torchrun
    sets it). Raises ConfigError.
    """
    if cache == "auto":
        return int(CACHE_SHARE * available_bytes()) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if cache is None or isinstance(cache, Cache):
        return 0
    if isinstance(cache, bool) or not isinstance(cache, int | str):
        raise ConfigError(
            f'cache {cache!r}: give "auto", bytes such as "8GiB", a Cache, or None or 0 for none'
        )
    return bytes_argument("cache", cache)


def _switched_off() -> bool:
    found = os.environ.get(SWITCH, "on")
    if found not in ("on", "off"):
        raise ConfigError(f"{SWITCH} is {found[:40]!r} in the environment: set it to on or off")
    return found == "off"


def memory_for(data: StoredData, stream: Stream, node: NodePages | None) -> PageMemory:
    """Memory for all pages of a stream: the node's where there is some, else this process's own."""
    pages = int(stream.page_starts[-1])
    if node is not None and pages:
        try:
            return NodePageMemory(data, stream, node)
        except OSError as error:
            _log.warning("pages are kept in this process's own memory: %s", error)
    return PageMemory(data, stream, pages)
