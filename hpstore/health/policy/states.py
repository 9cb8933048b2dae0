"""What the policy knows, is told and decides. Plain data; JSON for the state that persists."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum

from hpstore.config import setting
from hpstore.errors import ConfigError, IntegrityError
from hpstore.format.records import FORMAT, DeviceState, seal, unseal
from hpstore.format.untrusted_bytes import MALFORMED, brief
from hpstore.health.detect.verdicts import HealthState


class Role(StrEnum):
    """Who decides (PROTOCOL 16)."""

    PROCESS = "process"  # about its own reads: suspect, sit-out, probation
    AGENT = "agent"  # about the pool, too: drain, evict, heal


class ActionKind(StrEnum):
    """What the caller is to do; routing of reads follows from the states alone."""

    FORGIVE = "forgive"  # SlowDetector.forgive: the device starts anew
    ACCEPT = "accept"  # SlowDetector.accept: what it does is normal for it
    REPORT = "report"  # a process tells the agent that a device should be drained
    DRAIN = "drain"
    EVICT = "evict"  # what was drained and holds nothing
    READMIT = "readmit"
    HEAL = "heal"  # rebuild what the device held onto others
    RECONCILE = "reconcile"  # judge a returned device's columns before it serves (PROTOCOL 12)
    WARN = "warn"
    ALARM = "alarm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One thing to do. With `dry_run` it is only told."""

    kind: ActionKind
    device: str
    reason: str
    dry_run: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A line of the log: a change of state, or a refusal (`becomes` is then `was`)."""

    at_seconds: float
    device: str
    was: HealthState
    becomes: HealthState
    reason: str
    role: Role
    dry_run: bool = False
    process: str = ""  # that decided it, as process_identity names it; "": not known


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceHealth:
    """What is remembered of one device. Times are seconds since 1970."""

    state: HealthState = HealthState.ONLINE
    since_seconds: float = 0.0
    until_seconds: float = 0.0  # of a sit-out
    score: float = 0.0
    level: int = 0  # the sit-out lasts base * 2**level
    level_since_seconds: float = 0.0
    stage: int = 0  # of the probation
    sitouts: tuple[float, ...] = ()  # when each of the last day began
    sat_out: tuple[float, ...] = ()  # how long each of them lasted, but for the running one
    changes: tuple[float, ...] = ()  # of the last hour
    quiet_since_seconds: float | None = None  # no verdict since
    gone_since_seconds: float | None = None  # does not answer since
    pinned: bool = False  # changed too often; until an operator's word
    manual: bool = False  # an operator's sit-out
    ignored: bool = False  # an operator's word: its slowness is known
    confirmed: bool = False  # the pool has been seen to drain it
    asked_seconds: float = 0.0  # when an action of this state was last asked for
    asked: str = ""  # why
    warned_seconds: float = 0.0
    refused: str = ""  # why the last wish was refused
    pardoned_seconds: float = 0.0  # reports from before count no more
    lapsed: bool = False  # evicted for being away, or about to be: it may come back by itself
    here_since_seconds: float | None = None  # answers since

    def read_share(self, shares: tuple[float, ...]) -> float:
        """Share of its ordinary reads that it gets: 0 sitting out, then `shares` by stage."""
        if self.state is HealthState.PROBATION:
            return shares[min(self.stage, len(shares) - 1)]
        serves = (
            HealthState.ONLINE,
            HealthState.SUSPECT,
            HealthState.READ_ONLY,
            HealthState.DRAINING,
        )
        return 1.0 if self.state in serves else 0.0

    @property
    def takes_columns(self) -> bool:
        """Whether new columns may go there (PROTOCOL 3)."""
        return self.state is HealthState.ONLINE


_TIMES = tuple(
    field.name for field in fields(DeviceHealth) if field.name.endswith("_seconds")
)  # and the tuples but sat_out, which are durations


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyState:
    """Everything that must survive a restart: guards are not reset by one."""

    now_seconds: float = 0.0
    devices: Mapping[str, DeviceHealth] = field(default_factory=dict)
    removals: tuple[float, ...] = ()  # voluntary ones of the last hour
    alarm: str = ""

    def health(self, device: str) -> DeviceHealth:
        """A device's; that of an unknown one is ONLINE."""
        return self.devices.get(device, DeviceHealth())

    def as_of(self, now_seconds: float) -> PolicyState:
        """The same, remembered by a clock that was ahead and has been set right: what lay so long
        back then lies so long back now. Nothing would be due until the old time came again."""
        ahead = self.now_seconds - now_seconds
        return self._with_times(lambda at: at - ahead if at > now_seconds else at)

    def moved(self, by_seconds: float) -> PolicyState:
        """The same, remembered by a clock that has been set forward by so much since."""
        return self._with_times(lambda at: at + by_seconds if at else at)  # 0 is never

    def _with_times(self, then: Callable[[float], float]) -> PolicyState:
        def moved(health: DeviceHealth) -> DeviceHealth:
            known = {name: at for name in _TIMES if (at := getattr(health, name)) is not None}
            return replace(
                health,
                sitouts=tuple(map(then, health.sitouts)),
                changes=tuple(map(then, health.changes)),
                **{name: then(at) for name, at in known.items()},  # type: ignore[arg-type]
            )

        devices = {device: moved(health) for device, health in self.devices.items()}
        removals = tuple(map(then, self.removals))
        now_seconds = then(self.now_seconds)
        return replace(self, now_seconds=now_seconds, devices=devices, removals=removals)

    def encode(self) -> bytes:
        """JSON with a digest."""
        return seal({"format": FORMAT, **asdict(self)})

    @classmethod
    def decode(cls, data: bytes, *, where: str) -> PolicyState:
        """Raises IntegrityError or FormatTooNew."""
        body = unseal(data, where=where)
        try:
            devices, removals = body["devices"], body["removals"]
            if not isinstance(devices, dict) or not isinstance(removals, list):
                raise ValueError("devices or removals are of another kind")
            return cls(
                now_seconds=float(str(body["now_seconds"])),
                devices={str(name): _health(row) for name, row in devices.items()},
                removals=tuple(float(at) for at in removals),
                alarm=str(body["alarm"]),
            )
        except MALFORMED as error:
            raise IntegrityError(f"{where}: health states are malformed: {brief(error)}") from error


