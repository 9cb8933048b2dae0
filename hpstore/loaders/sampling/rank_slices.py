"""Which positions of an epoch a data-parallel rank reads at each step. Pure.

A global batch covers the next G = batch_size x world_size positions, counted from where the run
stands and not from 0: after a resume with another world size the batches go on where the last
ones ended, and nothing is lost or read twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from hpstore.errors import ConfigError
from hpstore.units import div_ceil

Tail: TypeAlias = Literal["pad", "drop", "uneven"]
"""How the last global batch is dealt out when it is short of G positions:

    pad     it continues with the first positions of the same epoch, several times round where
            there are more ranks than positions, until all ranks have equally many rows
    drop    positions that do not divide among the ranks are not read
    uneven  rows as equal as possible, the first ranks one more; a rank without rows gets nothing

"pad" and "drop" read as many rows, and the same ones over all ranks, as torch's
DistributedSampler without and with its `drop_last`. With `drop_last` of a loader a short global
batch is left out whole, whatever `tail` says. In a world of one rank all three are the same.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One global batch, and this rank's rows of it."""

    start: int
    stop: int
    """Positions start .. stop - 1 of this rank; beyond the epoch's length they count on from
    its beginning (`wrapped`). Empty when the rank has no rows."""
    after: int
    """Position of the run once all ranks have this batch, at most the epoch's length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slices:
    """How an epoch of `length` positions is dealt out. `batch_size` is a rank's.

    Raises ConfigError for a batch size or a world size below 1 and a rank outside the world.
    """

    length: int
    batch_size: int
    world_size: int = 1
    rank: int = 0
    drop_last: bool = False
    tail: Tail = "pad"

    def __post_init__(self) -> None:
        if self.length < 0 or self.batch_size < 1 or self.world_size < 1:
            raise ConfigError(
                f"{self.length} positions, batches of {self.batch_size}, {self.world_size} ranks"
            )
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"rank {self.rank} of {self.world_size} data-parallel ranks")
        require_tail(self.tail)

    @property
    def global_batch(self) -> int:
        """Positions of a full global batch, G."""
        return self.batch_size * self.world_size

    def steps(self, position: int = 0) -> int:
        """Global batches from a position to the end of the epoch, equal on all ranks.

        With `tail="uneven"` a rank may have no rows in the last one.
        """
        full, rest = divmod(max(0, self.length - position), self.global_batch)
        return full + (self._rest_rows(rest) > 0)

    def last_rows(self) -> int:
        """Rows that all ranks together read as the short last batch of an epoch; 0 for none."""
        return self._rest_rows(self.length % self.global_batch)

    def own_steps(self, position: int = 0) -> int:
        """Batches of this rank from a position to the end of the epoch: len() of its loader."""
        steps = self.steps(position)
        if steps:
            last = self.step(position, steps - 1)
            steps -= last.start == last.stop
        return steps

    def step(self, position: int, number: int = 0) -> Step:
        """Global batch `number` counted from a position. IndexError beyond the last one."""
        if not 0 <= number < self.steps(position):
            raise IndexError(
                f"step {number} from position {position}: the epoch has {self.steps(position)} more"
            )
        first = position + number * self.global_batch
        rest = self.length - first
        if rest >= self.global_batch:
            start = first + self.rank * self.batch_size
            return Step(start=start, stop=start + self.batch_size, after=first + self.global_batch)
        start, stop = self._share(self._rest_rows(rest))
        return Step(start=first + start, stop=first + stop, after=self.length)

    def advance(self, epoch: int, position: int, batches: int = 1) -> tuple[int, int]:
        """(epoch, position) after that many global batches; (epoch + 1, 0) after the last one.

        Batches beyond the end of the epoch are an IndexError: an epoch is left one by one, as
        the length of the next one is for the caller to know.
        """
        if batches:
            position = self.step(position, batches - 1).after
        return (epoch, position) if self.steps(position) else (epoch + 1, 0)

    def _rest_rows(self, rest: int) -> int:
        """Rows that all ranks together read for the last `rest` < G positions."""
        if self.drop_last:
            return 0
        if self.tail == "pad":
            return div_ceil(rest, self.world_size) * self.world_size
        if self.tail == "drop":
            return rest // self.world_size * self.world_size
        return rest

    def _share(self, rows: int) -> tuple[int, int]:
        """This rank's part of `rows`: as equal as possible, the first ranks one more."""
        base, extra = divmod(rows, self.world_size)
        start = self.rank * base + min(self.rank, extra)
        return start, start + base + (self.rank < extra)


def require_tail(tail: object) -> None:
    """Raise ConfigError unless this is a Tail."""
    if tail not in get_args(Tail):
        raise ConfigError(f"tail={tail!r}: one of {', '.join(get_args(Tail))}")


def wrapped(start: int, stop: int, length: int) -> list[tuple[int, int]]:
    """The ranges inside an epoch that positions start .. stop - 1 mean, in order; none empty."""
    ranges = []
    while start < stop:
        low = start % length
        high = min(length, low + stop - start)
        ranges.append((low, high))
        start += high - low
    return ranges
