"""Lance datasets: columns become fields as of Parquet (needs pylance, the extra `lance`).

A block is a fragment of the version that is the newest when the source is opened.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from hpstore.errors import ConfigError, MalformedFile
from hpstore.format.untrusted_bytes import MALFORMED, brief
from hpstore.loaders.ingestion.arrow_rows import ArrowRows
from hpstore.loaders.ingestion.arrow_source import pyarrow_of
from hpstore.loaders.ingestion.optional_packages import needed
from hpstore.loaders.ingestion.sample_source import BLOCK_SHIFT, digest_of, printable
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

    def _has_null(self, name: str) -> bool:
        found = self._dataset.scanner(columns=[name]).to_batches()
        return any(batch.column(0).null_count for batch in found)

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
        yield from fragment.to_batches(
            columns=self._names, batch_size=BATCH_ROWS, offset=start or None
        )

    def _name(self, block: int, number: int) -> str:
        return f"fragment {self._fragments[block].fragment_id} row {number}"
