"""Schemes compared at one failure rate and repair time. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hpstore.durability.independent_failures import (
    Group,
    Losses,
    Sectors,
    in_a_year,
    longest_repair_hours,
    nines,
    total_per_year,
)

SCHEMES = ((4, 2), (8, 2), (6, 3), (8, 3), (17, 3), (10, 4), (16, 4))  # (k, m) that are compared


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """What a scheme reaches with the same devices."""

    data: int
    parity: int
    overhead: float  # bytes stored for a byte of data
    nines: float  # of a year without loss
    longest_repair_hours: float  # at which it still has the nines that are wanted
    reaches: bool


def compare(
    group: Group,
    *,
    wanted: float,
    groups: int = 1,
    sectors: Sectors | None = None,
    schemes: Sequence[tuple[int, int]] = SCHEMES,
    losses: Losses | None = None,
) -> list[Scheme]:
    """The group's scheme and others at its failure rate and repair time.

    `losses`: losses a year of a group of any scheme; total_per_year() by default.
    """
    losses = losses or (lambda made: total_per_year(made, sectors))
    found = []
    for data, parity in sorted({(group.data, group.parity), *schemes}, key=lambda s: (s[1], s[0])):
        made = replace(group, data=data, parity=parity)
        reached = nines(in_a_year(losses(made), groups))
        found.append(
            Scheme(
                data=data,
                parity=parity,
                overhead=made.width / data,
                nines=reached,
                longest_repair_hours=longest_repair_hours(
                    data,
                    parity,
                    group.afr,
                    wanted=wanted,
                    groups=groups,
                    repair_streams=group.repair_streams,
                    losses=losses,
                ),
                reaches=reached >= wanted,
            )
        )
    return found
