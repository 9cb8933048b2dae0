"""Datasets of Hugging Face `datasets`, as they are in memory: with a length, or streaming.

Their Arrow data is read as it is: nothing is decoded, and what map() and select() made is there.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hpstore.errors import ConfigError, IngestError
from hpstore.loaders.dataset.class_names import CLASSES
from hpstore.loaders.dataset.fields import Field
from hpstore.loaders.ingestion.arrow_classes import recorded_classes
from hpstore.loaders.ingestion.arrow_rows import ArrowRows
from hpstore.loaders.ingestion.arrow_source import pyarrow_of
from hpstore.loaders.ingestion.sample_source import BlockwiseSource, digest_of
from hpstore.units import div_ceil

BLOCK_ROWS = 1000
_SUMS = {
    "ArrowExamplesIterable",
    "ExamplesIterable",
    "FilteredExamplesIterable",
    "FormattedExamplesIterable",
    "MappedExamplesIterable",
    "RebatchedArrowExamplesIterable",
    "SelectColumnsIterable",
    "VerticallyConcatenatedMultiSourcesExamplesIterable",
}
"""What streams consist of in `datasets` whose shards have the same rows."""


class _Tables(ArrowRows):
    """Rows of tables. Any: datasets is not imported here."""

    kind = "huggingface"

    def __init__(self, dataset: Any, schema: Any) -> None:
        super().__init__(pyarrow_of("datasets of Hugging Face"), schema)
        self._dataset, self.where = dataset, type(dataset).__name__
        self._whole = True  # no field was chosen: a column that comes late is not left out

    def restrict(self, names: Sequence[str], types: Mapping[str, Field]) -> None:
        super().restrict(names, types)
        self._whole = False

    def keep_whole(self) -> None:
        self._whole = True

    @property
    def metadata(self) -> dict[str, object]:
        """Names of classes by column, as `datasets` records them, and units of times."""
        found = recorded_classes(self._schema)
        return {**({CLASSES: found} if found else {}), **super().metadata}

    def _batches(self, block: int, start: int) -> Iterator[Any]:
        for table in self._tables(block, start):
            there = set(table.column_names)
            odd = set(self._names) - there
            if self._whole:
                odd |= there - set(self._schema.names)
            if odd:
                raise IngestError(
                    f"{self.where}: only some of its rows have {min(odd)!r}: give the stream its "
                    "features (cast), or fields=[...] that all rows have"
                )
            yield from table.select(self._names).to_batches()

    @abstractmethod
    def _tables(self, block: int, start: int) -> Iterator[Any]:
        """Rows of a block from number `start` on."""


class HuggingFaceRows(_Tables):
    """A datasets.Dataset; a block is 1000 rows."""

    def __init__(self, dataset: Any) -> None:
        super().__init__(dataset, dataset.features.arrow_schema)
        self.length = len(dataset)
        self.blocks = div_ceil(self.length, BLOCK_ROWS)

    def fingerprint(self) -> str:
        """The fingerprint that datasets keeps: of the source and all that was done to it."""
        made = getattr(self._dataset, "_fingerprint", "")
        return digest_of([self.kind, made, self.length, str(self._schema)])

    def _tables(self, block: int, start: int) -> Iterator[Any]:
        first = block * BLOCK_ROWS
        stop = min(first + BLOCK_ROWS, self.length or 0)
        if first + start < stop:
            yield self._dataset.with_format("arrow")[first + start : stop]

    def _has_null(self, name: str) -> bool:
        rows = self._dataset.with_format("arrow")
        starts = range(0, self.length or 0, BLOCK_ROWS)
        return any(rows[at : at + BLOCK_ROWS].column(name).null_count for at in starts)

    def _name(self, block: int, number: int) -> str:
        return f"{self.where}[{block * BLOCK_ROWS + number}]"


class HuggingFaceStream(_Tables):
    """A datasets.IterableDataset; a block is one of its shards, or all of it where shards by
    themselves have other rows than the stream. A resumed ingest skips rows."""

    def __init__(self, dataset: Any) -> None:
        arrow = pyarrow_of("datasets of Hugging Face")
        if dataset.features is not None:
            schema = dataset.features.arrow_schema
        else:
            first = next(iter(dataset.with_format("arrow").iter(batch_size=BLOCK_ROWS)), None)
            schema = arrow.schema([]) if first is None else first.schema
        super().__init__(dataset, schema)
        shards = int(getattr(dataset, "num_shards", 0) or dataset.n_shards)
        self.blocks = shards if _is_sum_of_shards(dataset) else 1

    def fingerprint(self) -> str:
        """Over its origin, columns and shards: rows are not looked at, as that would draw them."""
        info = self._dataset.info
        said = [info.builder_name, info.dataset_name, info.config_name, str(info.version)]
        split = str(self._dataset.split)
        return digest_of([self.kind, *said, split, str(self._schema), self.blocks])

    def _tables(self, block: int, start: int) -> Iterator[Any]:
        shard = self._dataset.with_format("arrow")
        if self.blocks > 1:
            shard = shard.shard(num_shards=self.blocks, index=block)
        if start:
            shard = shard.skip(start)
        yield from shard.iter(batch_size=BLOCK_ROWS)

    def _has_null(self, name: str) -> bool:
        """Rows of a stream are not looked at: fields= says which fields are optional."""
        return False

    def _name(self, block: int, number: int) -> str:
        return f"{self.where}: shard {block} row {number}"


def _is_sum_of_shards(dataset: Any) -> bool:
    """Whether the rows of a stream are those of its shards, one after another.

    shard() divides take(n) and skip(n) among the shards, which gives other rows; so do mixtures,
    functions of batches where a batch ends with its shard, and functions that count rows, which
    start again in each. Unknown kinds are read undivided.
    """
    parts = [getattr(dataset, "_ex_iterable", None)]
    for part in parts:  # which grows
        divided = getattr(part, "batched", False) or getattr(part, "with_indices", False)
        if type(part).__name__ not in _SUMS or divided:
            return False
        inner = getattr(part, "ex_iterable", None)
        parts += [*getattr(part, "ex_iterables", ()), *([] if inner is None else [inner])]
    return True


def hugging_face(source: Any) -> BlockwiseSource:
    """The source of an object of `datasets`. Raises ConfigError for what has no rows."""
    if hasattr(source, "data") and hasattr(source, "features") and hasattr(source, "__len__"):
        return HuggingFaceRows(source)
    if hasattr(source, "iter") and hasattr(source, "features"):
        return HuggingFaceStream(source)
    raise ConfigError(f"a {type(source).__name__} of datasets is no source of samples")
