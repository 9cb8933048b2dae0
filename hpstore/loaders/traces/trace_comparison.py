"""One trace, several capacities, hpstore's policy and the plain ones side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hpstore.errors import ConfigError
from hpstore.loaders.policy import belady, simulate
from hpstore.loaders.policy.cache_plan import Int64s
from hpstore.loaders.policy.directories import Directories, installed
from hpstore.loaders.policy.plain_adaptive import ArcPolicy, LirsPolicy, TinyLfuPolicy
from hpstore.loaders.policy.plain_queues import (
    LfuPolicy,
    LruPolicy,
    S3FifoPolicy,
    SievePolicy,
    TwoQueuePolicy,
)

OURS, CEILING = "hpstore", "MIN"
LEAST_BLOCKS = 10  # of a capacity: below that, shares of it have no meaning
_PIECE = 1 << 20  # requests played to the library at a time

PLAIN: dict[str, Callable[[int, int], Callable[[int], bool]]] = {
    "LRU": lambda room, _: LruPolicy(room).request,
    "LFU": lambda room, _: LfuPolicy(room).request,
    "ARC": lambda room, _: ArcPolicy(room).request,
    "LIRS": lambda room, _: LirsPolicy(room).request,
    "S3-FIFO": lambda room, _: S3FifoPolicy(room).request,
    "SIEVE": lambda room, _: SievePolicy(room).request,
    "W-TinyLFU": lambda room, blocks: TinyLfuPolicy(room, blocks).request,
    "2Q": lambda room, _: TwoQueuePolicy(room).request,
}
"""From a capacity and the number of blocks, both in blocks, to what says whether a request hits."""

POLICIES = (OURS, *PLAIN, CEILING)


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityRow:
    """Hit ratios, 0 to 1, by policy. All requests count, from an empty cache."""

    capacity_blocks: int
    hit_ratios: dict[str, float]

    @property
    def best_plain(self) -> str:
        """Name of the best plain policy that was played; "" without one."""
        played = [name for name in PLAIN if name in self.hit_ratios]
        return max(played, key=self.hit_ratios.__getitem__) if played else ""

    @property
    def difference(self) -> float | None:
        """hpstore less the best plain policy; None unless both were played."""
        best = self.best_plain
        if not best or OURS not in self.hit_ratios:
            return None
        return self.hit_ratios[OURS] - self.hit_ratios[best]


def policies_named(names: str) -> tuple[str, ...]:
    """Policies of a comma-separated list, in the order of POLICIES; "all". Raises ConfigError."""
    wanted = [name.strip().lower() for name in names.split(",") if name.strip()]
    known = {name.lower(): name for name in POLICIES}
    for name in wanted:
        if name not in known and name != "all":
            raise ConfigError(f"no policy is called {name!r}; there are all, {', '.join(POLICIES)}")
    if not wanted or "all" in wanted:
        return POLICIES
    return tuple(name for name in POLICIES if name.lower() in wanted)


def capacities_of(percents: str, blocks: int) -> list[int]:
    """Blocks of a comma-separated list of percents of all blocks. Raises ConfigError."""
    found = []
    for text in percents.split(","):
        try:
            share = float(text)
        except ValueError:
            share = 0.0
        if not 0 < share <= 100:
            raise ConfigError(f"a cache of {text.strip()!r} percent: above 0, at most 100")
        found.append(min(blocks, max(LEAST_BLOCKS, round(share / 100 * blocks))))
    return sorted(set(found))


def plain_ratios(
    names: Sequence[str], requests: Int64s, blocks: int, capacity: int
) -> dict[str, float]:
    """Hit ratios of plain policies, 0 to 1: by the library, which has the same hits, or in Python.

    `requests` int64[n], at least one, of blocks below `blocks`. 0.02 us a request and policy with
    the library, 0.2 to 1.3 in Python.
    """
    if installed() is None or not names:
        asked = requests.tolist()
        made = {name: PLAIN[name](capacity, blocks) for name in names}
        return {name: sum(map(request, asked)) / len(asked) for name, request in made.items()}
    found = {}
    for name in names:  # directories of all at once would take several times the memory
        directory = Directories([name], blocks, capacity, seen=np.zeros(blocks, np.uint8))
        hits = 0
        for start in range(0, len(requests), _PIECE):
            hits += int(np.count_nonzero(directory.request(requests[start : start + _PIECE])))
        found[name] = hits / len(requests)
    return found


def compare(
    requests: Int64s, blocks: int, capacities: Sequence[int], policies: Sequence[str], *, batch: int
) -> Iterator[CapacityRow]:
    """Play a trace to policies at each capacity, in blocks; `batch` as in simulate()."""
    for capacity in capacities:
        plain = [name for name in policies if name in PLAIN]
        ratios = plain_ratios(plain, requests, blocks, capacity)
        if OURS in policies:
            ratios[OURS] = simulate(requests, capacity, batch=batch, blocks=blocks).hit_ratio
        if CEILING in policies:
            ratios[CEILING] = float(belady(requests, capacity).mean())
        shown = {name: ratios[name] for name in policies}
        yield CapacityRow(capacity_blocks=capacity, hit_ratios=shown)
