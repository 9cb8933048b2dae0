"""Values of bytes that lie in a few memories, without an object of Python for each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
import numpy.typing as npt

from hpstore.codec import address_of
from hpstore.codec.galois import Bytes

Int64s = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, eq=False)
class ValueRows(Sequence[Bytes]):
    """Row i is `lengths[i]` bytes from byte `starts[i]` of `memories[which[i]]` on; all (n,).

    The memories, contiguous uint8 each, stay as they are while this is there. Rows are views.
    """

    memories: tuple[Bytes, ...]
    which: npt.NDArray[np.int32]
    starts: Int64s
    lengths: Int64s

    @classmethod
    def of(cls, memory: Bytes, starts: Int64s, lengths: Int64s) -> ValueRows:
        """Rows of one memory."""
        return cls((memory,), np.zeros(len(starts), np.int32), starts, lengths)

    def __len__(self) -> int:
        return len(self.starts)

    @overload
    def __getitem__(self, row: int) -> Bytes: ...

    @overload
    def __getitem__(self, row: slice) -> ValueRows: ...

    def __getitem__(self, row: int | slice) -> Bytes | ValueRows:
        if isinstance(row, slice):
            return ValueRows(self.memories, self.which[row], self.starts[row], self.lengths[row])
        start, memory = int(self.starts[row]), self.memories[int(self.which[row])]
        return memory[start : start + int(self.lengths[row])]

    def __iter__(self) -> Iterator[Bytes]:
        memories = self.memories
        ends = self.starts + self.lengths
        for place, a, b in zip(
            self.which.tolist(), self.starts.tolist(), ends.tolist(), strict=True
        ):
            yield memories[place][a:b]

    def views(self) -> Iterator[memoryview]:
        """Each row as a memoryview, which takes half the time of an array."""
        memories = [one.data for one in self.memories]
        ends = self.starts + self.lengths
        for place, a, b in zip(
            self.which.tolist(), self.starts.tolist(), ends.tolist(), strict=True
        ):
            yield memories[place][a:b]

    def taken(self, rows: Int64s) -> ValueRows:
        """These rows, in this order."""
        return ValueRows(self.memories, self.which[rows], self.starts[rows], self.lengths[rows])

    def begin_with(self, prefix: bytes) -> npt.NDArray[np.bool_]:
        """Which rows begin with these bytes."""
        found = self.lengths >= len(prefix)
        for place, memory in enumerate(self.memories):
            here = np.flatnonzero(found & (self.which == place))
            for at, byte in enumerate(prefix):
                here = here[memory[self.starts[here] + at] == byte]
            found[self.which == place] = False
            found[here] = True
        return found

    def addresses(self) -> UInt64s:
        """Where each row begins. Raises IndexError when one is not wholly in its memory."""
        sizes = np.array([len(one) for one in self.memories], np.int64)
        room = sizes[self.which] - self.starts
        outside = (self.starts < 0) | (self.lengths < 0) | (self.lengths > room)
        if outside.any():
            raise IndexError(f"value {int(outside.argmax())} is outside of its memory")
        bases = np.array([address_of(one) if len(one) else 0 for one in self.memories], np.uint64)
        return bases[self.which] + self.starts.astype(np.uint64)


def joined_rows(parts: Sequence[ValueRows]) -> ValueRows:
    """All of them, one after another. No bytes are copied."""
    if len(parts) == 1:
        return parts[0]
    before = np.cumsum([0, *(len(part.memories) for part in parts)])
    which = [part.which + np.int32(first) for part, first in zip(parts, before, strict=False)]
    return ValueRows(
        tuple(memory for part in parts for memory in part.memories),
        np.concatenate(which),
        np.concatenate([part.starts for part in parts]),
        np.concatenate([part.lengths for part in parts]),
    )


def lengths_of(rows: Sequence[Bytes]) -> Int64s:
    """Bytes of each."""
    if isinstance(rows, ValueRows):
        return rows.lengths
    return np.fromiter(map(len, rows), np.int64, len(rows))
