"""Which columns of a table are optional, by a look at a few of its rows (decision 0154)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

from hpstore.loaders.ingestion.sample_source import FieldsChanged

Batches = Callable[[int, Sequence[str]], Iterator[Any]]
"""Record batches of a block with these columns; pyarrow is untyped."""


class NullColumns:
    """What is known of nulls. The beginnings of a few blocks are looked at: a null that comes later
    is met when the rows are read, and then every row is looked at before they are read again."""

    def __init__(self, where: str) -> None:
        self.known: dict[str, bool] = {}  # whether a column has a null
        self._where, self._look_at_all = where, False

    def find(self, names: Sequence[str], blocks: int, read: Batches) -> None:
        """Look at these columns of a table of so many blocks."""
        self.known |= dict.fromkeys(names, False)
        left = list(names)
        chosen = {0, (blocks - 1) // 2, blocks - 1} if blocks else set[int]()
        for block in range(blocks) if self._look_at_all else sorted(chosen):
            if not left:
                break
            batches = read(block, left)
            for batch in batches if self._look_at_all else islice(batches, 1):
                for name in left:
                    if batch.column(name).null_count:
                        self.known[name] = True
            left = [name for name in left if not self.known[name]]

    def assumed(self, names: Sequence[str]) -> list[str]:
        """Those that are taken to have no null, though not all of their rows were looked at."""
        return [] if self._look_at_all else [name for name in names if not self.known[name]]

    def refuse(self, batch: Any, names: Sequence[str], place: str) -> None:
        """Raise FieldsChanged for a null in a column of which a few rows had none."""
        for name in names:
            if batch.column(name).null_count:
                self._look_at_all, self.known = True, {}
                raise FieldsChanged(
                    f"column {name!r} of {self._where} has its first null in {place}, so it is "
                    "optional"
                )
