"""How likely a group of devices loses data: formulae, simulations, failures that come together."""

from hpstore.durability.domain_sampling import sample_crossings
from hpstore.durability.failure_domains import (
    DOMAIN,
    DomainDevice,
    FailureDomain,
    SharedCause,
    crossings_per_year,
    domain_tree,
    regular_tree,
)
from hpstore.durability.independent_failures import (
    HOURS_PER_YEAR,
    Estimate,
    Floats,
    Group,
    Losses,
    RepairWindow,
    Sectors,
    in_a_year,
    longest_repair_hours,
    losses_per_year,
    nines,
    split,
    total_per_year,
    unreadable_per_year,
    window,
    years_to_loss,
)
from hpstore.durability.scheme_table import SCHEMES, Scheme, compare
from hpstore.durability.shared_repair import SharedBandwidth, rebuild_hours

__all__ = [
    "DOMAIN",
    "HOURS_PER_YEAR",
    "SCHEMES",
    "DomainDevice",
    "Estimate",
    "FailureDomain",
    "Floats",
    "Group",
    "Losses",
    "RepairWindow",
    "Scheme",
    "Sectors",
    "SharedBandwidth",
    "SharedCause",
    "compare",
    "crossings_per_year",
    "domain_tree",
    "in_a_year",
    "longest_repair_hours",
    "losses_per_year",
    "nines",
    "rebuild_hours",
    "regular_tree",
    "sample_crossings",
    "split",
    "total_per_year",
    "unreadable_per_year",
    "window",
    "years_to_loss",
]
