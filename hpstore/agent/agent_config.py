"""Settings of the agent: the table [agent] of a pool.toml, and [agent.policy] for the policy."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

from hpstore.config import PoolConfig, parse_table
from hpstore.errors import ConfigError
from hpstore.health.policy.states import PolicyConfig, Role
from hpstore.units import MIB

_NOT_WRITTEN = ("role", "dry_run", "probation_shares")  # of the policy


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """How often the agent looks, and how hard it works."""

    tick_seconds: float = 5.0
    probe_seconds: float = 15.0  # between two writes + syncs + reads of a device; MinIO's figure
    survey_seconds: float = 300.0  # between two walks over all keys
    again_seconds: float = 3600.0  # until a rebuild that could do nothing is tried again
    heal_share_idle: float = 0.9  # of the time, and so of the bandwidth that it would have alone
    heal_share_busy: float = 0.3  # while others use the disks, or nobody can tell
    foreground_bytes_per_second: int = 4 * MIB  # of others: above it the disks are busy
    heal_bytes_per_second: int = 0  # a further limit; 0 for none
    rebalance_spread: float = 0.1  # of fullness, above which columns are moved; 0: never
    scrub_days: float = 14.0  # that one pass over all data takes; 0 for no scrub
    smart_hours: float = 6.0  # between two looks at the disks' own counters; 0 for none
    smart_timeout_seconds: float = 20.0  # for each disk
    forecast_model: str = ""  # a trained model (JSON); "" for the rule score alone
    forecast_far: float = 0.01  # share of healthy drives that may be warned of
    policy: PolicyConfig = field(default_factory=lambda: PolicyConfig(role=Role.AGENT))

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            if limit.name.endswith(("_seconds", "_days", "_hours")) and not 0 <= value < 1e9:
                raise ConfigError(f"{limit.name} of the agent must be from 0 on and finite")
        for name in ("tick_seconds", "probe_seconds", "survey_seconds", "smart_timeout_seconds"):
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
    policy = parse_table(
        table, PolicyConfig(role=Role.AGENT), where=f"{pool.path}: [agent.policy]",
        without=_NOT_WRITTEN,
    )  # fmt: skip
    config = parse_table(raw, AgentConfig(), where=where, without=("policy",))
    return replace(config, policy=replace(policy, dry_run=dry_run))


__all__ = ["AgentConfig", "agent_config"]
