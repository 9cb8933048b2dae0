"""Failures that come together and repairs that share bandwidth: formulae against simulations."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from hpstore.durability import (
    DomainDevice,
    Group,
    SharedBandwidth,
    SharedCause,
    crossings_per_year,
    domain_tree,
    hazard_per_year,
    losses_per_year,
    rebuild_hours,
    regular_tree,
    sample_crossings,
    split,
    years_to_loss,
)
from hpstore.errors import ConfigError
from tests.unit.domain_simulation import simulate_domains
from tests.unit.event_simulation import simulate

TALK = Group(data=6, parity=3, afr=0.005, repair_hours=156)
FAST = Group(data=4, parity=2, afr=0.4, repair_hours=200)
HOSTS = SharedCause(kind="host", events_per_year=0.3, units=2)
RACKS = SharedCause(kind="rack", events_per_year=0.1, units=4, hit=0.7)
BATCH = SharedCause(kind="batch", events_per_year=0.5, hit=0.2)


def losses(group: Group, *causes: SharedCause) -> float:
    return crossings_per_year(
        regular_tree(group, causes), repair_hours=group.repair_hours, lost=group.parity
    )


@pytest.mark.parametrize("group", [TALK, FAST, Group(data=1, parity=0, afr=0.1, repair_hours=9)])
def test_without_shared_causes_it_is_the_closed_form(group: Group) -> None:
    """To nine digits, at 1e-12 too."""
    assert losses(group) == pytest.approx(losses_per_year(group), rel=1e-9)
    never = SharedCause(kind="host", events_per_year=0.0, units=3)
    assert losses(group, never) == pytest.approx(losses_per_year(group), rel=1e-9)


@pytest.mark.parametrize(
    "causes",
    [(HOSTS,), (RACKS,), (BATCH,), (HOSTS, RACKS), (HOSTS, RACKS, BATCH)],
    ids=["hosts", "racks", "batch", "hosts in racks", "all"],
)
def test_event_simulation_agrees_with_the_formula(causes: tuple[SharedCause, ...]) -> None:
    """At rates where losses are seen: within the interval of the simulation and its bias.

    Devices that are down fail no more in the simulation, also where a blow has struck them: half a
    load, a few per cent here.
    """
    tree = regular_tree(FAST, causes)
    found = simulate_domains(
        tree, repair_hours=200, lost=2, years=20_000, rng=np.random.default_rng(3)
    )
    expected = losses(FAST, *causes)
    assert found.low * 0.97 <= expected <= found.high * 1.03
    assert found.high - found.low < 0.25 * found.value


REAL = (
    SharedCause(kind="host", events_per_year=1e-3, units=2),
    SharedCause(kind="batch", events_per_year=1e-3, hit=0.05),
)


@pytest.mark.parametrize(
    ("group", "causes"),
    [(TALK, ()), (TALK, REAL[:1]), (TALK, REAL), (FAST, (HOSTS, RACKS, BATCH))],
    ids=["none", "hosts", "hosts and a batch", "fast, all"],
)
def test_sampling_agrees_with_the_formula_at_real_rates(
    group: Group, causes: tuple[SharedCause, ...]
) -> None:
    """Down to 1e-12 a year: within 4 standard deviations, which are a few per cent."""
    found = sample_crossings(
        regular_tree(group, causes),
        repair_hours=group.repair_hours,
        lost=group.parity,
        draws=200_000,
        rng=np.random.default_rng(11),
    )
    expected = losses(group, *causes)
    assert abs(found.value - expected) <= 2 * (found.high - found.low) / 2 * 1.03
    assert found.high - found.low < 0.25 * found.value


def test_sampling_agrees_with_a_pools_domains() -> None:
    """Three hosts of three devices with at most two units each, 2+2, one loss in 10^6 years."""
    members = {name: [DomainDevice(afr=0.02)] * 3 for name in "abc"}
    tree = domain_tree(members, (SharedCause(kind="domain", events_per_year=0.002),), units_most=2)
    found = sample_crossings(
        tree, repair_hours=20, lost=2, draws=100_000, rng=np.random.default_rng(5)
    )
    expected = crossings_per_year(tree, repair_hours=20, lost=2)
    assert expected < 1e-5
    assert abs(found.value - expected) <= found.high - found.low
    with pytest.raises(ConfigError, match="too few"):
        sample_crossings(tree, repair_hours=20, lost=2, draws=99, rng=np.random.default_rng(5))


def test_a_pools_domains_cost_a_stripe_no_more_than_their_units() -> None:
    """Three domains of three devices, a stripe with one unit in each: three devices of one domain
    are one lost unit. Against the simulation, and far below what counting devices says."""
    members = {name: [DomainDevice(afr=0.8)] * 3 for name in "abc"}
    causes = (SharedCause(kind="domain", events_per_year=0.2),)
    capped, counted = (domain_tree(members, causes, units_most=most) for most in (1, None))
    found = simulate_domains(
        capped, repair_hours=300, lost=1, years=20_000, rng=np.random.default_rng(5)
    )
    expected = crossings_per_year(capped, repair_hours=300, lost=1)
    assert found.low * 0.97 <= expected <= found.high * 1.03
    assert expected < 0.8 * crossings_per_year(counted, repair_hours=300, lost=1)


def test_one_event_that_takes_more_than_parity_is_the_whole_loss() -> None:
    """4 units of 6+3 in an enclosure that dies once in a hundred years: two of the two whole
    enclosures lose data, the ninth unit is alone. The nines are those of the enclosures."""
    cause = SharedCause(kind="enclosure", events_per_year=0.01, units=4)
    assert losses(TALK, cause) == pytest.approx(0.02, rel=1e-3)
    spread = SharedCause(kind="enclosure", events_per_year=0.01, units=3)
    assert losses(TALK, spread) < 1e-3


def test_slower_repair_never_lowers_the_hazard() -> None:
    """From an hour to ten years of repair, through times in which almost all is always lost; there
    it is what still strikes a group with m lost, within a tenth."""
    cause = SharedCause(kind="host", events_per_year=2.0, units=2, hit=0.5)
    tree = regular_tree(FAST, (cause,))
    hazards = [
        hazard_per_year(tree, repair_hours=hours, lost=2) for hours in np.geomspace(1, 87_600, 25)
    ]
    assert all(b >= a for a, b in pairwise(hazards[:23]))
    assert hazards[-1] == pytest.approx(hazards[22], rel=0.1)
    assert crossings_per_year(tree, repair_hours=87_600, lost=2) < 0.01 * hazards[-1]
    rare = crossings_per_year(tree, repair_hours=1, lost=2)
    assert hazards[0] == pytest.approx(rare, rel=1e-3)


def test_a_rack_of_hosts_must_hold_them_whole() -> None:
    """Three units of a rack cannot hold hosts of two; `all` units can."""
    with pytest.raises(ConfigError, match="hold one another whole"):
        regular_tree(FAST, (HOSTS, replace(RACKS, units=3)))
    assert regular_tree(FAST, (HOSTS, replace(RACKS, units=0))).device_count() == 6


@pytest.mark.parametrize("width", range(4, 20))
def test_domains_that_are_filled_in_part_hold_what_is_left(width: int) -> None:
    """Enclosures of 2 in racks of 4, 8 in a room: as many devices as the group has, and a rack of
    four that is full is a loss by itself, one of three is not."""
    group = Group(data=width - 1, parity=1, afr=1e-6, repair_hours=1.0)
    causes = [
        SharedCause(kind=kind, events_per_year=rate, units=units)
        for kind, rate, units in (("enclosure", 0.0, 2), ("rack", 0.01, 4), ("room", 0.0, 8))
    ]
    assert regular_tree(group, causes).device_count() == width
    three = replace(group, data=max(1, width - 3), parity=min(3, width - 1))
    full = width // 4
    assert losses(three, *causes) == pytest.approx(0.01 * full, rel=1e-3, abs=1e-7)


@pytest.mark.parametrize(
    "wrong",
    [
        {"events_per_year": -1.0},
        {"events_per_year": math.nan},
        {"hit": 1.1},
        {"hit": math.nan},
        {"units": -1},
    ],
)
def test_a_cause_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        SharedCause(**{"kind": "host", "events_per_year": 0.1, **wrong})


# --- repairs that share bandwidth -----------------------------------------------------------


@pytest.mark.parametrize("streams", [1, 2])
def test_repairs_that_share_bandwidth_agree_with_the_event_simulation(streams: int) -> None:
    """Exponential repairs, one or two at full speed: losses are those of the queue's formula."""
    group = Group(data=4, parity=2, afr=0.6, repair_hours=300, repair_streams=streams)
    found = simulate(group, years=20, groups=3000, rng=np.random.default_rng(3), fixed=False)
    expected = losses_per_year(group)
    assert found.holds(expected)
    assert expected > 1.2 * losses_per_year(replace(group, repair_streams=0)) or streams == 2
    assert found.high - found.low < 0.2 * found.value


