"""Which blocks a cache keeps: by expected next use, known or learned. numpy only, no I/O."""

from hpstore.loaders.policy.belady import SampledLog, belady, most_hits
from hpstore.loaders.policy.cache_plan import CachePlan, WantedBlocks
from hpstore.loaders.policy.cache_policy import CachePolicy
from hpstore.loaders.policy.trace_simulation import CacheReport, simulate

__all__ = [
    "CachePlan",
    "CachePolicy",
    "CacheReport",
    "SampledLog",
    "WantedBlocks",
    "belady",
    "most_hits",
    "simulate",
]
