"""Draw a schedule from a seed: small ones, each with its own few kinds of actions and faults.

What is drawn is uneven on purpose (a few keys, faults at renames, clocks that are far apart), and
every seed draws its own weights: most of what goes wrong needs few things, close together.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from importlib.util import find_spec

from hpstore.testing.simulation.motifs import MOTIFS
from hpstore.testing.simulation.plots import PLOTS, Plot
from hpstore.testing.simulation.schedule import ENVIRONMENT, NEVER, Fault, Schedule, Setup, Turn

# whether processes with run directories of their own exclude each other
SHARED_LOCKS = find_spec("hpstore.agreement.registers") is not None
GEOMETRIES = ((1, 1), (2, 1), (2, 2), (4, 2), (1, 2), (3, 1))
_HOUR = 3600.0
_CALM = {
    "put": 8,
    "get": 4,
    "delete": 2,
    "settle": 2,
    "rebuild": 4,
    "scrub": 2,
    "list": 1,
    "stat": 1,
    "reopen": 1,
    "refresh": 1,
}
_MEMBERS = {"evict": 3, "drain": 2, "begin_drain": 1, "add": 2, "readmit": 3, "rebalance": 1}
_CONDITIONAL = {"put_absent": 5, "put_version": 5}
_CHECKPOINTS = {"save": 10, "restore": 6, "collect": 4}
_PLACES = (
    "publish",
    "publish",
    "publish",
    "publish",
    "delete",
    "retire",
    "create",
    "sync",
    "sync_directory",
    "write_small",
    "list",
    "stamp",
    "open",
    "read",
    "read_small",
    "*",
    "*",
)


# what some seeds have more of, together: actions, faults and events by weight
THEMES: dict[str, dict[str, float]] = {
    "suspended": {"pause": 12, "scrub": 12, "rebuild": 8, "settle": 6, "put": 16, "crash": 4},
    "overtaken": {
        "pause": 12,
        "rebuild": 12,
        "settle": 6,
        "begin_drain": 5,
        "add": 4,
        "evict": 4,
        "put": 16,
        "crash": 6,
        "error": 5,
    },
    "clocks": {"crash": 8, "away": 6, "back": 6, "put": 16, "delete": 8, "clock": 4},
    "returns": {
        "evict": 8,
        "readmit": 8,
        "delete": 8,
        "scrub": 8,
        "rebuild": 4,
        "sleep": 2,
        "put": 8,
    },
    "deaths": {"die": 8, "crash": 10, "put": 16, "power": 3, "pause": 0},
}
_INTERFERING = {
    "rebuild": 6,
    "settle": 3,
    "scrub": 5,
    "put": 3,
    "delete": 2,
    "evict": 2,
    "add": 1,
    "begin_drain": 2,
    "get": 1,
    "readmit": 1,
}


@dataclass(slots=True)
class _Taste:
    """What one seed likes."""

    actions: dict[str, float]
    faults: dict[str, float]
    events: dict[str, float]
    keys: list[str]
    sizes: list[int]
    fault_rate: float
    event_rate: float


def draw(seed: int, processes: int = 0) -> Schedule:
    """The schedule of a seed; always the same. `processes`: how many, drawn unless given."""
    chance = random.Random(seed)
    theme = chance.choice((*THEMES, "", "", ""))
    setup = _draw_setup(chance, theme)
    setup = replace(setup, processes=min(4, max(2, processes or setup.processes)))
    taste = _draw_taste(chance, theme)
    count = chance.choice((4, 6, 8, 10, 12, 16))
    turns: list[Turn] = []
    if chance.random() < 0.6:
        plot = Plot(chance, setup, taste.sizes)
        beginnings = {**PLOTS, **MOTIFS}
        beginnings[chance.choice((*PLOTS, "overtaken", *MOTIFS, "saving"))](plot)
        turns, count = plot.turns, len(plot.turns) + chance.choice((0, 0, 1, 2, 4))
        setup = plot.setup
    for key in taste.keys if not turns else ():
        if not key.startswith("c") and chance.random() < 0.7:  # something to lose
            turns.append(_plain_put(chance, len(turns), key, taste))
    while len(turns) < count:
        number = len(turns)
        if chance.random() < taste.event_rate:
            turns.append(_draw_event(chance, number, setup, taste))
        else:
            paused = [t for t in turns if _holds_until(t) > number]
            turns.append(_draw_turn(chance, number, count, setup, taste, paused))
    # not by chance, and last: a seed draws what it drew before
    setup = replace(setup, within=seed % 3 == 0, keyed=seed % 2 == 1)
    if setup.keyed:
        turns = _with_forgeries(random.Random(-seed), setup, turns)
    return Schedule(seed=seed, setup=setup, turns=tuple(turns))


def _with_forgeries(chance: random.Random, setup: Setup, turns: list[Turn]) -> list[Turn]:
    """The same turns, with some of a device that forges files in between. They have the number of
    the turn that follows, so that what is paused until a turn goes on as before."""
    found = list(turns)
    for _ in range(chance.choice((0, 0, 1, 1, 2, 3))):
        at = chance.randrange(1, len(found) + 1)
        number = found[at].number if at < len(found) else found[-1].number
        found.insert(
            at,
            Turn(
                number=number,
                process=ENVIRONMENT,
                action="forge",
                device=chance.randrange(setup.devices),
            ),
        )
    return found


def _holds_until(turn: Turn) -> int:
    """The turn before which all that a turn's faults pause goes on."""
    return max((f.until for f in turn.faults if f.kind in ("pause", "hang")), default=0)


