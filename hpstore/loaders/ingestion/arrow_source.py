"""Parquet and Arrow files: columns become fields (needs pyarrow, the extra `parquet`).

Rows are read block by block: a block is a row group of Parquet, a record batch of an Arrow file, a
whole Arrow stream.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpstore.errors import ConfigError, IngestError, MalformedFile
from hpstore.format.untrusted_bytes import MALFORMED
from hpstore.loaders.dataset.class_names import CLASSES, UNITS
from hpstore.loaders.dataset.fields import Field
from hpstore.loaders.ingestion.arrow_classes import (
    class_numbers,
    dictionary_classes,
    is_categorical,
    recorded_classes,
)
from hpstore.loaders.ingestion.arrow_columns import arrow_field, arrow_rows, time_units
from hpstore.loaders.ingestion.arrow_nested import Convert, with_none
from hpstore.loaders.ingestion.hive_partitions import Partitions, root_of
from hpstore.loaders.ingestion.null_columns import NullColumns
from hpstore.loaders.ingestion.optional_packages import needed
from hpstore.loaders.ingestion.sample_source import BLOCK_SHIFT, BlockwiseSource, digest_of
from hpstore.loaders.ingestion.source_paths import SourceFile, file_facts, is_remote, local_path
from hpstore.loaders.ingestion.source_rows import ItemRows, SourceItem, SourceRows
from hpstore.loaders.ingestion.table_files import table_files
from hpstore.units import MIB

PARQUET = (".parquet", ".pq")
ARROW = (".arrow", ".feather", ".ipc")
BATCH_ROWS = 4096  # at most
BATCH_BYTES = 8 * MIB  # approximate, for Parquet: read-ahead counts whole batches


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """A part of a file that is read by itself. `rows` is None where only reading tells."""

    file: SourceFile
    part: int
    rows: int | None
    problem: str = ""


class ArrowTables(BlockwiseSource):
    """Rows of Parquet or Arrow files. A file that cannot be opened is a bad record.

    Numbers and booleans become scalars, dates, times and durations ints in their own unit, strings
    and binaries str and bytes, lists of numbers ragged arrays, fixed-size lists arrays, and a
    struct with a binary `bytes` (as Hugging Face writes images) bytes. Lists of strings are that,
    other lists and structs of what JSON has are JSON. A column that has a null is optional, unless
    the user says that it is not: then, as inside lists of numbers, nulls are bad records.
    """

    kind = "parquet"
    by_files = True
    reads_ahead = True

    def __init__(
        self, where: str | os.PathLike[str], *, storage: Mapping[str, object] | None = None
    ) -> None:
        self._arrow = pyarrow_of("Parquet and Arrow files")
        self.where = str(where)
        self._files, self.ignored = table_files(where, PARQUET + ARROW, self._named, storage or {})
        self._blocks: list[_Block] = []
        self._schema: Any = None  # Any: pyarrow ships no types
        self._first: tuple[SourceFile, dict[str, Any]] | None = None  # file that it is of, types
        self._nullable: set[str] = set()  # in any of the files
        for file in self._files:
            self._open(file)
        if self._schema is None:
            raise IngestError(f"{self.where}: {self._blocks[0].problem}")
        self._root: Path | None = None if is_remote(where) else root_of(local_path(where))
        self._partitions: Partitions = Partitions(self._arrow, self._root, self._files)
        for field in self._partitions.schema:
            self._schema = self._schema.append(field)
        _columns(self._files[0], self._schema.names, self._schema.types)
        self.blocks = len(self._blocks)
        rows = [block.rows for block in self._blocks]
        self.length = None if None in rows else sum(r for r in rows if r is not None)
        self._names: list[str] = list(self._schema.names)
        self._types: Mapping[str, Field] = {}
        self._nulls: NullColumns = NullColumns(self.where)
        self._classes: dict[str, list[str]] = {}

    @property
    def files(self) -> list[str]:
        """Paths or URLs. Raises ConfigError where folders hold a part of the records."""
        if self._partitions.schema.names:
            raise ConfigError(
                f"{self.where} is divided by {', '.join(self._partitions.schema.names)}, which its "
                "files do not hold: ingest() takes it as a whole"
            )
        return [str(file) for file in self._files]

    def _named(self, metadata: Path) -> list[str]:
        """The files that a `_metadata` of Parquet names. Raises IngestError."""
        try:
            read = self._arrow.parquet.read_metadata(metadata)
            groups = [read.row_group(number) for number in range(read.num_row_groups)]
            return list(dict.fromkeys(group.column(0).file_path for group in groups))
        except (self._arrow.ArrowException, OSError, *MALFORMED) as error:
            raise MalformedFile(f"{metadata} cannot be read: {_line(error)}") from error

    def _open(self, file: SourceFile) -> None:
        """Add the blocks of a file, or one that says why it cannot be read. Raises IngestError for
        a file with other columns: it is another table, and not a bad record of this one."""
        try:
            schema, rows = _outline(self._arrow, file)
            names = list(schema.names)  # bytes that are no text raise here
        except (self._arrow.ArrowException, OSError, *MALFORMED) as error:
            problem = f"it cannot be read: {_line(error)}"
            self._blocks.append(_Block(file=file, part=0, rows=1, problem=problem))
            return
        columns = _columns(file, names, schema.types)
        if self._first is None:
            self._schema, self._first = schema, (file, columns)
        first, known = self._first
        if columns != known:
            raise IngestError(
                f"{file} has other columns than {first.name}: {_differences(known, columns)}. "
                "Nothing was written; name the files of one table with a pattern"
            )
        self._require_same_classes(file, schema)
        self._nullable |= {field.name for field in schema if field.nullable}
        self._blocks += [_Block(file=file, part=i, rows=count) for i, count in enumerate(rows)]

    def _require_same_classes(self, file: SourceFile, schema: Any) -> None:
        """Raise IngestError where a file's class numbers stand for other classes."""
        assert self._first is not None
        known = recorded_classes(self._schema)
        for name, classes in recorded_classes(schema).items():
            if known.get(name, classes) != classes:
                raise IngestError(
                    f"{file}: numbers of {name!r} stand for other classes than in "
                    f"{self._first[0].name}: {str(classes)[:200]}, not {str(known[name])[:200]}. "
                    "Nothing was written; make them a column of texts, or ingest each by itself"
                )

    def restrict(self, names: Sequence[str], types: Mapping[str, Field]) -> None:
        self._types = types  # whether they are optional, and codes of dictionaries: else its own
        self._names = [name for name in self._schema.names if name in names]

    @property
    def fields(self) -> dict[str, Field]:
        return {name: self._column(name)[0] for name in self._names}

    def _column(self, name: str) -> tuple[Field, Convert]:
        """The field of a column, and how its values are made."""
        made, convert = arrow_field(self._arrow, self._schema.field(name))
        given = self._types.get(name)
        if given is not None and given.dtype != "str" and self._is_categorical(name):
            made, convert = given, class_numbers(self._arrow, self._classes_of(name), given)
        if given is None and name not in self._nulls.known:
            self._find_nulls()
        if given.optional if given is not None else self._nulls.known[name]:
            return replace(made, optional=True), with_none(convert)
        return made, convert

    def _is_categorical(self, name: str) -> bool:
        return is_categorical(self._arrow, self._schema.field(name).type)

    def _classes_of(self, name: str) -> list[str]:
        """The texts of a dictionary, read once; blocks that cannot be read are left out."""
        if name not in self._classes:
            columns = (
                batch.column(0)
                for block in self._blocks
                for batch in self._readable(block, [name])
                if batch.num_rows
            )
            self._classes[name] = dictionary_classes(columns)
        return self._classes[name]

    def _readable(self, block: _Block, names: Sequence[str]) -> Iterator[Any]:
        """Batches of a block with these columns, as far as it can be read."""
        if not block.problem:
            with contextlib.suppress(self._arrow.ArrowException, OSError, *MALFORMED):
                for batch in _batches(self._arrow, block, names):
                    batch.validate(full=True)
                    yield batch

    @property
    def metadata(self) -> dict[str, object]:
        """Names of classes by column: those that Hugging Face recorded, and of dictionaries. Units
        of times."""
        found = recorded_classes(self._schema)
        for name in self._schema.names:
            if self._is_categorical(name) and (names := self._classes_of(name)):
                found.setdefault(name, names)
        return {
            **({CLASSES: found} if found else {}),
            **({UNITS: units} if (units := time_units(self._arrow, self._schema)) else {}),
        }

    def _find_nulls(self) -> None:
        """Which columns are optional, of those of which that is not known.

        The columns are read: pyarrow 26 crashes on statistics of a malformed Parquet file. Only the
        beginnings of a few blocks are, as a null that comes later is met when the rows are read:
        then all is read again, with another look at every row (decision 0154).
        """
        nulls = self._nulls
        unknown = [n for n in self._names if n not in nulls.known and n not in self._types]
        for name in unknown:
            divided = name in self._partitions.schema.names
            nulls.known[name] = divided and self._partitions.has_null(name)
        nulls.find(
            [name for name in unknown if self._may_be_null(name)],
            self.blocks,
            lambda block, names: self._readable(self._blocks[block], names),
        )

    def _may_be_null(self, name: str) -> bool:
        inside = name not in self._partitions.schema.names
        return inside and name in self._nullable

    def recall(self, fields: Mapping[str, Field]) -> None:
        self.restrict(list(fields), {})
        self._nulls.known = {name: made.optional for name, made in fields.items()}
        own = self.fields  # what is not like them, the user had given
        self._types = {name: made for name, made in fields.items() if own.get(name) != made}

    def fingerprint(self) -> str:
        """Over the path, size and time of change of every file."""
        return digest_of([self.kind, *file_facts(self._files)])

    def _name(self, file: SourceFile) -> str:
        """Of a divided table, with the folders."""
        if self._partitions.schema.names and self._root is not None and isinstance(file, Path):
            return str(file.relative_to(self._root))
        return file.name

    def read_block(self, block: int, start: int) -> Iterator[SourceItem]:
        for rows in self.read_rows(block, start):
            yield from rows.items()

    def read_rows(self, block: int, start: int) -> Iterator[SourceRows]:
        """By columns, a record batch at a time."""
        found = self._blocks[block]
        origin, number = block << BLOCK_SHIFT, 0
        name = self._name(found.file)
        if found.problem:
            if not start:
                yield ItemRows([SourceItem(name=name, origin=origin, problem=found.problem)])
            return
        name = name if found.rows is None else f"{name}: block {found.part}"
        ours = self._partitions.schema.names
        inside = [n for n in self._names if n not in ours]
        made = {n: self._column(n) for n in self._names}
        assumed = self._nulls.assumed([n for n in inside if n not in self._types])
        try:
            for read in _batches(self._arrow, found, inside):
                read.validate(full=True)  # offsets that lie lead to other memory
                self._nulls.refuse(read, assumed, name)
                batch = self._partitions.added(found.file, read, self._names) if ours else read
                low = min(max(0, start - number), batch.num_rows)
                if low < batch.num_rows:
                    yield from arrow_rows(
                        batch.slice(low), made, f"{name} row", origin, number + low
                    )
                number += batch.num_rows
        except (self._arrow.ArrowException, OSError, *MALFORMED) as error:
            if start <= number:  # else it was given before this place
                problem = f"it cannot be read past row {number}: {_line(error)}"
                yield ItemRows([SourceItem(name=name, origin=origin | number, problem=problem)])


