"""Lance datasets: columns become fields as of Parquet (needs pylance, the extra `lance`).

A block is a fragment of the version that is the newest when the source is opened.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hpstore.errors import ConfigError, MalformedFile
from hpstore.format.untrusted_bytes import MALFORMED, brief
from hpstore.loaders.dataset.fields import Field
from hpstore.loaders.ingestion.arrow_columns import arrow_field, arrow_samples
from hpstore.loaders.ingestion.arrow_nested import Convert, with_none
from hpstore.loaders.ingestion.arrow_source import pyarrow_of
from hpstore.loaders.ingestion.sample_source import (
    BLOCK_SHIFT,
    BlockwiseSource,
    digest_of,
    printable,
)
from hpstore.loaders.ingestion.source_paths import local_path
from hpstore.loaders.ingestion.source_rows import SourceItem

LANCE = (".lance",)
BATCH_ROWS = 1024
_ERRORS = (OSError, RuntimeError, *MALFORMED)


class LanceRows(BlockwiseSource):
    """Rows of a Lance dataset; rows that were deleted are not there."""

    kind = "lance"

    def __init__(self, where: str | os.PathLike[str]) -> None:
        self._arrow = pyarrow_of("Lance datasets")
        try:
            import lance
        except ImportError as error:
            raise ConfigError("Lance needs pylance: pip install 'hpstore[lance]'") from error
        self.where = printable(str(where))
        try:
            self._dataset: Any = lance.dataset(local_path(where))  # Any: it is untyped
            self._fragments = self._dataset.get_fragments()
            self._schema = self._dataset.schema
            self.length = self._dataset.count_rows()
        except _ERRORS as error:
            if isinstance(error, ConfigError):
                raise
            raise MalformedFile(f"{self.where} cannot be read: {brief(error)}") from error
        self.blocks = len(self._fragments)
        self._names: list[str] = list(self._schema.names)
        self._optional: dict[str, bool] = {}

    def restrict(self, names: Sequence[str], types: Mapping[str, Field]) -> None:
        self._optional = {name: made.optional for name, made in types.items()}
        self._names = [name for name in self._schema.names if name in names]

    @property
    def fields(self) -> dict[str, Field]:
        return {name: self._column(name)[0] for name in self._names}

    def _column(self, name: str) -> tuple[Field, Convert]:
        """The field of a column, and how its values are made; optional where it holds a null."""
        made, convert = arrow_field(self._arrow, self._schema.field(name))
        if name not in self._optional:
            found = self._dataset.scanner(columns=[name]).to_batches()
            self._optional[name] = any(batch.column(0).null_count for batch in found)
        if self._optional[name]:
            return replace(made, optional=True), with_none(convert)
        return made, convert

    def fingerprint(self) -> str:
        """Over the path, the version with its time, and the rows of each fragment."""
        versions = self._dataset.versions()
        newest = next(v for v in versions if v["version"] == self._dataset.version)
        rows = [[found.fragment_id, found.count_rows()] for found in self._fragments]
        return digest_of([self.kind, self.where, newest["version"], str(newest["timestamp"]), rows])

    def read_block(self, block: int, start: int) -> Iterator[SourceItem]:
        found = {name: self._column(name) for name in self._names}
        columns = {name: convert for name, (_, convert) in found.items()}
        optional = [name for name, (made, _) in found.items() if made.optional]
        origin, number = block << BLOCK_SHIFT, start
        fragment = self._fragments[block]
        try:
            for batch in fragment.to_batches(
                columns=self._names, batch_size=BATCH_ROWS, offset=start or None
            ):
                for sample, problem in arrow_samples(batch, columns, optional):
                    yield SourceItem(
                        name=f"fragment {fragment.fragment_id} row {number}",
                        origin=origin | number,
                        sample=sample,
                        problem=problem,
                    )
                    number += 1
        except _ERRORS as error:
            problem = f"it cannot be read past row {number}: {brief(error)}"
            yield SourceItem(name=f"fragment {block}", origin=origin | number, problem=problem)
