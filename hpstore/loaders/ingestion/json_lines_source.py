"""JSON Lines: an object a line, in .jsonl or .ndjson files, plain or compressed.

Read by Python's json: pyarrow's reader makes times of some texts and floats of large ints.
Plain files are read in blocks of 4 MiB, so that they can be mixed; a compressed one is a block.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import IO, Any

from hpstore.errors import ConfigError, IngestError
from hpstore.format.untrusted_bytes import brief, most_inflated
from hpstore.loaders.dataset.fields import Field
from hpstore.loaders.dataset.json_values import unique_keys
from hpstore.loaders.ingestion.compressed_files import (
    COMPRESSIONS,
    STREAM_ERRORS,
    FilePosition,
    decompressed,
)
from hpstore.loaders.ingestion.json_schema import json_fields, json_value
from hpstore.loaders.ingestion.sample_source import (
    BLOCK_SHIFT,
    InferredFields,
    digest_of,
    printable,
)
from hpstore.loaders.ingestion.source_paths import SourceFile, file_facts, source_files
from hpstore.loaders.ingestion.source_rows import SourceItem
from hpstore.units import GIB, MIB, div_ceil, format_bytes

JSON_LINES = tuple(name + end for name in (".jsonl", ".ndjson") for end in ("", *COMPRESSIONS))
BLOCK_BYTES = 4 * MIB
LINE_BYTES = GIB
LOOKED_AT = 1000
_BOM = b"\xef\xbb\xbf"
_PIECE_BYTES = MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Lines of a file that begin from `first` to before `stop`; of all the file without a stop."""

    file: SourceFile
    first: int = 0
    stop: int | None = None


class JsonLines(InferredFields):
    """Objects of JSON Lines. A line that is no object, or lacks a field, is a bad record.

    Fields are those of the first 1000 objects (json_fields), or what the user says that they are.
    """

    kind = "jsonl"
    by_files = True

    def __init__(
        self, where: str | os.PathLike[str], *, storage: Mapping[str, object] | None = None
    ) -> None:
        super().__init__()
        self.where = printable(str(where))
        self._files = source_files(where, JSON_LINES, storage or {})
        self._parts: list[_Part] = []
        for file in self._files:
            if file.name.lower().endswith(COMPRESSIONS):
                self._parts.append(_Part(file=file))
                continue
            for block in range(div_ceil(file.stat().st_size, BLOCK_BYTES)):
                first = block * BLOCK_BYTES
                self._parts.append(_Part(file=file, first=first, stop=first + BLOCK_BYTES))
        self.blocks = len(self._parts)
        self._position = FilePosition()

    def block_bytes(self, block: int) -> int:
        part = self._parts[block]
        size = part.file.stat().st_size
        return size if part.stop is None else min(part.stop, size) - part.first

    def bytes_read(self) -> int:
        return self._position.reached()

    def _found(self) -> dict[str, Field]:
        """By the user, else by the first objects. Raises ConfigError, IngestError."""
        unsaid = [name for name in self._names or () if name not in self._types]
        if self._names is not None and not unsaid:
            return {name: self._types[name] for name in self._names}
        records, problem = self._first_records()
        if not records:
            raise IngestError(
                f"{self.where}: no object to infer the fields from ({problem or 'it is empty'}); "
                "nothing was written. Give fields={...}"
            )
        if self._names is not None:
            records = [{n: r[n] for n in unsaid if n in r} for r in records]
        try:
            return {**self._types, **json_fields(records)}
        except ConfigError as error:
            raise ConfigError(f"{self.where}: {error}") from None

    def _first_records(self) -> tuple[list[dict[str, Any]], str]:
        """The first objects, and what is wrong with the first line that is none."""
        records, problem = [], ""
        lines = (line for part in self._parts for line in _lines(part))
        for line in islice(lines, LOOKED_AT):
            found = _object(line.data) if not line.problem else line.problem
            if isinstance(found, str):
                problem = problem or f"{line.name}: {found}"
            else:
                records.append(found)
        return records, problem

    def fingerprint(self) -> str:
        """Over the path, size and time of change of every file."""
        return digest_of([self.kind, *file_facts(self._files)])

    def read_block(self, block: int, start: int) -> Iterator[SourceItem]:
        fields, whole = self.fields, self._names is None
        for number, line in islice(
            enumerate(_lines(self._parts[block], self._position)), start, None
        ):
            sample, problem = None, line.problem
            if not problem:
                found = _object(line.data)
                sample, problem = (
                    (None, found) if isinstance(found, str) else _sample(found, fields, whole)
                )
            yield SourceItem(
                name=line.name, origin=block << BLOCK_SHIFT | number, sample=sample, problem=problem
            )


