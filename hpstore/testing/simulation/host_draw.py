"""Draw a schedule over several hosts from a seed: what goes wrong between them, and registers.

Most begin with one of the motifs below, each of which needs one rule; what follows is drawn.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from hpstore.testing.simulation.plots import Plot
from hpstore.testing.simulation.schedule import ENVIRONMENT, Fault, Schedule, Setup

_HOUR_MS = 3_600_000
_MINUTE, _HOUR = 60.0, 3600.0
# data, parity, hosts, disks of each
GEOMETRIES = (
    (1, 1, 3, 1),
    (1, 2, 3, 1),
    (2, 1, 3, 1),
    (2, 1, 4, 1),
    (2, 2, 4, 1),
    (2, 2, 4, 2),
    (4, 2, 3, 2),
    (4, 2, 4, 2),
)
_WAYS = ("", "", "to", "from", "kept", "to kept")
_ACTIONS: dict[str, float] = {
    "put": 6,
    "get": 5,
    "put_version": 5,
    "put_absent": 3,
    "delete": 2,
    "settle": 1,
    "list": 1,
    "rebuild": 3,
    "scrub": 2,
    "evict": 1,
    "evict_host": 1,
    "readmit": 2,
    "tend": 2,
    "refresh": 1,
    "reopen": 1,
}
_EVENTS: dict[str, float] = {
    "isolate": 4,
    "freeze": 3,
    "fall": 3,
    "rejoin": 6,
    "slow": 1,
    "sleep": 2,
    "clock": 1,
    "kill": 1,
    "flip": 0.5,
}
_REGISTER_EVENTS: dict[str, float] = {
    "registers_down": 1,
    "registers_slow": 2,
    "registers_back": 3,
    "registers_lost": 0.3,
}


def draw_hosts(seed: int) -> Schedule:
    """The schedule of a seed; always the same."""
    chance = random.Random(f"hosts {seed}")
    plot = Plot(chance, _setup(chance), chance.choice(([100], [20_000], [100, 20_000])))
    if plot.maybe(0.75):
        chance.choice(tuple(MOTIFS.values()))(plot)
    more = chance.choice((0, 1, 2, 4) if plot.turns else (6, 8, 12))
    for _ in range(more):
        _say_something(plot)
    return Schedule(seed=seed, setup=plot.setup, turns=tuple(plot.turns))


def _setup(chance: random.Random) -> Setup:
    data, parity, hosts, disks = chance.choice(GEOMETRIES)
    offsets = [0, 0, 0, 0]
    for process in range(4):
        if chance.random() < 0.3:
            offsets[process] = chance.choice((-_HOUR_MS, _HOUR_MS, -60_000, 60_000))
    return Setup(
        data=data,
        parity=parity,
        devices=hosts * disks,
        hosts=hosts,
        outside=chance.random() < 0.6,
        processes=min(hosts, chance.choice((2, 3, 3, 4))),
        offsets_ms=tuple(offsets),
        tombstone_seconds=chance.choice((700.0, 3600.0)),
        keyed=chance.random() < 0.3,
    )


# --- what is drawn -------------------------------------------------------------------------------


def _pick(plot: Plot, weights: dict[str, float]) -> str:
    return plot.chance.choices(list(weights), list(weights.values()))[0]


def _host(plot: Plot) -> int:
    return plot.chance.randrange(plot.setup.hosts)


def _say_something(plot: Plot) -> None:
    """A turn of a process, with a fault at times, or an event."""
    chance = plot.chance
    if plot.maybe(0.35):
        weights = _EVENTS | (_REGISTER_EVENTS if plot.setup.outside else {})
        _say_event(plot, _pick(plot, weights))
        return
    action = _pick(plot, _ACTIONS)
    faults = (_fault(plot),) if plot.maybe(0.35) else ()
    _do(plot, action, chance.randrange(plot.setup.processes), *faults)
    if faults:
        number = len(plot.turns) - 1
        until = number + chance.choice((1, 2, 3))
        turn = plot.turns[number]
        plot.turns[number] = replace(turn, faults=(replace(faults[0], until=until),))


def _do(plot: Plot, action: str, process: int, *faults: Fault) -> None:
    key = ""
    if action in ("put", "delete"):
        key = "k0"
    elif action in ("put_version", "put_absent"):
        key = "c0"
    elif action in ("get", "settle"):
        key = plot.chance.choice(("k0", "c0"))
    device = _host(plot) if action == "evict_host" else None
    seconds = plot.chance.choice((5.0, 30.0, 90.0)) if action == "tend" else 0.0
    plot.say(action, process, *faults, key=key, device=device, seconds=seconds)


def _say_event(plot: Plot, event: str) -> None:
    seconds = 0.0
    if event == "sleep":
        seconds = plot.chance.choice((1.0, 16.0, _MINUTE, 2 * _HOUR))
    elif event == "clock":
        seconds = plot.chance.choice((-_HOUR, _HOUR))
    device = plot.chance.randrange(plot.setup.devices) if event == "flip" else _host(plot)
    way = plot.chance.choice(_WAYS) if event == "isolate" else ""
    plot.say(event, ENVIRONMENT, device=device, seconds=seconds, way=way)


def _fault(plot: Plot, *kinds: str) -> Fault:
    """Of a host, a link, a process or the registers, somewhere in an operation."""
    chance = plot.chance
    known = ("cut", "isolate", "freeze", "stop", "fall", "pause", "crash", "error", "error")
    kind = chance.choice(kinds or known)
    copies, width = plot.setup.parity + 1, plot.setup.data + plot.setup.parity
    places = [("publish", copies), ("publish", width), ("*", 20), ("*", 80), ("create", copies)]
    if plot.setup.outside:
        places += [("swap", 2), ("swap", 2), ("swap", 3), ("look", 4)]
    else:
        places += [("register", 8), ("lock", 8)]
    where, most = chance.choice(places)
    if kind == "error" and not plot.maybe(0.3):
        where, most = ("swap", 3) if plot.setup.outside else ("register", 8)
    error = {"cut": chance.choice(_WAYS), "isolate": chance.choice(_WAYS), "error": "EIO"}
    return Fault(
        kind=kind,
        where=where,
        nth=1 + chance.randrange(most),
        after=plot.maybe(0.5),
        seconds=chance.choice((0.0, 4.0, 20.0, _HOUR)) if kind in ("pause", "stop") else 0.0,
        until=0,
        firm=True,
        error=error.get(kind, ""),
        times=chance.choice((1, 1, 1, 3)) if kind == "error" else 1,
    )


def _at_a_name(plot: Plot) -> Fault:
    """Of a host or a link, at a name that a put gives."""
    fault = _fault(plot, "cut", "isolate", "freeze", "stop", "fall")
    copies, width = plot.setup.parity + 1, plot.setup.data + plot.setup.parity
    return replace(fault, where="publish", nth=1 + plot.chance.randrange(max(copies, width)))


# --- motifs --------------------------------------------------------------------------------------


def _others(plot: Plot, most: int, *actions: str) -> None:
    """What another process does meanwhile."""
    for _ in range(1 + plot.chance.randrange(most)):
        _do(plot, plot.chance.choice(actions), plot.other)


def struck(plot: Plot) -> None:
    """A put or delete is struck by a host or a link; others go on; then all is well."""
    plot.say("put", plot.writer, key="k0")
    at = len(plot.turns)
    plot.say("put" if plot.maybe(0.8) else "delete", plot.writer, _at_a_name(plot), key="k0")
    actions = ("put", "put", "delete", "get", "rebuild", "scrub", "settle", "evict", "readmit")
    _others(plot, 3, *actions)
    if plot.maybe(0.3):
        plot.say("sleep", ENVIRONMENT, seconds=plot.chance.choice((90.0, 2 * _HOUR)))
        plot.say("scrub", plot.other)
    plot.until(at)
    plot.say("get", plot.other, key="k0")


def contested(plot: Plot) -> None:
    """Conditional puts of several processes; one is stopped, cut off, or gets no answer of the
    registers (PROTOCOL 6)."""
    if plot.maybe(0.6):
        plot.say("put_absent", plot.writer, key="c0")
        plot.say("get", plot.other, key="c0")
    at = len(plot.turns)
    faults = [
        _fault(plot, "error", "error", "pause", "pause", "stop", "isolate", "crash", "freeze")
    ]
    if plot.maybe(0.3):
        faults.append(_fault(plot, "error", "pause"))
    action = plot.chance.choice(("put_version", "put_absent"))
    plot.say(action, plot.writer, *faults, key="c0")
    if plot.maybe(0.3):
        plot.say("sleep", ENVIRONMENT, seconds=plot.chance.choice((4.0, 20.0)))
    _others(plot, 2, "put_version", "put_version", "put_absent", "get")
    plot.until(at)
    _do(plot, plot.chance.choice(("put_version", "get")), plot.writer)
    _do(plot, plot.chance.choice(("put_version", "get")), plot.other)


def unanswered(plot: Plot) -> None:
    """Two conditional puts, of which one is stopped before it publishes and gets no answer when it
    gives its claim back, the other one is stopped under the claim that it took over (PROTOCOL 15).
    """
    plot.setup = replace(plot.setup, outside=True)
    if plot.maybe(0.5):
        plot.say("put_absent", plot.other, key="c0")
        plot.say("get", plot.writer, key="c0")
    first = len(plot.turns)
    where = plot.chance.choice(("create", "publish", "publish", "swap"))
    stop = Fault(kind="pause", where=where, nth=1, seconds=20.0, until=0, firm=True)
    lost = Fault(
        kind="error",
        where=plot.chance.choice(("look", "swap")),
        nth=plot.chance.choice((1, 2, 2)),
        after=plot.maybe(0.5),
        error="EIO",
        times=plot.chance.choice((1, 20)),
    )
    plot.say("put_version", plot.writer, stop, lost, key="c0")
    second = len(plot.turns)
    stops = (replace(stop, where="publish", seconds=0.0),) if plot.maybe(0.8) else ()
    plot.say("put_version", plot.other, *stops, key="c0")
    plot.until(first)
    plot.say("list", plot.writer)
    plot.until(second)
    plot.say("list", plot.other)
    _do(plot, plot.chance.choice(("put_version", "get")), plot.writer)


def twice_stopped(plot: Plot) -> None:
    """Two conditional puts, each stopped before it publishes, go on one after the other
    (decisions/0138)."""
    if plot.maybe(0.3):
        plot.say("put_absent", plot.writer, key="c0")
    first = len(plot.turns)
    where = plot.chance.choice(("create", "publish", "publish"))
    stop = Fault(
        kind="pause", where=where, nth=1, seconds=20.0, until=0, firm=True, after=plot.maybe(0.3)
    )
    plot.say("put_version", plot.writer, stop, key="c0")
    second = len(plot.turns)
    plot.say("put_version", plot.other, stop, key="c0")
    plot.until(first)
    plot.say("list", plot.writer)
    plot.until(second)
    plot.say("list", plot.other)
    plot.say("get", plot.writer, key="c0")


def forgetful(plot: Plot) -> None:
    """Registers lose what they hold, or are away or late, around a conditional put; they are made
    again (PROTOCOL 15)."""
    plot.setup = replace(plot.setup, outside=True)
    plot.say("put_absent", plot.chance.choice((plot.writer, plot.other)), key="c0")
    if plot.maybe(0.5):
        offsets = [_HOUR_MS if n == plot.writer else 0 for n in range(4)]
        plot.setup = replace(plot.setup, offsets_ms=tuple(offsets))
    at, fault = len(plot.turns), _fault(plot, "pause", "stop")
    if plot.maybe(0.5):
        where = plot.chance.choice(("raise_counter", "raise_counter", "create", "publish"))
        fault = replace(fault, where=where, nth=1, after=False, seconds=0.0)
    plot.say("put_version", plot.writer, fault, key="c0")
    lost = plot.maybe(0.6)
    event = "registers_lost" if lost else plot.chance.choice(("registers_down", "registers_slow"))
    plot.say(event, ENVIRONMENT)
    _others(plot, 2, "put_version", "get", "put", "evict", "rebuild")
    plot.say("reset_registers" if lost else "registers_back", plot.other if lost else ENVIRONMENT)
    _others(plot, 2, "put_version", "get")
    plot.until(at)
    _do(plot, "put_version", plot.writer)
    _do(plot, "put_version", plot.other)


def ruled(plot: Plot) -> None:
    """Agents of several hosts: the keeper is stopped, cut off or dies, and goes on; a host is away
    for long (PROTOCOL 17)."""
    plot.say("put", plot.writer, key="k0")
    unsure = Fault(kind="error", where="swap", nth=1, after=plot.maybe(0.5), error="EIO")
    at_first = (unsure,) if plot.setup.outside and plot.maybe(0.3) else ()
    plot.say("tend", plot.writer, *at_first, seconds=plot.chance.choice((5.0, 10.0)))
    plot.say("tend", plot.other, seconds=20.0)
    if plot.maybe(0.5):
        _say_event(plot, plot.chance.choice(("fall", "freeze", "isolate")))
    at = len(plot.turns)
    fault = _fault(plot, "pause", "stop", "isolate", "crash", "error")
    plot.say("tend", plot.writer, replace(fault, seconds=0.0), seconds=90.0)
    plot.say("tend", plot.other, seconds=plot.chance.choice((20.0, 90.0)))
    if plot.maybe(0.4):
        plot.say("delete", plot.other, key="k0")
        plot.say("sleep", ENVIRONMENT, seconds=2 * _HOUR)
        plot.say("tend", plot.other, seconds=30.0)
    if plot.maybe(0.5):
        _do(plot, plot.chance.choice(("readmit", "put", "rebuild", "get")), plot.other)
    plot.until(at)
    plot.say("tend", plot.writer, seconds=10.0)
    plot.say("get", plot.other, key="k0")


def swept(plot: Plot) -> None:
    """An agent sweeps while a put or the return of a host is under way (PROTOCOL 12, 17)."""
    plot.say("put", plot.writer, key="k0")
    plot.say("delete", plot.writer, key="k0")
    at = len(plot.turns)
    plot.say("put", plot.writer, _at_a_name(plot), key="k0")
    plot.say("sleep", ENVIRONMENT, seconds=2 * _HOUR)
    plot.say("tend", plot.other, seconds=20.0)
    if plot.maybe(0.5):
        plot.say("scrub", plot.other)
    plot.until(at)
    plot.say("get", plot.other, key="k0")


def removed(plot: Plot) -> None:
    """Members leave and return while a link is cut or a host stands still: two sides of a partition
    change the membership (PROTOCOL 14 to 16)."""
    plot.say("put", plot.writer, key="k0")
    at = len(plot.turns)
    changes = ("evict", "evict_host", "readmit", "begin_drain", "add")
    fault = _fault(plot, "pause", "stop", "isolate", "cut", "freeze", "error")
    at_registers = ("swap", "swap") if plot.setup.outside else ("register", "lock")
    where = plot.chance.choice(("write_small", "list", "*", *at_registers))
    fault = replace(fault, where=where, nth=1 + plot.chance.randrange(6 if where == "swap" else 20))
    if fault.kind in ("pause", "stop"):
        fault = replace(fault, seconds=plot.chance.choice((0.0, 20.0)))
    _change(plot, plot.chance.choice(changes[:2]), plot.writer, fault)
    for _ in range(1 + plot.chance.randrange(3)):
        _change(plot, plot.chance.choice((*changes, "put", "get", "rebuild")), plot.other)
    plot.until(at)
    _change(plot, plot.chance.choice((*changes, "refresh")), plot.writer)
    _do(plot, "put", plot.writer)
    plot.say("get", plot.other, key="k0")


def overlapping(plot: Plot) -> None:
    """Two processes change the membership; one is stopped, or gets no answer, where it stores what
    it has judged (PROTOCOL 14, 16)."""
    plot.setup = replace(plot.setup, data=1, parity=1, devices=4, hosts=4)
    plot.say("put", plot.writer, key="k0")
    at = len(plot.turns)
    fault = _fault(plot, "pause", "pause", "error", "stop", "isolate")
    places = [("list", 20), ("write_small", 8)]
    places += [("swap", 3), ("look", 4)] if plot.setup.outside else [("register", 8), ("lock", 24)]
    where, most = plot.chance.choice(places)
    nth, seconds = 1 + plot.chance.randrange(most), 20.0 if fault.kind == "pause" else 0.0
    fault = replace(fault, where=where, nth=nth, seconds=seconds)
    changes = ("evict", "evict", "evict_host", "add", "begin_drain")
    _change(plot, plot.chance.choice(changes[:3]), plot.writer, fault)
    for _ in range(plot.chance.choice((1, 1, 2))):
        _change(plot, plot.chance.choice(changes), plot.other)
    plot.until(at)
    _do(plot, "put", plot.writer)
    plot.say("get", plot.other, key="k0")


def _change(plot: Plot, action: str, process: int, *faults: Fault) -> None:
    if action == "add":
        plot.say("add", process, *faults, device=plot.setup.devices)
    else:
        _do(plot, action, process, *faults)


def fenced(plot: Plot) -> None:
    """A session saves, is stopped or cut off in a save while another one takes the run, and goes on
    (PROTOCOL 18)."""
    plot.setup = replace(plot.setup, keep_last=plot.chance.choice((1, 2)), within=plot.maybe(0.4))
    for _ in range(plot.chance.choice((1, 2))):
        plot.say("save", plot.writer, device=0)
    at = len(plot.turns)
    fault = _fault(plot, "pause", "pause", "stop", "isolate", "error", "freeze", "fall")
    width = plot.setup.data + plot.setup.parity
    places = [("publish", 3 * width + 3), ("publish", 3 * width + 3), ("*", 300), ("retire", 4)]
    places += [("swap", 4), ("look", 5)] if plot.setup.outside else [("register", 24), ("lock", 24)]
    where, most = plot.chance.choice(places)
    fault = replace(fault, where=where, nth=1 + plot.chance.randrange(most))
    plot.say("save", plot.writer, fault, device=0)
    for _ in range(1 + plot.chance.randrange(3)):
        action = plot.chance.choice(("save", "save", "restore", "collect"))
        plot.say(action, plot.other, device=plot.chance.randrange(4))
    plot.until(at)
    plot.say("save", plot.writer, device=0)
    plot.say("restore", plot.other)


MOTIFS: dict[str, Callable[[Plot], None]] = {
    "struck": struck,
    "contested": contested,
    "unanswered": unanswered,
    "twice_stopped": twice_stopped,
    "forgetful": forgetful,
    "ruled": ruled,
    "swept": swept,
    "removed": removed,
    "overlapping": overlapping,
    "fenced": fenced,
}
