"""Settings of the agent: the table [agent] of a pool.toml, and [agent.policy] for the policy."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

from hpstore.config import PoolConfig, parse_table, setting, with_advanced
from hpstore.errors import ConfigError
from hpstore.health.policy.states import PolicyConfig, Role
from hpstore.units import MIB

_NOT_WRITTEN = ("role", "dry_run", "probation_shares")  # of the policy


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """How often the agent looks, and how hard it works."""

    scrub_days: float = setting(14.0, "that one pass over all data takes; 0: no scrub")
    heal_share_busy: float = setting(
        0.3, "share of the time that rebuilds take while others use the disks"
    )
    heal_share_idle: float = setting(0.9, "share of the time that rebuilds take otherwise")
    heal_bytes_per_second: int = setting(0, "a further limit of rebuilds; 0: none")
    host_wait_seconds: float = setting(
        900.0, "that a host must be away before what it held is rebuilt elsewhere"
    )
    rebalance_spread: float = setting(
        0.1, "difference in fullness above which columns are moved; 0: never"
    )
    smart_hours: float = setting(6.0, "between two reads of the disks' own counters; 0: none")
    host: str = setting(
        "", "name of this host in the pool, where addresses do not say which disks are its own"
    )
    forecast_model: str = setting(
        "", "path of a trained model (JSON); by default the sum of error counters alone"
    )
    tick_seconds: float = setting(5.0, "between two rounds", advanced=True)
    probe_seconds: float = setting(
        15.0, "between two probes (write, sync, read) of a device; MinIO's figure", advanced=True
    )
    survey_seconds: float = setting(300.0, "between two walks over all keys", advanced=True)
    again_seconds: float = setting(
        3600.0, "until a rebuild that could do nothing is tried again", advanced=True
    )
    foreground_bytes_per_second: int = setting(
        4 * MIB, "of others; above it the disks are busy", advanced=True
    )
    keeper_seconds: float = setting(
        15.0, "that the keeper's record stands still, until another agent takes over", advanced=True
    )
    smart_timeout_seconds: float = setting(20.0, "for each disk", advanced=True)
    forecast_far: float = setting(
        0.01, "share of healthy drives that may be warned of", advanced=True
    )
    policy: PolicyConfig = field(default_factory=lambda: PolicyConfig(role=Role.AGENT))

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            if limit.name.endswith(("_seconds", "_days", "_hours")) and not 0 <= value < 1e9:
                raise ConfigError(f"{limit.name} of the agent must be from 0 on and finite")
        for name in (
            "tick_seconds",
            "probe_seconds",
            "survey_seconds",
            "smart_timeout_seconds",
            "keeper_seconds",
        ):
            if not getattr(self, name):
                raise ConfigError(f"{name} of the agent must be above 0")
        for name in ("heal_share_idle", "heal_share_busy"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"{name} of the agent must be above 0, and at most 1")
        for name in ("heal_bytes_per_second", "foreground_bytes_per_second"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} of the agent must not be negative")
        if not 0 <= self.rebalance_spread <= 1:
            raise ConfigError("rebalance_spread of the agent must be from 0 to 1")
        if not 0 < self.forecast_far <= 0.5:
            raise ConfigError("forecast_far of the agent must be above 0, and at most 0.5")


def agent_config(pool: PoolConfig, *, dry_run: bool = False) -> AgentConfig:
    """The agent's settings for a pool. Raises ConfigError that names the nearest valid key."""
    raw = dict(pool.agent)
    table = raw.pop("policy", {})
    if not isinstance(table, dict):
        raise ConfigError(f"{pool.path}: [agent.policy] must be a table")
    where = f"{pool.path}: [agent]"
    raw = with_advanced(raw, raw.pop("advanced", {}), where=f"{pool.path}: [agent.advanced]")
    policy = parse_table(
        table,
        PolicyConfig(role=Role.AGENT),
        where=f"{pool.path}: [agent.policy]",
        without=_NOT_WRITTEN,
    )
    config = parse_table(raw, AgentConfig(), where=where, without=("policy",))
    return replace(config, policy=replace(policy, dry_run=dry_run))
