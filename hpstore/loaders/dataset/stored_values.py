"""Values of a field of text or bytes as they are stored, many at once: no objects of Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from hpstore.codec.galois import Bytes
from hpstore.loaders.dataset.fields import MAX_VALUE_BYTES, Field

NOTHING: Bytes = np.empty(0, np.uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredValues:
    """One value a row. Who makes it has checked that text is UTF-8 and that no value is too long.

    `there`: False where a value is None (its row is empty); None: all are there.
    """

    text: bool
    rows: list[Bytes]
    there: npt.NDArray[np.bool_] | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def part(self, low: int, high: int) -> StoredValues:
        """Rows [low, high)."""
        there = None if self.there is None else self.there[low:high]
        return StoredValues(text=self.text, rows=self.rows[low:high], there=there)

    def taken(self, rows: npt.NDArray[np.int64]) -> StoredValues:
        """These rows, in this order."""
        there = None if self.there is None else self.there[rows]
        found = self.rows
        return StoredValues(text=self.text, rows=[found[i] for i in rows.tolist()], there=there)

    def value(self, row: int) -> object:
        """The value as Python has it."""
        if self.there is not None and not self.there[row]:
            return None
        raw = self.rows[row].tobytes()
        return raw.decode() if self.text else raw

    def fit(self, field: Field) -> bool:
        """Whether they can be stored in this field as they are, without another check."""
        kind = field.dtype == "str" and not field.shape if self.text else field.is_bytes
        return kind and not field.media_type and (field.optional or self.there is None)


def stored_values(
    flat: Bytes,
    offsets: npt.NDArray[np.int64],
    *,
    text: bool,
    there: npt.NDArray[np.bool_] | None = None,
) -> StoredValues | None:
    """Views of the values that lie back to back; None where one is longer than a field may have."""
    if len(offsets) > 1 and int(np.diff(offsets).max()) > MAX_VALUE_BYTES:
        return None
    ends = offsets.tolist()
    rows = [flat[a:b] for a, b in pairwise(ends)]
    if there is not None:
        for row in np.flatnonzero(~there).tolist():
            rows[row] = NOTHING
    return StoredValues(text=text, rows=rows, there=there)


def joined_values(parts: Sequence[StoredValues]) -> StoredValues:
    """All of them, one after another; of one kind."""
    rows = [row for part in parts for row in part.rows]
    if all(part.there is None for part in parts):
        return StoredValues(text=parts[0].text, rows=rows)
    there = [np.ones(len(p), np.bool_) if p.there is None else p.there for p in parts]
    return StoredValues(text=parts[0].text, rows=rows, there=np.concatenate(there))
