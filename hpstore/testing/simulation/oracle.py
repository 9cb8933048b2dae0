"""What a pool may answer, given what was acknowledged: the model that every read is held against.

A key is a register. Each put or delete is a Write with the time it was called and the time it
ended; what failed or died may have taken effect. Reads are judged when they end:

- a value was put, and not refused for certain;
- no write that was acknowledged before the read began was called after the value's write had ended:
  what is older never follows what is acknowledged, and nothing deleted returns;
- once a read has seen one acknowledged write instead of another, no later read sees the other
  (what was not acknowledged may roll forward until something newer is);
- what a settled read has seen counts as acknowledged from then on.

Keys that only conditional puts write are checked for linearizability as well, once at the end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

ABSENT = 0  # the value of a key that is not there
OPEN = 1 << 60


@dataclass(slots=True, eq=False)
class Write:
    """A put, or a delete (value ABSENT). Times are the simulation's device operations."""

    value: int
    called: int
    ended: int = OPEN  # nothing of it takes effect later
    acknowledged: int = OPEN  # when; OPEN for never
    refused: bool = False  # has certainly not taken effect
    superseded: int = OPEN  # a read that saw a newer one ended then
    tolerates: int = 0  # losses, as it was acknowledged with
    expected: int | None = None  # a conditional put's condition: the value before it
    who: str = ""

    def __str__(self) -> str:
        state = (
            "refused"
            if self.refused
            else f"acknowledged at {self.acknowledged}"
            if self.acknowledged < OPEN
            else "not acknowledged"
        )
        what = "delete" if self.value == ABSENT else f"put of value {self.value}"
        ended = "has not ended" if self.ended == OPEN else f"ended {self.ended}"
        return f"{what} by {self.who} (called {self.called}, {ended}, {state})"


@dataclass(slots=True)
class KeyHistory:
    """All writes of one key."""

    key: str
    writes: list[Write] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.writes.append(Write(ABSENT, -2, ended=-1, acknowledged=-1, who="the beginning"))

    def judge(self, value: int, began: int, ended: int) -> str | None:
        """What is wrong with a read that ended now; None when nothing is."""
        candidates = [w for w in self.writes if w.value == value and w.called < ended]
        if not candidates:
            return f"{self.key}: a read gave {value}, which was never put"
        problems = [self._problem(w, began) for w in candidates]
        if all(problems):
            return (
                f"{self.key}: a read that began at {began} gave {self.name(value)}: "
                + "; ".join(p for p in problems if p)
            )
        seen = next(w for w, p in zip(candidates, problems, strict=True) if p is None)
        if len([p for p in problems if p is None]) == 1 and seen.acknowledged < began:
            for other in self.writes:
                if other is not seen and other.acknowledged < began:
                    other.superseded = min(other.superseded, ended)
        return None

    def _problem(self, write: Write, began: int) -> str | None:
        if write.refused:
            return f"{write} was refused"
        for other in self.writes:
            if other.called > write.ended and other.acknowledged < began:
                return f"{write} is older than {other}"
        if write.superseded < began:
            return f"{write} had been superseded at {write.superseded}"
        return None

    def certain(self, value: int, now: int) -> None:
        """A settled read has seen a value: it stays."""
        found = [w for w in self.writes if w.value == value and not w.refused]
        if len(found) == 1:
            found[0].acknowledged = min(found[0].acknowledged, now)

    def name(self, value: int) -> str:
        """A value in words."""
        return "nothing" if value == ABSENT else f"value {value}"

    @property
    def torn(self) -> bool:
        """Whether a write failed that may have left something."""
        return any(w.acknowledged == OPEN and not w.refused for w in self.writes)

    @property
    def deletes(self) -> bool:
        """Whether it was ever deleted, or may have been."""
        return any(w.value == ABSENT and not w.refused for w in self.writes[1:])

    @property
    def quiet(self) -> bool:
        """No write is under way or may take effect yet."""
        return all(write.ended < OPEN for write in self.writes)

    @property
    def newest(self) -> Write:
        """The write that was called last, of those that may have taken effect."""
        return max((w for w in self.writes if not w.refused), key=lambda w: w.called)

    def readable(self, parity: int) -> bool:
        """Whether the newest write must be readable with parity's losses: acknowledged whole, and
        nothing else may hide it."""
        newest = self.newest
        if not self.quiet or self.torn:
            return False
        if any(other.ended > newest.called for other in self.writes if other is not newest):
            return False  # at the same time: either may be the newer
        return newest.value == ABSENT or newest.tolerates >= parity


def linearizable(writes: list[Write], final: int | None) -> bool:
    """Whether conditional puts of one key, and the last value read, have one order in which each
    acknowledged one met its condition (Wing and Gong). Those not acknowledged may be left out."""
    puts = [w for w in writes if w.expected is not None and not w.refused]
    needed = frozenset(i for i, w in enumerate(puts) if w.acknowledged < OPEN)

    @lru_cache(None)
    def search(done: frozenset[int], value: int) -> bool:
        if needed <= done and (final is None or value == final):
            return True
        horizon = min((puts[i].acknowledged for i in needed - done), default=OPEN)
        for i, put in enumerate(puts):
            if i in done or put.called > horizon or put.expected != value:
                continue
            if search(done | {i}, put.value):
                return True
        return False

    return search(frozenset(), ABSENT)
