"""CSV and TSV files: columns become fields (read by pyarrow, the extra `parquet`).

pyarrow divides the text into values; it is not asked for their types, as it takes 007 for 7 and
some texts for times. A block is a file.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count, islice
from typing import IO, Any

from hpstore.errors import ConfigError, IngestError
from hpstore.format.untrusted_bytes import MALFORMED, brief
from hpstore.loaders.dataset.fields import Field
from hpstore.loaders.dataset.python_numbers import is_float
from hpstore.loaders.ingestion.arrow_source import pyarrow_of
from hpstore.loaders.ingestion.compressed_files import (
    COMPRESSIONS,
    STREAM_ERRORS,
    FilePosition,
    decompressed,
)
from hpstore.loaders.ingestion.json_schema import exact
from hpstore.loaders.ingestion.sample_source import (
    BLOCK_SHIFT,
    InferredFields,
    digest_of,
    printable,
)
from hpstore.loaders.ingestion.source_paths import SourceFile, file_facts, source_files
from hpstore.loaders.ingestion.source_rows import SourceItem
from hpstore.units import GIB, MIB, format_bytes

TABLE_TEXT = tuple(name + end for name in (".csv", ".tsv") for end in ("", *COMPRESSIONS))
LOOKED_AT = 1000
_BLOCK_BYTES = 4 * MIB
_ROW_BYTES = GIB  # pyarrow holds a row in one block, of which it has two
_INT = re.compile(rb"0|-?[1-9][0-9]{0,308}")  # not -0, which is another number than 0
_FLOAT = re.compile(
    rb"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|[nN]a[nN]|[-+]?[iI]nf(?:inity)?"
)
_MARK = b"\x1e"
"""A row behind the file: pyarrow takes an end for a closing quote, and this row for a part of the
last value then."""
_NO_DELIMITERS = ('"', "\n", "\r", "\0", _MARK.decode())
_CLOSED = "the mark"  # in the place of what is wrong with a row
_BOOLEANS = {b"true": True, b"True": True, b"TRUE": True}
_BOOLEANS |= {b"false": False, b"False": False, b"FALSE": False}
Row = tuple[bytes, ...]


class _Marked:
    """A stream with the mark behind it, unless there is no row in it. For pyarrow's PythonFile."""

    closed = False  # it is not this one's to close

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self._mark = stream, b""

    def read(self, nbytes: int = -1) -> bytes:
        """As a file's."""
        data = self._stream.read(nbytes)
        if not data:
            data, self._mark = self._mark, b""
        elif data.strip(b"\r\n"):
            self._mark = b"\n" + _MARK
        return data


