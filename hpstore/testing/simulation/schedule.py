"""A schedule is data: turns of processes and of the environment, with the faults in them.

A turn is one whole operation of one process. A fault is met at the nth device operation of a kind
within its turn, so that it means the same when other turns are left out. A process that a fault
pauses goes on before the turn `until`; what happens between is the turns of others.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields, replace

NEVER = 1 << 30
ENVIRONMENT = -1
# of a host, or of the link to one: cut (the link to a device's host), isolate (all links of the
# process' host), freeze (a device's host is stopped), stop (the process' own), fall
HOST_FAULTS = frozenset({"cut", "isolate", "freeze", "stop", "fall"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What happens at, or after, the nth operation `where` on a device in a turn."""

    kind: str  # pause, hang, crash, power, error, clock, away, or of HOST_FAULTS
    where: str = "*"
    nth: int = 1
    after: bool = False
    seconds: float = 0.0  # that pass, or that the clock jumps
    until: int = NEVER
    steps: int = 0  # or after so many device operations of anyone; 0: not
    firm: bool = False  # others that wait do not let it go on
    error: str = ""  # of an error; of a cut: its way, as World.cut_links has it
    times: int = 1  # so many operations on that device fail

    @property
    def label(self) -> str:
        """Its column in the table of coverage."""
        name = self.error if self.kind == "error" else self.kind
        return f"{name} unanswered" if self.kind == "error" and self.after else name

    def __str__(self) -> str:
        parts = [self.label]
        if self.seconds:
            parts.append(f"{self.seconds:g} s")
        if self.times > 1:
            parts.append(f"{self.times} times")
        if self.until < NEVER:
            parts.append(f"until turn {self.until}")
        if self.steps:
            parts.append(f"or {self.steps} operations later")
        if self.firm:
            parts.append("firm")
        return " ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One operation of a process, or an event of the environment."""

    number: int
    process: int  # or ENVIRONMENT
    action: str
    key: str = ""
    size: int = 0
    device: int = 0
    seconds: float = 0.0
    way: str = ""  # of links that are cut
    order: int = 0  # in which calls on several devices are made
    faults: tuple[Fault, ...] = ()

    def __str__(self) -> str:
        who = "environment" if self.process == ENVIRONMENT else f"p{self.process}"
        facts = [self.key] if self.key else []
        if self.size:
            facts.append(f"{self.size} bytes")
        if self.action in DEVICE_ACTIONS:
            facts.append(f"d{self.device}")
        if self.action in HOST_EVENTS:
            facts += [f"host {self.device}", self.way]
        if self.seconds:
            facts.append(f"{self.seconds:g} s")
        text = f"{self.number:3d} {who}: {self.action} {' '.join(facts)}".rstrip()
        return "".join(
            [
                text,
                *(
                    f"; {f} {'after' if f.after else 'at'} its {f.where} no. {f.nth}"
                    for f in self.faults
                ),
            ]
        )


HOST_EVENTS = frozenset({"isolate", "freeze", "fall", "rejoin", "slow", "evict_host"})
CHECKPOINT_ACTIONS = frozenset({"save", "restore", "collect"})
DEVICE_ACTIONS = frozenset(
    {
        "evict",
        "drain",
        "begin_drain",
        "add",
        "readmit",
        "away",
        "back",
        "wipe",
        "die",
        "flip",
        "full",
        "roomy",
        "read_only",
        "writable",
        "snapshot",
        "restore",
        "forge",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The pool, and the machines that use it."""

    data: int
    parity: int
    devices: int
    domains: int = 0  # 0: each device its own
    hosts: int = 0  # device n and process n are on host n mod hosts, its domain; 0: one machine
    outside: bool = False  # the pool's registers are outside of its devices
    processes: int = 2
    offsets_ms: tuple[int, ...] = (0, 0, 0, 0)  # of the processes' clocks
    drifts: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0)
    own_places: bool = False  # each process has its own run directory
    recycle_bytes: int = 0
    put_deadline_seconds: float = 600.0
    tombstone_seconds: float = 3600.0
    keep_last: int = 2  # steps, in retention
    within: bool = False  # manifests hold the bytes of the tensors, as those of small saves do
    keyed: bool = False  # the pool has a key

    def __str__(self) -> str:
        defaults = {f.name: f.default for f in fields(self)}
        other = [f"{n}={v}" for n, v in asdict(self).items() if v != defaults[n]]
        return " ".join(other)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """All of one simulation."""

    seed: int  # of nonces, and of what a power cut leaves
    setup: Setup
    turns: tuple[Turn, ...] = field(default=())

    def __str__(self) -> str:
        return "\n".join([f"seed {self.seed}: {self.setup}", *map(str, self.turns)])

    @property
    def saves(self) -> bool:
        """Whether a process works with checkpoints."""
        return any(turn.action in CHECKPOINT_ACTIONS for turn in self.turns)

    def to_json(self) -> str:
        """As text that from_json takes, defaults left out, one turn a line."""
        head = json.dumps({"seed": self.seed, "setup": _short(self.setup)})
        turns = ",\n".join(json.dumps(_short(turn)) for turn in self.turns)
        return f'{head[:-1]}, "turns": [\n{turns}\n]}}\n'

    @classmethod
    def from_json(cls, text: str) -> Schedule:
        """Inverse of to_json()."""
        body = json.loads(text)
        setup = body["setup"]
        for name in ("offsets_ms", "drifts"):
            if name in setup:
                setup[name] = tuple(setup[name])
        turns = []
        for turn in body["turns"]:
            faults = tuple(Fault(**fault) for fault in turn.pop("faults", ()))
            turns.append(Turn(**turn, faults=faults))
        return cls(seed=body["seed"], setup=Setup(**setup), turns=tuple(turns))

    def without(self, drop: set[int]) -> Schedule:
        """Without the turns at these places."""
        return replace(self, turns=tuple(t for i, t in enumerate(self.turns) if i not in drop))


def _short(thing: Setup | Turn | Fault) -> dict[str, object]:
    defaults = {f.name: f.default for f in fields(thing)}
    found: dict[str, object] = {}
    for name, default in defaults.items():
        value = getattr(thing, name)
        if value != default:
            found[name] = [_short(f) for f in value] if name == "faults" else value
    return found