@dataclass(frozen=True, slots=True)
class _Line:
    name: str
    data: bytes
    problem: str = ""


def _lines(part: _Part, position: FilePosition | None = None) -> Iterator[_Line]:
    """Lines that are not blank; last, a broken one where the file cannot be read on."""
    name = printable(part.file.name)
    count = 0
    try:
        if part.stop is not None:
            with part.file.open("rb") as file:
                for at, data in _raw_lines(file, part.first, part.stop, LINE_BYTES):
                    yield _line(f"{name}: byte {at}", data, LINE_BYTES)
            return
        most = min(LINE_BYTES, most_inflated(part.file.stat().st_size))
        with decompressed(part.file, position) as file:
            for count, (_, data) in enumerate(_raw_lines(file, 0, None, most), 1):
                yield _line(f"{name}: line {count}", data, most)
    except STREAM_ERRORS as error:
        said = f"it cannot be read past line {count}" if part.stop is None else "it cannot be read"
        yield _Line(name, b"", f"{said}: {brief(error)}")


def _line(name: str, data: bytes | None, most: int) -> _Line:
    if data is None:
        return _Line(name, b"", f"it has more than {format_bytes(most)}, the most of a line")
    return _Line(name, data)


def _raw_lines(
    file: IO[bytes], first: int, stop: int | None, most: int
) -> Iterator[tuple[int, bytes | None]]:
    """Offset and bytes of lines that are not blank; None for the bytes of one above `most`."""
    at = first
    if first:  # the line that leads into this part is the one before's, but where it ends there
        file.seek(first - 1)
        at = first - 1 + _skipped(file)
    while stop is None or at < stop:
        data = file.readline(most + 1)
        if not data:
            return
        begin, at = at, at + len(data)
        if len(data) > most and not data.endswith(b"\n"):
            at += _skipped(file)
            yield begin, None
            continue
        data = data.removeprefix(_BOM) if begin == 0 else data
        if data.strip():
            yield begin, data


def _skipped(file: IO[bytes]) -> int:
    """Pass the rest of a line; its bytes."""
    skipped = 0
    while data := file.readline(_PIECE_BYTES):
        skipped += len(data)
        if data.endswith(b"\n"):
            break
    return skipped


def _object(data: bytes) -> dict[str, Any] | str:
    """The object of a line, or what is wrong with it."""
    try:
        found = json.loads(data.decode(), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        return f"it is no JSON: {brief(error)}"
    return found if isinstance(found, dict) else "it is no JSON object"


def _sample(
    found: Mapping[str, Any], fields: Mapping[str, Field], whole: bool
) -> tuple[dict[str, object] | None, str]:
    """The sample of an object, or what is wrong with it."""
    try:
        sample = {name: json_value(name, found[name], made) for name, made in fields.items()}
    except KeyError as error:
        return None, f"it lacks {error}; it has {sorted(found)[:20]}"
    except ConfigError as error:
        return None, str(error)
    if whole and len(found) > len(sample):
        odd = sorted(found.keys() - sample.keys())[0]
        return None, (
            f"it has {odd!r}, which the first {LOOKED_AT} lines have not, and which would be left "
            "out; list the fields to take with fields=[...]"
        )
    return sample, ""