def _health(row: Mapping[str, object]) -> DeviceHealth:
    """A device's health from JSON; every field must be there and of its kind."""
    values: dict[str, object] = {}
    example = DeviceHealth()
    for entry in fields(DeviceHealth):
        value, usual = row[entry.name], getattr(example, entry.name)
        if entry.name == "state":
            value = HealthState(str(value))
        elif isinstance(usual, tuple):
            if not isinstance(value, list):
                raise ValueError(f"{entry.name} is not a list")
            value = tuple(float(at) for at in value)
        elif usual is None or isinstance(usual, float):
            value = None if usual is None and value is None else float(str(value))
        elif type(value) is not type(usual):
            raise ValueError(f"{entry.name} is {value!r}")
        values[entry.name] = value
    return DeviceHealth(**values)  # type: ignore[arg-type]  # kinds were checked one by one


class ForecastOutlook(StrEnum):
    """What the failure forecast says of a device."""

    NONE = "none"
    ALARM = "alarm"  # on two of the last three days
    FATAL = "fatal"  # the device itself says that it fails


EXPECTED = {
    ForecastOutlook.ALARM: "it is expected to fail within 14 days",
    ForecastOutlook.FATAL: "the device reports its own failure",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """One member of the pool, as it is now, or one that was evicted."""

    present: bool = True  # answers
    domain: str = ""
    pool_state: DeviceState = DeviceState.ONLINE
    read_only: bool = False  # refuses writes; what it holds can be read
    reported: str = ""  # why it should be drained, as another process says
    probes: int = 0  # reads of a device that sits out, since the sit-out began
    probe_ratio: float = 1.0  # their mean time to that of the peers
    load_low: bool = False  # the pool is hardly used: a return that fails costs little
    writes_slow: bool = False
    forecast: ForecastOutlook = ForecastOutlook.NONE
    empty: bool = False  # drained: holds no column of any object
    evictable: bool = True  # no object would drop below k', and it holds no last copy
    reconciled: bool = False  # its columns have been judged since it came back
    waited_for: bool = False  # its whole host is away, and may come back
    host_gone: bool = False  # its whole host was waited for long enough
    leaving: bool = False  # an eviction of it is queued or under way


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolFacts:
    """The pool as it is now. `devices`: members and evicted ones; of the latter those that have
    been made up for (HEALED) count for nothing, but may come back."""

    parity: int
    devices: Mapping[str, DeviceFacts]
    losses_tolerated: int | None = None  # further ones, by the weakest object; None: not known
    busy: str = ""  # a rebuild, upgrade or maintenance that is running
    spare_capacity: bool = True
    spread: int | None = None  # most columns of an object in a failure domain
    too_much_away: str = ""  # why nothing is evicted: more than parity replaces is away


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyConfig:
    """Limits of the policy. Defaults are those of docs/decisions/0016."""

    role: Role = Role.PROCESS
    dry_run: bool = False
    release_least_seconds: float = setting(
        5.0, "without a verdict, until a suspect is online; twice as long each time", advanced=True
    )
    release_seconds: float = setting(60.0, "that this is at the most", advanced=True)
    idle_probes_least: int = setting(
        8, "the same for a return from a first sit-out while load is low", advanced=True
    )
    sitout_seconds: float = setting(600.0, "of the first sit-out; ZFS's figure", advanced=True)
    sitout_most_seconds: float = setting(240 * 60.0, "of the longest sit-out", advanced=True)
    probes_least: int = setting(
        64, "reads of a device that sits out, before it may return", advanced=True
    )
    probe_ratio_most: float = setting(
        1.3, "of their time to the peers', for a return", advanced=True
    )
    probation_shares: tuple[float, ...] = setting(
        (0.05, 0.25, 1.0), "of reads, stage by stage after a sit-out", advanced=True
    )
    probation_seconds: float = setting(120.0, "of each stage", advanced=True)
    strikes: int = setting(3, "sit-outs in a day, then the device is drained", advanced=True)
    sat_out_most_seconds: float = setting(3600.0, "in a day", advanced=True)
    removed_seconds: float = setting(15.0, "until an absence is one", advanced=True)
    grace_seconds: float = setting(
        900.0, "for a return, before what it held is rebuilt (PROTOCOL 17)", advanced=True
    )
    fault_quiet_seconds: float = setting(
        600.0, "after which a faulted device is tried again", advanced=True
    )
    return_seconds: float = setting(
        60.0, "that a device rebuilt while away answers, until it is readmitted", advanced=True
    )
    retry_seconds: float = setting(600.0, "until an action is asked for again", advanced=True)
    reserve: int = setting(1, "parity that voluntary removals leave; at least 1", advanced=True)
    removal_seconds: float = setting(600.0, "between two voluntary removals", advanced=True)
    removals_per_hour_ratio: float = setting(
        0.1, "of the devices; one is always allowed", advanced=True
    )
    bad_ratio_most: float = setting(0.25, "above it no voluntary removals", advanced=True)
    changes_per_hour: int = setting(6, "of one device, then it is pinned", advanced=True)
    forecast_drains: bool = setting(
        False, "a forecast drains the device; otherwise it only warns", advanced=True
    )

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            if isinstance(value, int | float) and not isinstance(value, bool) and not value > 0:
                raise ConfigError(f"{limit.name} of the health policy must be above 0")
        if list(self.probation_shares) != sorted(self.probation_shares):
            raise ConfigError("probation_shares must ascend")
        if not self.probation_shares or self.probation_shares[-1] != 1.0:
            raise ConfigError("the last of probation_shares must be 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOutcome:
    """The new state, what to do, and why: one line a change or a refusal."""

    state: PolicyState
    actions: tuple[Action, ...] = ()
    decisions: tuple[Decision, ...] = ()