def test_splitting_agrees_with_shared_repairs_at_real_rates() -> None:
    """10 nines; m! times as many losses as with repairs that do not slow each other down."""
    group = replace(TALK, repair_streams=1)
    found = split(group, paths=40_000, rng=np.random.default_rng(7), fixed=False)
    assert found.holds(losses_per_year(group))
    assert found.value == pytest.approx(1 / years_to_loss(group), rel=0.1)
    assert losses_per_year(group) == pytest.approx(6 * losses_per_year(TALK), rel=0.01)


def test_a_rebuild_beside_training_takes_as_long_as_one_played_second_by_second() -> None:
    """Training uses the disks in 70 % of the seconds, drawn at random; 10 devices, 8+2."""
    bandwidth = SharedBandwidth(bytes_per_second=1e6, training=0.7)
    rng = np.random.default_rng(2)
    lost, devices, data = 2 * 10**9, 10, 8
    left = (data + 1) * lost / (devices - 1)  # of the bytes of each device
    seconds = 0
    while left > 0:
        left -= 1e6 * (0.3 if rng.random() < 0.7 else 0.9)
        seconds += 1
    found = rebuild_hours(lost, bandwidth, data=data, devices=devices, spare=False)
    assert found * 3600 == pytest.approx(seconds, rel=0.03)


