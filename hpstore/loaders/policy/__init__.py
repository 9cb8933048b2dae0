"""Which blocks a cache keeps: by expected next use, known or learned. numpy only, no I/O."""

from hpstore.loaders.policy.belady import SampledLog, belady, most_hits
from hpstore.loaders.policy.plans import Plan, Wanted
from hpstore.loaders.policy.policy import CachePolicy
from hpstore.loaders.policy.simulation import CacheReport, simulate

__all__ = [
    "CachePolicy",
    "CacheReport",
    "Plan",
    "SampledLog",
    "Wanted",
    "belady",
    "most_hits",
    "simulate",
]
