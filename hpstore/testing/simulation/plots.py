"""Beginnings of schedules in which little is left to chance but where exactly things happen.

A bug that needs four things in order is rare among random turns. What FoundationDB does with
BUGGIFY, code under test that prefers rare ways, is done here by schedules that do: half of all
seeds begin with one of these, and go on at random.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from hpstore.testing.simulation.schedule import ENVIRONMENT, HOST_FAULTS, NEVER, Fault, Setup, Turn

_UNTIL = HOST_FAULTS | {"pause", "hang"}
_HOURS = (0.0, 0.0, 700.0, 7200.0, 7200.0)


class Plot:
    """Turns in the making."""

    def __init__(self, chance: random.Random, setup: Setup, sizes: list[int]) -> None:
        self.chance, self.setup, self.sizes = chance, setup, sizes
        self.turns: list[Turn] = []
        self.writer = chance.randrange(setup.processes)
        self.other = (self.writer + 1 + chance.randrange(setup.processes - 1)) % setup.processes

    def say(
        self,
        action: str,
        process: int,
        *faults: Fault,
        key: str = "",
        device: int | None = None,
        seconds: float = 0.0,
        way: str = "",
    ) -> None:
        """One more turn."""
        size = self.chance.choice(self.sizes) if action.startswith("put") else 0
        if device is None:
            device = self.chance.randrange(self.setup.devices)
        order = self.chance.choice((0, self.chance.randrange(1, 1000)))
        self.turns.append(
            Turn(
                number=len(self.turns),
                process=process,
                action=action,
                key=key,
                size=size,
                device=device,
                seconds=seconds,
                way=way,
                order=order,
                faults=faults,
            )
        )

    def rename(self) -> tuple[int, bool]:
        """A rename of a put, and whether it is over."""
        width = self.setup.data + self.setup.parity
        return 1 + self.chance.randrange(width), self.chance.random() < 0.5

    def maybe(self, share: float) -> bool:
        """Whether to."""
        return self.chance.random() < share

    def between(self, key: str, most: int) -> None:
        """What others do meanwhile."""
        for _ in range(1 + self.chance.randrange(most)):
            action = self.chance.choice(
                (
                    "rebuild",
                    "rebuild",
                    "settle",
                    "scrub",
                    "scrub",
                    "put",
                    "delete",
                    "evict",
                    "begin_drain",
                    "add",
                    "get",
                    "readmit",
                    "drain",
                )
            )
            if action == "add":
                self.say("add", self.other, device=self.setup.devices)
            elif key.startswith("c") and action in ("put", "delete"):
                self.say("put_version", self.other, key=key)
            else:
                keyed = action in ("put", "delete", "get", "settle")
                self.say(action, self.other, key=key if keyed else "")

    def until(self, at: int) -> None:
        """What the turn at that place pauses goes on now."""
        turn, now = self.turns[at], len(self.turns)
        faults = tuple(
            replace(f, until=now) if f.kind in _UNTIL and f.until < NEVER else f
            for f in turn.faults
        )
        self.turns[at] = replace(turn, faults=faults)


def overtaken(plot: Plot) -> None:
    """A writer is suspended between two renames; others rebuild or change the pool; then it
    continues, fails or dies."""
    plot.say("put", plot.writer, key="k0")
    nth, after = plot.rename()
    faults = [
        Fault(
            kind="pause",
            where="publish",
            nth=nth,
            after=after,
            firm=True,
            seconds=plot.chance.choice(_HOURS),
            until=0,
        )
    ]
    if plot.maybe(0.4):
        count = 1 + plot.chance.randrange(plot.setup.parity + 1)
        faults += [
            Fault(
                kind="error",
                where="publish",
                nth=nth + after + i,
                error="EIO",
                times=plot.chance.choice((1, 20)),
            )
            for i in range(count)
        ]
    if plot.maybe(0.6):
        where = plot.chance.choice(("create", "create", "delete", "retire", "publish"))
        least = plot.setup.data + plot.setup.parity if where in ("create", "publish") else 0
        faults.append(Fault(kind="crash", where=where, nth=least + 1 + plot.chance.randrange(4)))
    action = "delete" if plot.maybe(0.15) else "put"
    at = len(plot.turns)
    plot.say(action, plot.writer, *faults, key="k0")
    plot.between("k0", 3)
    plot.until(at)
    plot.say("get", plot.other, key="k0")


def torn(plot: Plot) -> None:
    """A writer, whose clock may be ahead, dies between two renames, a device with it; then another
    writes, and all is back."""
    if plot.maybe(0.8):
        plot.say("put", plot.writer, key="k0")
    ahead = plot.maybe(0.4)
    if ahead:
        plot.say("clock", ENVIRONMENT, device=plot.writer, seconds=plot.chance.choice(_HOURS[2:]))
    nth, after = plot.rename()
    nth = plot.chance.choice((1, 2, nth))
    faults = [Fault(kind="crash", where="publish", nth=nth, after=after)]
    if plot.maybe(0.7):
        faults.insert(0, Fault(kind="away", where="publish", nth=nth, after=after))
    plot.say(plot.chance.choice(("put", "put", "delete")), plot.writer, *faults, key="k0")
    if not ahead and plot.maybe(0.5):
        plot.say("sleep", ENVIRONMENT, seconds=plot.chance.choice((60.0, 7200.0)))
    plot.say(plot.chance.choice(("put", "put", "delete", "rebuild")), plot.other, key="k0")
    for device in range(plot.setup.devices):
        plot.say("back", ENVIRONMENT, device=device)
    plot.say(plot.chance.choice(("get", "rebuild", "settle")), plot.other, key="k0")


def dying(plot: Plot) -> None:
    """A writer dies between two renames, and devices die for good."""
    plot.say("put", plot.writer, key="k0")
    nth, after = plot.rename()
    kind = plot.chance.choice(("crash", "crash", "power"))
    plot.say("put", plot.writer, Fault(kind=kind, where="publish", nth=nth, after=after), key="k0")
    for device in plot.chance.sample(range(plot.setup.devices), plot.setup.parity):
        plot.say(plot.chance.choice(("die", "die", "die", "wipe")), ENVIRONMENT, device=device)
    if plot.maybe(0.5):
        plot.say("get", plot.other, key="k0")


def returning(plot: Plot) -> None:
    """A device is evicted; objects are deleted or written; a scrub; the device comes back."""
    plot.say("put", plot.writer, key="k0")
    if plot.maybe(0.5):
        plot.say("put", plot.writer, key="k1")
    device = plot.chance.randrange(plot.setup.devices)
    if plot.maybe(0.3):
        plot.say("away", ENVIRONMENT, device=device)
    plot.say(plot.chance.choice(("evict", "evict", "drain")), plot.other, device=device)
    if plot.maybe(0.7):
        plot.say("rebuild", plot.other)
    plot.say(plot.chance.choice(("delete", "delete", "put")), plot.other, key="k0")
    if plot.maybe(0.3):
        plot.say("sleep", ENVIRONMENT, seconds=plot.chance.choice((60.0, 1000.0, 7200.0)))
    if plot.maybe(0.7):
        plot.say("scrub", plot.chance.randrange(plot.setup.processes))
    plot.say("back", ENVIRONMENT, device=device)
    plot.say("readmit", plot.other, device=device)
    plot.say("get", plot.other, key="k0")


def racing(plot: Plot) -> None:
    """Conditional puts of several processes, held up anywhere."""
    if plot.maybe(0.5):
        plot.say("put_absent", plot.writer, key="c0")
    at = len(plot.turns)
    where, most = plot.chance.choice(
        (("create", 3), ("publish", 6), ("*", 60), ("list", 8), ("write_small", 6))
    )
    fault = Fault(
        kind=plot.chance.choice(("pause", "pause", "hang")),
        where=where,
        until=0,
        nth=1 + plot.chance.randrange(most),
        firm=plot.maybe(0.8),
        seconds=plot.chance.choice((0.0, 1.0, 40.0, 7200.0)),
    )
    plot.say(plot.chance.choice(("put_absent", "put_version")), plot.writer, fault, key="c0")
    plot.say(plot.chance.choice(("put_absent", "put_version")), plot.other, key="c0")
    if plot.maybe(0.4):
        plot.between("c0", 2)
    plot.until(at)
    plot.say(plot.chance.choice(("put_version", "get", "settle")), plot.other, key="c0")


PLOTS: dict[str, Callable[[Plot], None]] = {
    "overtaken": overtaken,
    "torn": torn,
    "dying": dying,
    "returning": returning,
    "racing": racing,
}