class CsvFiles(InferredFields):
    """Rows of CSV files with a header. A row with more or fewer values is a bad record.

    Fields are inferred from the first 1000 rows (csv_fields), or what the user says that they are.
    """

    kind = "csv"
    by_files = True

    def __init__(
        self,
        where: str | os.PathLike[str],
        *,
        delimiter: str = "",
        storage: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__()
        self._arrow = pyarrow_of("CSV files")
        self.where = printable(str(where))
        self._delimiter = delimiter
        if delimiter and (len(delimiter) != 1 or not delimiter.isascii()):
            raise ConfigError(f"delimiter {delimiter!r} is not one ASCII character")
        if delimiter in _NO_DELIMITERS:
            raise ConfigError(f"delimiter {delimiter!r} has another meaning in CSV")
        self._files = source_files(where, TABLE_TEXT, storage or {})
        self.blocks = len(self._files)
        self._position = FilePosition()
        self._header: list[str] | None = None

    def block_bytes(self, block: int) -> int:
        return self._files[block].stat().st_size

    def bytes_read(self) -> int:
        return self._position.reached()

    def _columns(self) -> list[str]:
        """The header of the first file that can be read; those of all are alike. Raises
        ConfigError, IngestError."""
        if self._header is not None:
            return self._header
        problem = ""
        for file in self._files:
            try:
                names = self._names_in(file)
            except self._errors() as error:
                problem = problem or f"{printable(file.name)} cannot be read: {brief(error)}"
                continue
            if len(set(names)) < len(names):
                twice = next(name for name in names if names.count(name) > 1)
                raise ConfigError(f"{file} has several columns named {twice!r}: rename them")
            if self._header not in (None, names):
                raise IngestError(
                    f"{file} has the columns {names[:20]}, others have {(self._header or [])[:20]}."
                    " Nothing was written; name the files of one table with a pattern"
                )
            self._header = names
        if self._header is None:
            raise IngestError(f"{self.where}: {problem}. Nothing was written")
        return self._header

    def _names_in(self, file: SourceFile, nbytes: int = _BLOCK_BYTES) -> list[str]:
        """The header of a file. pyarrow wants the first row in the block with it."""
        try:
            with self._opened(file, nbytes, None, {}) as reader:
                return list(reader.schema.names)
        except self._arrow.ArrowInvalid as error:
            if "straddling" not in str(error) or nbytes >= _ROW_BYTES:
                raise
        return self._names_in(file, min(8 * nbytes, _ROW_BYTES))

    def _found(self) -> dict[str, Field]:
        header = self._columns()
        names = header if self._names is None else self._names
        for name in names:
            if name not in header:
                raise ConfigError(f"{self.where} has no {name!r}; it has {header[:20]}")
        for name, made in self._types.items():
            if made.shape or made.dtype.startswith("complex"):
                raise ConfigError(f"{name!r}: a value of CSV is a number or text, not {made}")
        if all(name in self._types for name in names):
            return {name: self._types[name] for name in names}
        rows: list[Row] = []
        for file in self._files:
            found = (row for _, row, _ in self._rows(file) if row is not None)
            rows += islice(found, LOOKED_AT - len(rows))
        if not rows:
            raise IngestError(
                f"{self.where}: no row to infer the fields from; nothing was written. Give "
                "fields={...}"
            )
        asked = [name for name in names if name not in self._types]
        columns = {name: [row[header.index(name)] for row in rows] for name in asked}
        told = csv_fields(columns)
        return {name: self._types.get(name) or told[name] for name in names}

    def keep_whole(self) -> None:
        more = [name for name in self._columns() if name not in self.fields]
        if more:
            raise ConfigError(f"{self.where} has {more[0]!r}, which the samples before it lack")
        super().keep_whole()

    def fingerprint(self) -> str:
        """Over the delimiter, and the path, size and time of change of every file."""
        return digest_of([self.kind, self._delimiter, *file_facts(self._files)])

    def read_block(self, block: int, start: int) -> Iterator[SourceItem]:
        file = self._files[block]
        name, fields = printable(file.name), self.fields
        places = [self._columns().index(field) for field in fields]
        for number, (at, row, problem) in islice(enumerate(self._rows(file)), start, None):
            sample: dict[str, object] | None = None
            if row is not None:
                try:
                    sample = {
                        field: csv_value(field, row[place], made)
                        for place, (field, made) in zip(places, fields.items(), strict=True)
                    }
                except ConfigError as error:
                    problem = str(error)
            yield SourceItem(
                name=f"{name} row {at}" if at else name,
                origin=block << BLOCK_SHIFT | number,
                sample=sample,
                problem=problem,
            )

    def _errors(self) -> tuple[type[Exception], ...]:
        return (self._arrow.ArrowException, *STREAM_ERRORS, *MALFORMED)

    def _rows(self, file: SourceFile) -> Iterator[tuple[int, Row | None, str]]:
        """As _divided(), without the mark: where it is no row, a quote is open."""
        held: tuple[int, Row | None, str] | None = None
        for found in self._divided(file):
            if held is not None:
                yield held
            held = found
        if held is None or held[1] == (_MARK,) or held[2] == _CLOSED:
            return
        number, _, problem = held
        yield number, None, "a quote in it is not closed" if number else problem

    def _divided(self, file: SourceFile) -> Iterator[tuple[int, Row | None, str]]:
        """Number (the header is row 1), values, or what is wrong; with larger blocks where a row
        is larger than one."""
        at, nbytes = 2, _BLOCK_BYTES
        while True:
            bad: dict[int, str] = {}
            numbers = count(2)
            try:
                with self._opened(file, nbytes, self._columns(), bad) as reader:
                    for batch in reader:
                        columns = [column.to_pylist() for column in batch.columns]
                        for row in zip(*columns, strict=True):
                            for number in numbers:
                                if number in bad and number >= at:
                                    yield number, None, bad[number]
                                    at = number + 1
                                if number not in bad:
                                    break
                            if number >= at:
                                yield number, row, ""
                                at = number + 1
                for number in sorted(bad):
                    if number >= at:
                        yield number, None, bad[number]
                return
            except self._errors() as error:
                if "straddling" not in str(error):
                    yield 0, None, f"it cannot be read past row {at - 1}: {brief(error)}"
                    return
            if nbytes >= _ROW_BYTES:
                said = f"a row has more than {format_bytes(_ROW_BYTES)}, or a quote is not closed"
                yield 0, None, f"it cannot be read past row {at - 1}: {said}"
                return
            nbytes = min(8 * nbytes, _ROW_BYTES)

    @contextlib.contextmanager
    def _opened(
        self, file: SourceFile, nbytes: int, header: list[str] | None, bad: dict[int, str]
    ) -> Iterator[Any]:
        """pyarrow's reader of a file: batches of binary columns. `bad` takes broken rows."""
        csv, binary = self._arrow.csv, self._arrow.binary()
        tabs = file.name.lower().rpartition(".tsv")[1]

        def broken(row: Any) -> str:
            said = f"it has {row.actual_columns} values, the header has {row.expected_columns}"
            bad[row.number] = _CLOSED if row.text == _MARK.decode() else said
            return "skip"

        with (
            decompressed(file, self._position) as stream,
            csv.open_csv(
                stream if header is None else _Marked(stream),
                read_options=csv.ReadOptions(use_threads=False, block_size=nbytes),
                parse_options=csv.ParseOptions(
                    delimiter=self._delimiter or ("\t" if tabs else ","),
                    newlines_in_values=True,
                    invalid_row_handler=broken,
                ),
                convert_options=csv.ConvertOptions(
                    column_types=dict.fromkeys(header or (), binary), strings_can_be_null=False
                ),
            ) as reader,
        ):
            yield reader


def csv_fields(columns: Mapping[str, Sequence[bytes]]) -> dict[str, Field]:
    """Fields of columns of text. The one place where such a schema becomes fields. Pure.

    int64 where all values are whole numbers that are written as Python writes them (007 is text),
    else float64 where it holds all of them, else bool (true, false), else str. Numbers and booleans
    of which some are empty are optional; an empty text is a text.
    """
    return {name: _field(values) for name, values in columns.items()}


def _field(values: Sequence[bytes]) -> Field:
    there = [value for value in values if value]
    made = _told(there) if there else Field("str")
    empty = len(there) < len(values) and made.dtype != "str"
    return replace(made, optional=True) if empty else made


def _told(values: Sequence[bytes]) -> Field:
    if all(_INT.fullmatch(value) for value in values):
        # what no int64 holds stays text, of which nothing is lost
        return Field("int64" if all(-(1 << 63) <= int(v) < 1 << 63 for v in values) else "str")
    if all(_FLOAT.fullmatch(value) for value in values):
        kept = all(is_float(int(value)) for value in values if _INT.fullmatch(value))
        return Field("float64" if kept else "str")
    return Field("bool" if all(value in _BOOLEANS for value in values) else "str")


def csv_value(name: str, value: bytes, made: Field) -> object:
    """A value as the field has it: of an optional one None where it is empty. ConfigError."""
    if not value and made.optional:
        return None
    if made.dtype == "bytes":
        return value
    try:
        if made.dtype == "str":
            return value.decode()
        if made.dtype == "bool":
            return _BOOLEANS[value]
        if made.dtype.startswith(("int", "uint")):
            if _INT.fullmatch(value) is None and value != b"-0":
                raise ValueError
            return int(value)
        if _FLOAT.fullmatch(value) is None:
            raise ValueError
    except UnicodeDecodeError as error:
        raise ConfigError(f"column {name!r} is no UTF-8: {error.reason}") from None
    except (ValueError, KeyError):
        shown = "empty" if not value else repr(value[:40].decode(errors="replace"))
        raise ConfigError(f"column {name!r} is {shown}, the field has {made.dtype}") from None
    try:
        return exact(int(value), made) if _INT.fullmatch(value) else float(value)
    except ConfigError as error:
        raise ConfigError(f"column {name!r} is {error}") from None
