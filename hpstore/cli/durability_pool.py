"""`hpstore durability --pool`: the devices, domains, rebuild speed and ages of a real pool."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import hpstore
from hpstore.agent import agent_config
from hpstore.agent.rebuild_speeds import measured_speed
from hpstore.agent.smart_watch import disks_of_path
from hpstore.cli.durability_options import DurabilityOptions
from hpstore.cli.durability_report import DurabilityReport, PoolFigures, PoolMember
from hpstore.durability import (
    DomainDevice,
    Group,
    Sectors,
    SharedBandwidth,
    crossings_per_year,
    domain_tree,
    losses_per_year,
    rebuild_hours,
    window,
    years_to_loss,
)
from hpstore.errors import ConfigError
from hpstore.format.records import DeviceState
from hpstore.health.smart.counters import INDEX
from hpstore.health.smart.readout import Readout, read_disk
from hpstore.pool.pool import Pool
from hpstore.units import format_bytes

_SECONDS_PER_HOUR = 3600.0
_HOURS_PER_YEAR = 8766.0
_DISK_SECONDS = 10.0  # for each disk that is asked for its age
_LEFT = (DeviceState.EVICTED, DeviceState.HEALED)

Ages = Sequence[tuple[float, float]]  # years, failure rate from there on


def pool_report(name: str, options: DurabilityOptions, ages: Ages) -> DurabilityReport:
    """All figures of the pool as it is now. Opens it for reading only.

    Raises
    ------
    ConfigError
        An option does not fit, or nothing says how long a rebuild takes.
    HpstoreError
        The pool does not open.
    """
    if options.repair_streams:
        raise ConfigError("--repair-streams is for schemes; --pool takes repairs of a fixed time")
    with hpstore.open(name, read_only=True) as pool:
        figures, hours = _figures(pool, options, ages)
    return _report(figures, hours, options)


def _figures(pool: Pool, options: DurabilityOptions, ages: Ages) -> tuple[PoolFigures, float]:
    """What is known of the pool, and the hours from a failure until all is written again."""
    record, status = pool.admin.record, pool.status()
    rows = {row.device: row for row in status.devices}
    used_most = max((r.total_bytes - r.free_bytes for r in rows.values()), default=0)
    members = []
    for member in record.members:
        if member.state in _LEFT:
            continue
        row = rows.get(member.device_id)
        age = age_years(row.url if row else member.url)
        members.append(
            PoolMember(
                url=row.url if row else member.url,
                domain=member.domain,
                state=row.state if row else "missing",
                used_bytes=row.total_bytes - row.free_bytes if row else used_most,
                age_years=age,
                afr=rate_at(age, ages, options.afr),
            )
        )
    hours, words = _repair_hours(pool, options, len(members), used_most)
    left_out = []
    if status.sharing:
        left_out.append(
            f"disks that die with several devices: {len(status.sharing)} members share one with "
            "others; what they use is counted for each"
        )
    if ages and any(member.age_years is None for member in members):
        left_out.append("the age of disks that did not answer (root can ask them): --afr was taken")
    if not any(cause.kind == "domain" for cause in options.causes):
        left_out.append("failures of whole failure domains (--shared domain:A_YEAR adds them)")
    return (
        PoolFigures(
            name=pool.config.name,
            data=record.data,
            parity=record.parity,
            units_most=record.spread,
            members=tuple(members),
            rebuild_from=words,
            left_out=tuple(left_out),
        ),
        hours,
    )


def _repair_hours(
    pool: Pool, options: DurabilityOptions, devices: int, used_bytes: int
) -> tuple[float, str]:
    """Hours with the wait, and where they come from."""
    settings = agent_config(pool.config)
    wait = options.wait_hours + settings.policy.grace_seconds / _SECONDS_PER_HOUR
    size, data = options.device_bytes or used_bytes, pool.admin.record.data
    if options.rebuild_hours is not None:
        return options.rebuild_hours + wait, "The repair time was given"
    if options.rebuild_rate:
        hours = size / options.rebuild_rate / _SECONDS_PER_HOUR
        return hours + wait, f"{format_bytes(size)} at the rebuild rate that was given"
    if options.device_rate:
        bandwidth = SharedBandwidth(
            bytes_per_second=options.device_rate,
            training=options.training,
            share_busy=settings.heal_share_busy,
            share_idle=settings.heal_share_idle,
        )
        hours = rebuild_hours(size, bandwidth, data=data, devices=devices, spare=False)
        return hours + wait, (
            f"{format_bytes(size)} beside training, which leaves a rebuild "
            f"{100 * bandwidth.share:.0f} % of each device"
        )
    speed = measured_speed(pool.admin.state_directory)
    if speed is None:
        raise ConfigError(
            "no rebuild of this pool has been measured on this node: give --rebuild-hours, or "
            "--rebuild-rate, or --device-rate with --training; an agent keeps the speed of each "
            "rebuild of 64 MiB and more"
        )
    last = datetime.fromtimestamp(speed.last_ms / 1000, UTC).date().isoformat()
    return data * size / speed.bytes_per_second / _SECONDS_PER_HOUR + wait, (
        f"Objects of {format_bytes(data * size)} at {format_bytes(int(speed.bytes_per_second))}/s, "
        f"the median of {speed.rebuilds} rebuilds on this node, the last on {last}"
    )


def _report(pool: PoolFigures, hours: float, options: DurabilityOptions) -> DurabilityReport:
    members: dict[str, list[DomainDevice]] = {}
    for member in pool.members:
        members.setdefault(member.domain, []).append(DomainDevice(afr=member.afr))
    if len(pool.members) <= pool.parity:
        raise ConfigError(
            f"{len(pool.members)} devices with parity {pool.parity}: one device would be enough "
            "to read everything; there is nothing to estimate"
        )
    # any m + 1 devices of the whole pool: what the models without domains know
    group = Group(
        data=len(pool.members) - pool.parity,
        parity=pool.parity,
        afr=sum(member.afr for member in pool.members) / len(pool.members),
        repair_hours=hours,
    )
    tree = domain_tree(members, options.causes, units_most=pool.units_most)
    unreadable = None
    if options.unreadable is not None:
        used = options.device_bytes or max(member.used_bytes for member in pool.members)
        sectors = Sectors(device_bytes=used, errors_per_bit=options.unreadable)
        unreadable = 0.0
        if pool.parity:
            critical = crossings_per_year(tree, repair_hours=hours, lost=pool.parity - 1)
            unreadable = critical * sectors.chance(pool.data)
    return DurabilityReport(
        group=group,
        groups=1,
        wanted=options.wanted,
        window=window(group),
        closed_form=losses_per_year(group),
        markov=1 / years_to_loss(group),
        unreadable=unreadable,
        simulated=None,
        seed=0,
        schemes=[],
        causes=options.causes,
        shared=crossings_per_year(tree, repair_hours=hours, lost=pool.parity),
        pool=pool,
    )


def age_years(url: str) -> float | None:
    """Power-on time of the oldest disk below a device; None where no disk says it."""
    path = url.removeprefix("file://")
    if "://" in path:
        return None
    hours = []
    for disk in disks_of_path(path):
        found = read_disk(disk, timeout_seconds=_DISK_SECONDS)
        if found.readout is Readout.OK and found.values[INDEX["smart_9"]] >= 0:
            hours.append(found.values[INDEX["smart_9"]])
    return max(hours) / _HOURS_PER_YEAR if hours else None


def rate_at(age: float | None, ages: Ages, otherwise: float) -> float:
    """The failure rate at an age, of the last step that it has reached. Pure."""
    if age is None or not ages:
        return otherwise
    return [rate for years, rate in ages if years <= age][-1]
