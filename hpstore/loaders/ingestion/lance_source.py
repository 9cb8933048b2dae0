"""Lance datasets: columns become fields as of Parquet (needs pylance, the extra `lance`).

A block is a fragment of the version that is the newest when the source is opened.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hpstore.errors import ConfigError, MalformedFile
from hpstore.format.untrusted_bytes import MALFORMED, brief
from hpstore.loaders.dataset.fields import Field
from hpstore.loaders.ingestion.arrow_rows import ArrowRows
from hpstore.loaders.ingestion.arrow_source import pyarrow_of
from hpstore.loaders.ingestion.null_columns import NullColumns
from hpstore.loaders.ingestion.optional_packages import needed
from hpstore.loaders.ingestion.sample_source import BLOCK_SHIFT, FieldsChanged, digest_of, printable
from hpstore.loaders.ingestion.source_paths import local_path
from hpstore.loaders.ingestion.source_rows import SourceItem

LANCE = (".lance",)
BATCH_ROWS = 1024
_ERRORS = (OSError, RuntimeError, *MALFORMED)


class LanceRows(ArrowRows):
    """Rows of a Lance dataset; rows that were deleted are not there."""

    kind = "lance"

    def __init__(self, where: str | os.PathLike[str]) -> None:
        arrow = pyarrow_of("Lance datasets")
        with needed("Lance needs pylance", extra="lance"):
            import lance
        self.where = printable(str(where))
        try:
            self._dataset: Any = lance.dataset(local_path(where))  # Any: it is untyped
            self._fragments = self._dataset.get_fragments()
            schema = self._dataset.schema
            self.length = self._dataset.count_rows()
        except _ERRORS as error:
            if isinstance(error, ConfigError):
                raise
            raise MalformedFile(f"{self.where} cannot be read: {brief(error)}") from error
        super().__init__(arrow, schema)
        self.blocks = len(self._fragments)
        self._types: Mapping[str, Field] = {}
        self._nulls = NullColumns(self.where)

    def restrict(self, names: Sequence[str], types: Mapping[str, Field]) -> None:
        super().restrict(names, types)
        self._types = types

    def recall(self, fields: Mapping[str, Field]) -> None:
        self.restrict(list(fields), {})
        self._nulls.known = {name: made.optional for name, made in fields.items()}

    def _has_null(self, name: str) -> bool:
        if name not in self._nulls.known:
            self._find_nulls()
        return self._nulls.known[name]

    def _find_nulls(self) -> None:
        """Which columns are optional, of those of which that is not known."""
        unknown = [n for n in self._names if n not in self._nulls.known and n not in self._types]
        self._nulls.known |= dict.fromkeys(unknown, False)
        nullable = [name for name in unknown if self._schema.field(name).nullable]
        self._nulls.find(nullable, self.blocks, self._readable)

    def _readable(self, block: int, names: Sequence[str]) -> Iterator[Any]:
        """Batches of a fragment with these columns, as far as it can be read."""
        with contextlib.suppress(*_ERRORS):
            yield from self._fragments[block].to_batches(columns=list(names), batch_size=BATCH_ROWS)

    def fingerprint(self) -> str:
        """Over the path, the version with its time, and the rows of each fragment."""
        versions = self._dataset.versions()
        newest = next(v for v in versions if v["version"] == self._dataset.version)
        rows = [[found.fragment_id, found.count_rows()] for found in self._fragments]
        return digest_of([self.kind, self.where, newest["version"], str(newest["timestamp"]), rows])

    def read_block(self, block: int, start: int) -> Iterator[SourceItem]:
        number = start
        try:
            for item in super().read_block(block, start):
                number += 1
                yield item
        except _ERRORS as error:
            problem = f"it cannot be read past row {number}: {brief(error)}"
            origin = block << BLOCK_SHIFT | number
            yield SourceItem(name=f"fragment {block}", origin=origin, problem=problem)

    def _batches(self, block: int, start: int) -> Iterator[Any]:
        fragment = self._fragments[block]
        assumed = self._nulls.assumed([name for name in self._names if name not in self._types])
        for batch in fragment.to_batches(
            columns=self._names, batch_size=BATCH_ROWS, offset=start or None
        ):
            try:
                self._nulls.refuse(batch, assumed, f"fragment {fragment.fragment_id}")
            except FieldsChanged:
                self.restrict(self._names, self._types)  # all rows are looked at, next time
                raise
            yield batch

    def _name(self, block: int, number: int) -> str:
        return f"fragment {self._fragments[block].fragment_id} row {number}"
