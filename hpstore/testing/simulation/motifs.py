"""More beginnings of schedules: each needs one rule, and little else, for what it reads.

Every rule that is taken out (mutations.py) and was found by no random schedule has one here. They
choose the pool, too: with few devices more than a stripe has, what is drawn meets its columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hpstore.testing.simulation.plots import Plot
from hpstore.testing.simulation.schedule import ENVIRONMENT, Fault

_TWO_HOURS = 7200.0


def _pool(plot: Plot, geometries: tuple[tuple[int, int], ...], *more: int) -> None:
    """Another pool than was drawn: one of these geometries, with some devices more."""
    data, parity = plot.chance.choice(geometries)
    devices = min(8, data + parity + plot.chance.choice(more))
    plot.setup = replace(plot.setup, data=data, parity=parity, devices=devices)


def forgotten(plot: Plot) -> None:
    """A device is out while an object is deleted and the tombstone swept, by time or by a clock
    that is ahead; then the device returns with the object (PROTOCOL 12)."""
    _pool(plot, ((1, 1), (1, 2), (2, 1)), 1)
    if plot.setup.data > 1:
        plot.sizes = [100]
    device = plot.chance.randrange(plot.setup.devices)
    plot.say("put", plot.writer, key="k0")
    plot.say("evict", plot.writer, device=device)
    if plot.maybe(0.3):
        plot.say("rebuild", plot.writer)
    plot.say("delete", plot.writer, key="k0")
    if plot.maybe(0.5):
        plot.say("sleep", ENVIRONMENT, seconds=_TWO_HOURS)
        plot.say("scrub", plot.other)
    else:
        plot.say("clock", ENVIRONMENT, device=plot.other, seconds=_TWO_HOURS)
        plot.say("scrub", plot.other)
        plot.say("clock", ENVIRONMENT, device=plot.other, seconds=-_TWO_HOURS)
    plot.say("readmit", plot.writer, device=0)
    plot.say("get", plot.other, key="k0")


def drained(plot: Plot) -> None:
    """A device is emptied and leaves while a put is about to rename a column on it; then m devices
    die (PROTOCOL 4)."""
    _pool(plot, ((1, 1), (1, 2), (2, 1)), 1, 1, 2)
    if plot.maybe(0.3):
        plot.say("put", plot.writer, key="k0")
    at, (nth, after) = len(plot.turns), plot.rename()
    fault = Fault(kind="pause", where="publish", nth=nth, after=after, firm=True, until=0)
    plot.say("put", plot.writer, fault, key="k0")
    leaving = plot.chance.randrange(plot.setup.devices)
    plot.say(plot.chance.choice(("drain", "drain", "drain", "evict")), plot.other, device=leaving)
    plot.until(at)
    plot.say("get", plot.other, key="k0")
    rest = [device for device in range(plot.setup.devices) if device != leaving]
    for device in plot.chance.sample(rest, plot.setup.parity):
        plot.say("die", ENVIRONMENT, device=device)
    plot.say("get", plot.other, key="k0")


def owing(plot: Plot) -> None:
    """A put is acknowledged short of its stripe over an older version; then m devices are away
    (PROTOCOL 5, 7)."""
    _pool(plot, ((2, 2), (2, 2), (4, 2)), 0, 0, 1)
    plot.sizes = [20_000]
    if plot.maybe(0.7):
        plot.say("put", plot.writer, key="k0")
    width = plot.setup.data + plot.setup.parity
    fault = Fault(
        kind="error",
        where="publish",
        nth=1 + plot.chance.randrange(width),
        error="EIO",
        times=plot.chance.choice((1, 20)),
    )
    plot.say("put", plot.writer, fault, key="k0")
    gone = plot.chance.sample(range(plot.setup.devices), plot.setup.parity)
    for device in gone:
        plot.say("away", ENVIRONMENT, device=device)
    plot.say(plot.chance.choice(("get", "get", "settle", "delete")), plot.other, key="k0")
    for device in gone:
        plot.say("back", ENVIRONMENT, device=device)
    plot.say("get", plot.other, key="k0")


def blinded(plot: Plot) -> None:
    """More devices than m go while pools are open (PROTOCOL 7): what is there must not be taken for
    absent, nor for older than it is."""
    _pool(plot, ((1, 1), (1, 2), (2, 1)), 0, 1, 2)
    plot.say("put", plot.writer, key="k0")
    plot.say("get", plot.other, key="k0")
    if plot.maybe(0.4):
        device = plot.chance.randrange(plot.setup.devices)
        plot.say("away", ENVIRONMENT, device=device)
        plot.say("put", plot.writer, key="k0")
        plot.say("back", ENVIRONMENT, device=device)
    count = plot.setup.parity + 1 + plot.chance.randrange(2)
    gone = plot.chance.sample(range(plot.setup.devices), min(count, plot.setup.devices))
    for device in gone:
        plot.say("away", ENVIRONMENT, device=device)
    for _ in range(plot.chance.choice((1, 2))):
        action = plot.chance.choice(("get", "get", "delete", "put", "list", "scrub", "rebuild"))
        keyed = action in ("get", "delete", "put")
        plot.say(action, plot.other, key="k0" if keyed else "")
    for device in gone:
        plot.say("back", ENVIRONMENT, device=device)
    plot.say("get", plot.other, key="k0")


def thinned(plot: Plot) -> None:
    """One device after another is evicted, with no rebuild in between (PROTOCOL 16)."""
    _pool(plot, ((1, 1), (2, 1), (1, 2)), 1, 2, 2)
    plot.say("put", plot.writer, key="k0")
    count = plot.setup.parity + 1
    for device in plot.chance.sample(range(plot.setup.devices), count):
        plot.say("evict", plot.chance.choice((plot.writer, plot.other)), device=device)
        if plot.maybe(0.15):
            plot.say("rebuild", plot.other)
    plot.say("get", plot.other, key="k0")


def contending(plot: Plot) -> None:
    """Two processes change the membership at once, each judging as if the other did not
    (PROTOCOL 15, 16)."""
    _pool(plot, ((1, 1), (1, 1), (2, 1)), 1, 2, 2)
    plot.setup = replace(plot.setup, domains=0)
    plot.say("put", plot.writer, key="k0")
    plot.say("get", plot.other, key="k0")
    one, two = plot.chance.sample(range(plot.setup.devices), 2)
    where, least, most = plot.chance.choice(
        (("list", plot.setup.devices, 2 * plot.setup.devices + 3),) * 2  # when it has looked
        + (("write_small", 0, 12), ("read_small", 0, 20), ("*", 0, 120))
    )
    fault = Fault(
        kind="pause",
        where=where,
        nth=1 + least + plot.chance.randrange(most),
        until=0,
        firm=plot.maybe(0.7),
    )
    at = len(plot.turns)
    plot.say(plot.chance.choice(("evict", "evict", "drain")), plot.writer, fault, device=one)
    plot.say("evict", plot.other, device=two)
    plot.until(at)
    plot.say("get", plot.other, key="k0")


def resurrecting(plot: Plot) -> None:
    """An object is deleted while a device that holds it is away; it is back, and m others die
    (PROTOCOL 12)."""
    _pool(plot, ((1, 1), (1, 2), (2, 1)), 1, 2)
    plot.sizes = [100]
    plot.say("put", plot.writer, key="k0")
    device = plot.chance.randrange(plot.setup.devices)
    plot.say("away", ENVIRONMENT, device=device)
    plot.say("delete", plot.writer, key="k0")
    plot.say("back", ENVIRONMENT, device=device)
    rest = [other for other in range(plot.setup.devices) if other != device]
    for other in plot.chance.sample(rest, plot.setup.parity):
        plot.say("away", ENVIRONMENT, device=other)  # nothing dies that has a last copy
    plot.say("get", plot.other, key="k0")


def outdated(plot: Plot) -> None:
    """A device goes back to a snapshot while its pool goes on (docs/protocol.md, "Snapshots")."""
    key = plot.chance.choice(("k0", "k0", "c0"))
    put = "put" if key == "k0" else "put_version"
    device = plot.chance.randrange(plot.setup.devices)
    if plot.maybe(0.8):
        plot.say(put, plot.writer, key=key)
    plot.say("snapshot", ENVIRONMENT, device=device)
    for _ in range(1 + plot.chance.randrange(3)):
        actions = [put, put, "rebuild", "scrub", "evict", "readmit"]
        action = plot.chance.choice([*actions, *(["delete", "delete"] if key == "k0" else [])])
        plot.say(action, plot.writer, key=key if action in (put, "delete") else "")
    if plot.maybe(0.2):
        plot.say("sleep", ENVIRONMENT, seconds=_TWO_HOURS)
        plot.say("scrub", plot.other)
    plot.say("restore", ENVIRONMENT, device=device)
    if plot.setup.parity > 1 and plot.maybe(0.5):
        plot.say("away", ENVIRONMENT, device=plot.chance.randrange(plot.setup.devices))
    for _ in range(1 + plot.chance.randrange(3)):
        action = plot.chance.choice(("get", put, "settle", "rebuild", "scrub", "list"))
        keyed = action in ("get", put, "settle")
        plot.say(action, plot.chance.choice((plot.other, plot.writer)), key=key if keyed else "")
    plot.say("get", plot.other, key=key)


def housed(plot: Plot) -> None:
    """All devices of a failure domain go while the pool is used (PROTOCOL 3, 14)."""
    _pool(plot, ((1, 1), (2, 1), (1, 2), (2, 2), (4, 2)), 1, 2, 3)
    domains = plot.chance.choice((3, 3, 4))
    plot.setup = replace(plot.setup, domains=domains)
    plot.say("put", plot.writer, key="k0")
    lost = plot.chance.randrange(domains)
    gone = [device for device in range(plot.setup.devices) if device % domains == lost]
    for device in gone:
        plot.say("away", ENVIRONMENT, device=device)
    for _ in range(1 + plot.chance.randrange(3)):
        action = plot.chance.choice(
            ("get", "reopen", "put", "delete", "rebuild", "list", "drain", "evict")
        )
        keyed = action in ("get", "put", "delete")
        plot.say(action, plot.chance.choice((plot.writer, plot.other)), key="k0" if keyed else "")
    for device in gone:
        plot.say(plot.chance.choice(("back", "back", "die")), ENVIRONMENT, device=device)
    plot.say(plot.chance.choice(("rebuild", "drain", "scrub")), plot.other)
    plot.say("get", plot.other, key="k0")


def saving(plot: Plot) -> None:
    """Saves of checkpoints that are held up, die or fail, beside saves, restores and collections of
    other processes (PROTOCOL 18, 19)."""
    if plot.maybe(0.2):
        _referring(plot)
        return
    plot.setup = replace(plot.setup, keep_last=plot.chance.choice((1, 2, 2)))
    for _ in range(plot.chance.choice((1, 2, 3))):
        plot.say("save", plot.writer, device=0)
    if plot.maybe(0.3):
        plot.say("collect", plot.other)
    at = len(plot.turns)
    kind = plot.chance.choice(("pause", "pause", "pause", "crash", "crash", "error", "power"))
    where, nth = plot.chance.choice((_in_a_save(plot, kind), _somewhere(plot)))
    fault = Fault(
        kind=kind,
        where=where,
        nth=nth,
        until=0,
        firm=True,
        after=plot.maybe(0.3),
        error="EIO" if kind == "error" else "",
        times=plot.chance.choice((1, 20)) if kind == "error" else 1,
    )
    what = plot.chance.choice(("save", "save", "save", "save", "restore", "collect"))
    plot.say(what, plot.writer, fault, device=0)
    if kind == "pause" and plot.maybe(0.4):
        _taken_for_dead(plot)
    else:
        for _ in range(1 + plot.chance.randrange(3)):
            action = plot.chance.choice(("save", "save", "restore", "collect"))
            plot.say(action, plot.other, device=plot.chance.randrange(4))
    if kind == "pause":
        plot.until(at)
    elif plot.maybe(0.3):
        plot.say("save", plot.chance.choice((plot.writer, plot.other)), device=0)
    gone = plot.chance.sample(range(plot.setup.devices), plot.setup.parity)
    for device in gone if plot.maybe(0.7 if kind == "error" else 0.2) else ():
        plot.say("away", ENVIRONMENT, device=device)
    plot.say("restore", plot.other)


def _in_a_save(plot: Plot, kind: str) -> tuple[str, int]:
    """A rename of a save that is not the first of its session: of a column of its segment, or, for
    a pause, the first of its manifest."""
    note, width = plot.setup.parity + 1, plot.setup.data + plot.setup.parity
    return "publish", note + (width + 1 if kind == "pause" else 1 + plot.chance.randrange(width))


def _somewhere(plot: Plot) -> tuple[str, int]:
    where, most = plot.chance.choice(
        (("publish", 30), ("*", 700), ("*", 300), ("*", 80), ("retire", 8), ("list", 40))
    )
    return where, 1 + plot.chance.randrange(most)


def _taken_for_dead(plot: Plot) -> None:
    """Another session begins to save, or a note stands still for long; then a collection."""
    if plot.maybe(0.5):
        plot.say("save", plot.other, device=0)
    else:
        plot.say("collect", plot.other)
        plot.say("sleep", ENVIRONMENT, seconds=plot.chance.choice((1000.0, _TWO_HOURS)))
    plot.say("collect", plot.other)


def _referring(plot: Plot) -> None:
    """A process goes on from a step that retention of another removes: what its save would refer to
    is gone (PROTOCOL 18)."""
    plot.setup = replace(plot.setup, keep_last=1)
    plot.say("save", plot.other, device=0)
    plot.say("restore", plot.writer)
    for _ in range(plot.chance.choice((0, 1, 1, 2))):
        plot.say("save", plot.chance.choice((plot.other, plot.other, plot.writer)), device=0)
    if plot.maybe(0.3):
        plot.say("reopen", plot.other)
        plot.say("save", plot.other, device=0)
    plot.say("save", plot.writer, device=0)
    plot.say("restore", plot.other)


MOTIFS: dict[str, Callable[[Plot], None]] = {
    "forgotten": forgotten,
    "drained": drained,
    "owing": owing,
    "blinded": blinded,
    "thinned": thinned,
    "contending": contending,
    "resurrecting": resurrecting,
    "outdated": outdated,
    "saving": saving,
    "housed": housed,
}
