"""Rows that come as Arrow batches of one schema: their fields, and their samples."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hpstore.loaders.dataset.class_names import UNITS
from hpstore.loaders.dataset.fields import Field
from hpstore.loaders.ingestion.arrow_columns import arrow_field, arrow_samples, time_units
from hpstore.loaders.ingestion.arrow_nested import Convert, with_none
from hpstore.loaders.ingestion.sample_source import BLOCK_SHIFT, BlockwiseSource
from hpstore.loaders.ingestion.source_rows import SourceItem


class ArrowRows(BlockwiseSource):
    """A source of such rows. Any: pyarrow ships no types."""

    def __init__(self, arrow: Any, schema: Any) -> None:
        self._arrow, self._schema = arrow, schema
        self._names: list[str] = list(schema.names)
        self._optional: dict[str, bool] = {}

    @property
    def metadata(self) -> dict[str, object]:
        """Units of times."""
        units = time_units(self._arrow, self._schema)
        return {UNITS: units} if units else {}

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
            self._optional[name] = self._has_null(name)
        if self._optional[name]:
            return replace(made, optional=True), with_none(convert)
        return made, convert

    def read_block(self, block: int, start: int) -> Iterator[SourceItem]:
        found = {name: self._column(name) for name in self._names}
        columns = {name: convert for name, (_, convert) in found.items()}
        optional = [name for name, (made, _) in found.items() if made.optional]
        number = start
        for batch in self._batches(block, start):
            for sample, problem in arrow_samples(batch, columns, optional):
                yield SourceItem(
                    name=self._name(block, number),
                    origin=block << BLOCK_SHIFT | number,
                    sample=sample,
                    problem=problem,
                )
                number += 1

    @abstractmethod
    def _has_null(self, name: str) -> bool:
        """Whether a column is one of an optional field."""

    @abstractmethod
    def _batches(self, block: int, start: int) -> Iterator[Any]:
        """The named columns of a block, from its row `start` on."""

    @abstractmethod
    def _name(self, block: int, number: int) -> str:
        """Of a row of a block."""
