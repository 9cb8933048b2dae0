"""Values of a field of text or bytes as they are stored, many at once: no objects of Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hpstore.codec.galois import Bytes
from hpstore.loaders.dataset.fields import MAX_VALUE_BYTES, Field
from hpstore.loaders.dataset.value_rows import ValueRows, joined_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredValues:
    """One value a row. Who makes it has checked that text is UTF-8 and that no value is too long.

    `there`: False where a value is None (its row is empty); None: all are there.
    """

    text: bool
    rows: ValueRows
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
        return StoredValues(text=self.text, rows=self.rows.taken(rows), there=there)

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
    """Values that lie back to back; None where one is longer than a field may have."""
    lengths = np.diff(offsets)
    if int(lengths.max(initial=0)) > MAX_VALUE_BYTES:
        return None
    if there is not None:
        lengths[~there] = 0
    return StoredValues(text=text, rows=ValueRows.of(flat, offsets[:-1], lengths), there=there)


def joined_values(parts: Sequence[StoredValues]) -> StoredValues:
    """All of them, one after another; of one kind."""
    rows = joined_rows([part.rows for part in parts])
    if all(part.there is None for part in parts):
        return StoredValues(text=parts[0].text, rows=rows)
    there = [np.ones(len(p), np.bool_) if p.there is None else p.there for p in parts]
    return StoredValues(text=parts[0].text, rows=rows, there=np.concatenate(there))