def pyarrow_of(what: str) -> Any:
    """pyarrow, which these files need. Raises ConfigError where it is not installed."""
    with needed(f"{what} need pyarrow", extra="parquet"):
        import pyarrow
        import pyarrow.csv
        import pyarrow.dataset
        import pyarrow.fs
        import pyarrow.parquet
    return pyarrow


def _line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _columns(file: SourceFile, names: Sequence[str], types: Sequence[Any]) -> dict[str, Any]:
    """Types by name: files of one table may have them in another order. Raises ConfigError."""
    columns = dict(zip(names, types, strict=True))
    if len(columns) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"{file} has several columns named {twice!r}: rename them")
    return columns


def _differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """The first few, for a message."""
    found = [
        f"it has {name!r}"
        if name not in ours
        else f"it lacks {name!r}"
        if name not in theirs
        else f"{name!r} is {theirs[name]}, not {ours[name]}"
        for name in dict.fromkeys([*ours, *theirs])
        if ours.get(name) != theirs.get(name)
    ]
    return ", ".join(found[:4])


def _is_parquet(file: SourceFile) -> bool:
    with file.open("rb") as opened:
        return opened.read(4) == b"PAR1"


def _is_stream(file: SourceFile) -> bool:
    """Whether an Arrow file is a stream, as Hugging Face writes, and not the one with a footer."""
    with file.open("rb") as opened:
        return opened.read(6) != b"ARROW1"


