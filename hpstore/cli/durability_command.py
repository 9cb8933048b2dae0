"""`hpstore durability`: how many nines a scheme has, by which model, and what that leaves out."""

from __future__ import annotations

import math

import numpy as np

from hpstore.cli import durability_options as given
from hpstore.cli.durability_options import DurabilityOptions, parse_ages, parse_causes
from hpstore.cli.durability_report import DurabilityReport, show_report
from hpstore.cli.options import DataUnits, Json, ParityUnits, SchemeText
from hpstore.cli.output import emit_json
from hpstore.durability import (
    HOURS_PER_YEAR,
    MOST_EVENTS,
    Estimate,
    Group,
    Losses,
    Sectors,
    SharedBandwidth,
    compare,
    crossings_per_year,
    hazard_per_year,
    losses_per_year,
    regular_tree,
    sample_crossings,
    split,
    total_per_year,
    unreadable_per_year,
    window,
    years_to_loss,
)
from hpstore.durability import rebuild_hours as hours_beside_training
from hpstore.errors import ConfigError
from hpstore.format.scheme import PoolScheme, choose_scheme

_SECONDS_PER_HOUR = 3600.0
_NO_REPAIR_TIME = (
    "give --rebuild-hours, or --device-size with --rebuild-rate, or with --device-rate and "
    "--training"
)


def run(
    afr: given.Afr,
    data: DataUnits = None,
    parity: ParityUnits = None,
    scheme: SchemeText = None,
    rebuild_hours: given.RebuildHours = None,
    device_size: given.DeviceSize = None,
    rebuild_rate: given.RebuildRate = None,
    device_rate: given.DeviceRate = None,
    training: given.Training = 0.0,
    wait_hours: given.WaitHours = 0.0,
    repair_streams: given.RepairStreams = 0,
    shared: given.Shared = None,
    groups: given.Groups = 1,
    unreadable: given.Unreadable = None,
    pool: given.PoolOption = None,
    afr_by_age: given.AfrByAge = "",
    wanted: given.WantedNines = 12.0,
    simulate: given.Simulate = 0,
    seed: given.SimulationSeed = 0,
    as_json: Json = False,
) -> None:
    """Estimate the probability of losing data in a year; compare schemes.

    hpstore durability --scheme 6+3 --afr 0.005 --rebuild-hours 156

    hpstore durability --scheme 4+2 --afr 0.01 --device-size 8TB --rebuild-rate 200MB

    hpstore durability --pool pool.toml --afr 0.01 --shared domain:0.005
    """
    options = DurabilityOptions(
        afr=afr,
        rebuild_hours=rebuild_hours,
        device_bytes=device_size or 0,
        rebuild_rate=rebuild_rate or 0,
        device_rate=device_rate or 0,
        training=training,
        wait_hours=wait_hours,
        repair_streams=repair_streams,
        causes=parse_causes(shared or [], in_pool=pool is not None),
        unreadable=unreadable,
        wanted=wanted,
    )
    if pool is None:
        if afr_by_age:
            raise ConfigError("--afr-by-age needs --pool: it takes the age of each of its disks")
        chosen = choose_scheme(data, parity, scheme)
        answer = scheme_report(chosen, options, groups=groups, paths=simulate, seed=seed)
    else:
        from hpstore.cli.durability_pool import pool_report

        if scheme or data or parity or groups != 1 or simulate:
            raise ConfigError("--pool has a scheme: give neither one, nor --groups or --simulate")
        answer = pool_report(pool, options, parse_ages(afr_by_age))
    if as_json:
        emit_json(answer.as_dict())
    else:
        show_report(answer, options.device_bytes)