def _draw_setup(chance: random.Random, theme: str) -> Setup:
    data, parity = chance.choice(GEOMETRIES)
    least = parity + 2
    devices = chance.choice(
        (
            data + parity,
            data + parity,
            data + parity + 1,
            data + parity + 2,
            max(least, data + parity - 1),
        )
    )
    offsets = [0, 0, 0, 0]
    if chance.random() < (0.9 if theme in ("clocks", "returns") else 0.35):
        offsets[chance.randrange(2)] = chance.choice((-7200, -600, 600, 7200, 7200)) * 1000
    drifts = (0.0, chance.choice((0.0, 0.0, 1e-4, -1e-4)), 0.0, 0.0)
    return Setup(
        data=data,
        parity=parity,
        devices=min(8, devices),
        domains=chance.choice((0, 0, 0, 2, 3)),
        processes=chance.choice((2, 2, 2, 3, 3, 4)),
        offsets_ms=tuple(offsets),
        drifts=drifts,
        own_places=chance.random() < 0.3 and SHARED_LOCKS,
    )


def _draw_taste(chance: random.Random, theme: str) -> _Taste:
    actions: dict[str, float] = dict(_CALM)
    keys = [f"k{i}" for i in range(chance.choice((1, 1, 1, 2, 2, 3)))]
    if chance.random() < 0.25:
        actions |= _CONDITIONAL
        keys = [*keys[:1], "c0"] if chance.random() < 0.5 else ["c0"]
    if chance.random() < 0.55:
        actions |= _MEMBERS
    if chance.random() < 0.12:
        actions |= _CHECKPOINTS
    for name in list(actions):  # some are left out, some are frequent
        roll = chance.random()
        actions[name] *= 0.0 if roll < 0.2 and name != "put" else 4.0 if roll > 0.85 else 1.0
    faults = {
        "pause": 4.0,
        "crash": 3.0,
        "error": 3.0,
        "hang": 2.0,
        "power": 1.0,
        "clock": 0.5,
        "away": 0.7,
    }
    for name in list(faults):
        faults[name] *= chance.choice((0.0, 0.3, 1.0, 1.0, 4.0))
    events = {
        "away": 3.0,
        "back": 3.0,
        "wipe": 0.6,
        "die": 0.8,
        "flip": 0.8,
        "full": 0.4,
        "roomy": 0.4,
        "read_only": 0.4,
        "writable": 0.4,
        "sleep": 2.0,
        "clock": 1.0,
        "power": 0.5,
        "kill": 1.0,
        "snapshot": 0.7,
        "restore": 0.7,
    }
    for name in list(events):
        events[name] *= chance.choice((0.0, 1.0, 1.0, 3.0))
    for name, weight in THEMES.get(theme, {}).items():
        for weights in (actions, faults, events):
            if name in weights or (weights is actions and name in _MEMBERS):
                weights[name] = weight * chance.choice((0.5, 1.0, 2.0))
    sizes = chance.choice(([100], [20_000], [20_000, 21_000], [100, 20_000], [5_000, 9_000]))
    return _Taste(
        actions=actions,
        faults=faults,
        events=events,
        keys=keys,
        sizes=sizes,
        fault_rate=chance.choice((0.1, 0.3, 0.5)),
        event_rate=chance.choice((0.1, 0.25, 0.4)),
    )


def _pick(chance: random.Random, weights: dict[str, float]) -> str:
    names = [name for name, weight in weights.items() if weight > 0]
    if not names:
        return next(iter(weights))
    return chance.choices(names, [weights[name] for name in names])[0]


def _plain_put(chance: random.Random, number: int, key: str, taste: _Taste) -> Turn:
    return Turn(number=number, process=0, action="put", key=key, size=chance.choice(taste.sizes))


