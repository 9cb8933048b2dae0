"""What a pool survives, and why one does not open: for messages."""

from __future__ import annotations

from collections.abc import Mapping

from hpstore.config import PoolConfig
from hpstore.devices.opener import same_form
from hpstore.errors import TooFewDevices
from hpstore.format.placement import tolerated_domains
from hpstore.format.records import PoolRecord
from hpstore.objects.context import View


def domain_warning(record: PoolRecord) -> str | None:
    """What to tell the operator when failure domains do not carry the parity."""
    sizes: dict[str, int] = {}
    for member in record.members:
        sizes[member.domain] = sizes.get(member.domain, 0) + 1
    lost = tolerated_domains(
        min(record.data + record.parity, len(record.members)),
        min(record.data, max(1, len(record.members) - record.parity)),
        list(sizes.values()),
    )
    if lost >= 1:
        return None
    return (
        f"{len(sizes)} failure domains for {record.data}+{record.parity}: the pool survives "
        f"{record.parity} lost devices, but not the loss of the largest domain"
    )


def too_few_devices(config: PoolConfig, view: View, problems: Mapping[str, str]) -> TooFewDevices:
    """The error of a pool that too few devices answer for, naming members that nothing says where
    to look for: the settings of this host may be older than the pool (r12)."""
    record = view.record
    known = {same_form(url) for url in config.devices}
    unlisted = [
        m.url
        for m in record.members
        if m.device_id in view.missing and same_form(m.url) not in known
    ]
    hint = (
        f"{config.path} does not list {', '.join(unlisted)}, which the pool has gained since: add "
        "them to its `devices`, as this host reaches them. "
        if unlisted
        else ""
    )
    rule = (
        f"all but {record.parity}"
        if record.spread is None
        else f"all but what holds {record.parity} columns of an object ({record.spread} per domain)"
    )
    return TooFewDevices(
        f"pool {config.name!r}: {len(view.devices)} of {len(record.members)} devices answer, "
        f"{rule} are needed to open it. {hint}Nothing is lost by waiting; bring devices back. "
        + "; ".join(problems.values())
    )