def scheme_report(
    chosen: PoolScheme, options: DurabilityOptions, *, groups: int, paths: int, seed: int
) -> DurabilityReport:
    """All figures of one scheme. Raises ConfigError."""
    group = Group(
        data=chosen.data,
        parity=chosen.parity,
        afr=options.afr,
        repair_hours=_repair_hours(options, chosen) + options.wait_hours,
        repair_streams=options.repair_streams,
    )
    sectors = _sectors(options)
    losses = _losses(options, sectors)
    _require_separate(options)
    return DurabilityReport(
        group=group,
        groups=groups,
        wanted=options.wanted,
        window=window(group),
        closed_form=losses_per_year(group) * groups,
        markov=groups / years_to_loss(group),
        unreadable=_lost_to(sectors, group, groups, options),
        simulated=_simulated(group, groups, paths, seed, options),
        seed=seed,
        schemes=compare(
            group, wanted=options.wanted, groups=groups, sectors=sectors, losses=losses
        ),
        causes=options.causes,
        shared=_shared(group, options, group.parity) * groups if options.causes else None,
    )


def _repair_hours(options: DurabilityOptions, chosen: PoolScheme) -> float:
    """From a failure on, without the wait."""
    size, rates = options.device_bytes, (options.rebuild_rate, options.device_rate)
    if options.rebuild_hours is not None:
        if any(rates):
            raise ConfigError(_NO_REPAIR_TIME)
        return options.rebuild_hours
    if not size or not any(rates) or all(rates):
        raise ConfigError(_NO_REPAIR_TIME)
    if options.rebuild_rate:
        return size / options.rebuild_rate / _SECONDS_PER_HOUR
    bandwidth = SharedBandwidth(bytes_per_second=options.device_rate, training=options.training)
    return hours_beside_training(
        size, bandwidth, data=chosen.data, devices=chosen.data + chosen.parity, spare=True
    )


def _require_separate(options: DurabilityOptions) -> None:
    if options.causes and options.repair_streams:
        raise ConfigError(
            "--shared takes repairs of a fixed time, --repair-streams makes them depend on one "
            "another: give one of them"
        )


def _sectors(options: DurabilityOptions) -> Sectors | None:
    if options.unreadable is None:
        return None
    if not options.device_bytes:
        raise ConfigError("--unreadable needs --device-size: it counts the bits that are read")
    return Sectors(device_bytes=options.device_bytes, errors_per_bit=options.unreadable)


def _shared(group: Group, options: DurabilityOptions, lost: int) -> float:
    """How often a year the group comes to more than `lost` lost devices, with all causes."""
    tree = regular_tree(group, options.causes)
    return crossings_per_year(tree, repair_hours=group.repair_hours, lost=lost)


def _losses(options: DurabilityOptions, sectors: Sectors | None) -> Losses:
    """Losses a year of a group of any scheme: what the nines of the table are of."""

    def total(group: Group) -> float:
        if not options.causes:
            return total_per_year(group, sectors)
        most = max(cause.events_per_year for cause in options.causes)
        if most * group.repair_hours / HOURS_PER_YEAR > MOST_EVENTS:
            return math.inf  # when the longest repair time is looked for
        tree = regular_tree(group, options.causes)
        found = hazard_per_year(tree, repair_hours=group.repair_hours, lost=group.parity)
        return found + (_lost_to(sectors, group, 1, options) or 0.0)

    return total


def _lost_to(
    sectors: Sectors | None, group: Group, groups: int, options: DurabilityOptions
) -> float | None:
    """Losses a year to sectors that cannot be read, of all groups."""
    if sectors is None:
        return None
    if not options.causes or not group.parity:
        return unreadable_per_year(group, sectors.device_bytes, sectors.errors_per_bit) * groups
    critical = _shared(group, options, group.parity - 1)
    return critical * sectors.chance(group.data) * groups


def _simulated(
    group: Group, groups: int, paths: int, seed: int, options: DurabilityOptions
) -> Estimate | None:
    """By splitting, or, with shared causes, by sampling what came before the last event."""
    if not paths:
        return None
    rng = np.random.default_rng(seed)
    if options.causes:
        found = sample_crossings(
            regular_tree(group, options.causes),
            repair_hours=group.repair_hours,
            lost=group.parity,
            draws=paths,
            rng=rng,
        )
    else:
        found = split(group, paths=paths, rng=rng, fixed=not group.repair_streams)
    return Estimate(value=found.value * groups, low=found.low * groups, high=found.high * groups)