def test_one_new_device_takes_all_writes() -> None:
    """A spare of 1 TB at 100 MB/s is 2.8 hours at best; in a tenth of the time, ten times that."""
    alone = SharedBandwidth(bytes_per_second=1e8, share_idle=1.0)
    many = rebuild_hours(10**12, alone, data=4, devices=20, spare=True)
    assert many == pytest.approx(10**12 / 1e8 / 3600)
    few = rebuild_hours(10**12, alone, data=4, devices=3, spare=True)
    assert few == pytest.approx(2 * many)  # two others read four units of each
    slow = SharedBandwidth(bytes_per_second=1e8, training=1.0, share_busy=0.1)
    assert rebuild_hours(10**12, slow, data=4, devices=20, spare=True) == pytest.approx(10 * many)


@pytest.mark.parametrize(
    "wrong",
    [
        {"bytes_per_second": 0.0},
        {"bytes_per_second": math.nan},
        {"training": 1.1},
        {"training": 1.0, "share_busy": 0.0},
    ],
)
def test_bandwidth_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        SharedBandwidth(**{"bytes_per_second": 1e6, **wrong})
    with pytest.raises(ConfigError):
        rebuild_hours(1, SharedBandwidth(bytes_per_second=1.0), data=1, devices=1, spare=True)
    with pytest.raises(ConfigError, match="repairs at once"):
        replace(TALK, repair_streams=-1)