def _draw_turn(
    chance: random.Random,
    number: int,
    count: int,
    setup: Setup,
    taste: _Taste,
    paused: list[Turn],
) -> Turn:
    action, process = _pick(chance, taste.actions), chance.randrange(setup.processes)
    key, rate = chance.choice(taste.keys), taste.fault_rate
    if paused and chance.random() < 0.75:  # what comes between, by another process
        process = (paused[-1].process + 1 + chance.randrange(setup.processes - 1)) % setup.processes
        key, rate = paused[-1].key or key, rate / 2
        if chance.random() < 0.7:
            action = _pick(
                chance,
                {a: w for a, w in _INTERFERING.items() if a in _CALM or taste.actions.get(a)},
            )
    if key.startswith("c") and action in ("put", "delete"):
        action = chance.choice(("put_version", "put_absent"))
    if not key.startswith("c") and action in ("put_absent", "put_version"):
        key = "c0"
    faults: tuple[Fault, ...] = ()
    if chance.random() < rate:
        faults = _draw_faults(chance, number, count, taste)
    return Turn(
        number=number,
        process=process,
        action=action,
        key=key if action in _KEYED else "",
        size=chance.choice(taste.sizes) if action in _SIZED else 0,
        device=_device(chance, setup),
        faults=faults,
        order=chance.choice((0, chance.randrange(1, 1000))),
    )


_SIZED = frozenset({"put", "put_absent", "put_version"})
_KEYED = _SIZED | {"get", "delete", "settle", "stat"}


def _device(chance: random.Random, setup: Setup) -> int:
    return chance.randrange(setup.devices + (chance.random() < 0.3))


def _draw_faults(
    chance: random.Random, number: int, count: int, taste: _Taste
) -> tuple[Fault, ...]:
    found = []
    for _ in range(chance.choice((1, 1, 1, 2, 2, 3))):
        kind = _pick(chance, taste.faults)
        where = chance.choice(_PLACES)
        nth = 1 + int(chance.expovariate(0.4 if where != "*" else 0.05))
        until = min(number + chance.choice((1, 2, 2, 3, 3, 4, 5)), count)
        seconds = chance.choice((0.0, 0.0, 1.0, 40.0, 700.0, 2 * _HOUR))
        steps = chance.choice((0, 0, 0, chance.randrange(1, 80)))
        after = chance.random() < 0.3
        fault = Fault(kind=kind, where=where, nth=nth, after=after)
        if kind == "pause":
            fault = Fault(
                kind=kind,
                where=where,
                nth=nth,
                after=after,
                seconds=seconds,
                until=until,
                steps=steps,
                firm=chance.random() < 0.6,
            )
        elif kind == "hang":
            until = chance.choice((until, until, NEVER))
            fault = Fault(
                kind=kind,
                where=where,
                nth=nth,
                until=until,
                steps=steps,
                firm=chance.random() < 0.7,
            )
        elif kind == "error":
            error = chance.choice(("EIO", "EIO", "ENOSPC", "EROFS", "ENODEV"))
            times = chance.choice((1, 1, 20))
            fault = Fault(kind=kind, where=where, nth=nth, after=after, error=error, times=times)
        elif kind == "clock":
            seconds = chance.choice((-7200.0, -600.0, 600.0, 7200.0))
            fault = Fault(kind=kind, where=where, nth=nth, seconds=seconds)
        found.append(fault)
        found += _companions(chance, fault)
    return tuple(found)


def _companions(chance: random.Random, fault: Fault) -> list[Fault]:
    """What goes well with a fault: a crash beside which a device is away from then on, a crash or
    an error after a pause."""
    if fault.kind == "crash" and chance.random() < 0.3:
        return [replace(fault, kind="away")]
    if fault.kind == "pause" and chance.random() < 0.5:
        where = chance.choice(("delete", "create", "publish", "retire", "sync", "*"))
        nth = 1 + int(chance.expovariate(0.2 if where != "*" else 0.02))
        if chance.random() < 0.6:
            return [Fault(kind="crash", where=where, nth=nth)]
        times = chance.choice((1, 20))
        return [
            Fault(kind="error", where="publish", nth=fault.nth + i, error="EIO", times=times)
            for i in range(1, chance.choice((2, 3)))
        ]
    return []


def _draw_event(chance: random.Random, number: int, setup: Setup, taste: _Taste) -> Turn:
    action = _pick(chance, taste.events)
    seconds = 0.0
    if action == "sleep":
        seconds = chance.choice((1.0, 60.0, 1000.0, 2 * _HOUR))
    elif action == "clock":
        seconds = chance.choice((-7200.0, -600.0, 600.0, 7200.0))
    return Turn(
        number=number,
        process=ENVIRONMENT,
        action=action,
        seconds=seconds,
        device=_device(chance, setup),
        size=chance.randrange(30_000) if action == "flip" else 0,
    )