def _readable(arrow: Any, file: SourceFile) -> Any:
    """A file for pyarrow: mapped, or ranges of a remote one."""
    if isinstance(file, Path):
        with file.open("rb") as opened:  # pyarrow takes paths of UTF-8 alone
            return arrow.memory_map(f"/proc/self/fd/{opened.fileno()}")
    return arrow.PythonFile(file.open("rb", buffering=0), "r")


def _outline(arrow: Any, file: SourceFile) -> tuple[Any, list[int | None]]:
    """Schema, and the rows of each block."""
    if _is_parquet(file):
        with arrow.parquet.ParquetFile(_readable(arrow, file)) as opened:
            groups = opened.metadata
            rows = [groups.row_group(i).num_rows for i in range(groups.num_row_groups)]
            return opened.schema_arrow, rows
    with _readable(arrow, file) as mapped:
        if _is_stream(file):
            return arrow.ipc.open_stream(mapped).schema, [None]
        reader = arrow.ipc.open_file(mapped)
        parts = range(reader.num_record_batches)
        return reader.schema, [reader.get_batch(i).num_rows for i in parts]


def _batches(arrow: Any, block: _Block, names: Sequence[str]) -> Iterator[Any]:
    """Record batches of a block with these columns, each of bounded rows where Parquet is read."""
    if _is_parquet(block.file):
        with arrow.parquet.ParquetFile(_readable(arrow, block.file)) as opened:
            rows = _batch_rows(opened.metadata.row_group(block.part), set(names))
            yield from opened.iter_batches(rows, row_groups=[block.part], columns=list(names))
        return
    with _readable(arrow, block.file) as mapped:
        if _is_stream(block.file):
            for batch in arrow.ipc.open_stream(mapped):
                yield batch.select(list(names))
        else:
            yield arrow.ipc.open_file(mapped).get_batch(block.part).select(list(names))


def _batch_rows(group: Any, names: set[str]) -> int:
    """How many rows of a row group are read at once, by the bytes of these columns in it."""
    columns = [group.column(place) for place in range(group.num_columns)]
    nbytes = sum(
        column.total_uncompressed_size
        for column in columns
        if column.path_in_schema.partition(".")[0] in names
    )
    return int(min(max(BATCH_BYTES * group.num_rows // max(nbytes, 1), 1), BATCH_ROWS))
