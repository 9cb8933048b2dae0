"""Which blocks a cache keeps: by expected next use, known or learned. numpy only, no I/O."""

from hpstore.loaders.policy.plans import Plan, Wanted
from hpstore.loaders.policy.policy import CachePolicy

__all__ = ["CachePolicy", "Plan", "Wanted"]
