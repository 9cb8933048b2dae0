"""Drive-stats files: one row a drive and day, as Backblaze publishes them, read as a stream.

Columns: date, serial_number, failure (1 on the last day of a drive that failed), smart_N_raw; model
and smart_N_normalized where present; columns may come and go from file to file. Files are plain,
.xz, .gz or .zip (every .csv in it), or folders of these. Nothing of a file is kept here but the row
in hand, and some names of days and models.
"""

from __future__ import annotations

import csv
import gzip
import io
import lzma
import math
import os
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import date
from typing import IO, BinaryIO, NamedTuple, cast

from hpstore.errors import ForecastError
from hpstore.format.untrusted_bytes import MALFORMED
from hpstore.format.xz_files import open_xz
from hpstore.health.smart.counters import (
    COUNTERS,
    FLAG_COLUMNS,
    INDEX,
    RULE_COUNTERS,
    SPEC_FLAG,
    SUM_COUNTERS,
    UNNAMED_FAMILY,
    decode,
    family_of,
    flagged,
)

REQUIRED_COLUMNS = ("date", "serial_number", "failure")
_MAX_LINE = 1 << 20
_MAX_TEXT = 256  # of a serial number or model
_NAMED_ROWS = 20
_NAMES_KEPT = 4096  # of days and of models: more are read as well, but slower
_MEMBERS_MOST = 10_000  # .csv files in a .zip: a quarter has 92
_PACKED = (".csv", ".csv.xz", ".csv.gz", ".zip")
_PROGRESS_ROWS = 4096
_CUT_SHORT = (
    RuntimeError,
    lzma.LZMAError,
    zlib.error,
    gzip.BadGzipFile,
    zipfile.BadZipFile,
    *MALFORMED,
)

BytesDone = Callable[[int], None]


class Row(NamedTuple):
    """A drive on a day. `values` in the order of COUNTERS; NaN is a counter without a value."""

    serial: str
    family: str
    day: int  # date.toordinal()
    failed: bool
    values: list[float]


@dataclass(slots=True)
class BadRows:
    """What was left out: how many rows, and the first of them by name."""

    count: int = 0
    named: list[str] = field(default_factory=list)

    def add(self, where: str, problem: str) -> None:
        """Count one row, name it when it is among the first."""
        self.count += 1
        if len(self.named) < _NAMED_ROWS:
            self.named.append(f"{where}: {problem}")

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {"count": self.count, "named": list(self.named)}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """Where a file's columns stand."""

    width: int
    date: int
    serial: int
    failure: int
    model: int | None
    counters: tuple[tuple[int, str, int], ...]  # index in COUNTERS, name, column
    flags: tuple[tuple[str, int], ...]  # column name, column


def read_rows(
    path: str | os.PathLike[str],
    *,
    bad: BadRows,
    family: str | None = None,
    progress: BytesDone | None = None,
) -> Iterator[Row]:
    """Rows of one file in its order, bad ones left out and named in `bad`.

    `family` names the model of all drives in it, instead of its model column. `progress` gets bytes
    of the stored file, as differences.

    Raises
    ------
    ForecastError
        The file cannot be opened, lacks columns, or is cut short. Rows that came before are good.
    """
    name = os.fspath(path)
    seen = 0
    try:
        with open(name, "rb") as raw:
            meter = _Meter(raw, progress)
            for part, text in _texts(name, raw):
                for row in _parse(part, text, bad, family):
                    seen += 1
                    if not seen % _PROGRESS_ROWS:
                        meter.tell()
                    yield row
            meter.tell()
    except NotImplementedError as error:  # of zipfile
        raise ForecastError(
            f"{name} is packed in a way that cannot be read here ({error}): nothing was written; "
            "unpack it and give its folder"
        ) from error
    except _CUT_SHORT as error:
        raise ForecastError(
            f"{name} is damaged or cut short after {seen} rows ({error}): nothing was written; "
            "fetch it again or leave it out"
        ) from error
    except OSError as error:
        raise ForecastError(f"cannot read {name}: {error.strerror or error}") from error


def tables_in(paths: Sequence[str | os.PathLike[str]]) -> list[str]:
    """The files among `paths`, and those with drive stats in the folders among them, by name.

    Raises ForecastError where a folder has none, or cannot be listed.
    """
    found: list[str] = []
    for given in paths:
        path = os.fspath(given)
        if not os.path.isdir(path):
            found.append(path)
            continue
        try:
            names = sorted(name for name in os.listdir(path) if name.lower().endswith(_PACKED))
        except OSError as error:
            raise ForecastError(f"cannot list {path}: {error.strerror or error}") from error
        if not names:
            raise ForecastError(f"{path} holds none of {', '.join('*' + kind for kind in _PACKED)}")
        found += [os.path.join(path, name) for name in names]
    return found


class _Meter:
    """Bytes of the stored file that were read since the last look."""

    def __init__(self, raw: BinaryIO, progress: BytesDone | None) -> None:
        self._raw, self._progress, self._told = raw, progress, 0

    def tell(self) -> None:
        if self._progress is not None and not self._raw.closed:
            now = self._raw.tell()
            self._progress(max(0, now - self._told))
            self._told = max(self._told, now)


def _texts(name: str, raw: BinaryIO) -> Iterator[tuple[str, io.TextIOBase]]:
    """Names and texts of the tables in a file."""
    with ExitStack() as stack:
        kind = name.rpartition(".")[2].lower()
        if kind == "zip":
            archive = stack.enter_context(zipfile.ZipFile(raw))
            members = sorted(
                m
                for m in archive.namelist()
                if m.lower().endswith(".csv") and not m.startswith("__MACOSX")
            )
            if not 0 < len(members) <= _MEMBERS_MOST:
                raise ForecastError(
                    f"{name} holds {len(members) or 'no'} .csv files: a quarter of drive stats has "
                    f"one a day, and {_MEMBERS_MOST} are read at most. Nothing was written"
                )
            for member in members:
                with archive.open(member) as inner:
                    yield f"{name}:{member}", _text(inner)
            return
        stream: IO[bytes] = raw
        if kind == "xz":
            stream = cast(IO[bytes], stack.enter_context(open_xz(raw)))
        elif kind == "gz":
            stream = cast(IO[bytes], stack.enter_context(gzip.open(raw)))
        yield name, _text(stream)


def _text(stream: IO[bytes]) -> io.TextIOBase:
    return io.TextIOWrapper(stream, encoding="utf-8", errors="replace", newline="")


def _lines(name: str, text: io.TextIOBase) -> Iterator[str]:
    while line := text.readline(_MAX_LINE):
        if len(line) == _MAX_LINE and not line.endswith("\n"):
            raise ForecastError(f"{name} has a line of more than 1 MiB: no drive-stats file")
        yield line


def _parse(name: str, text: io.TextIOBase, bad: BadRows, family: str | None) -> Iterator[Row]:
    reader = csv.reader(_lines(name, text))
    try:
        layout = _layout(name, next(reader, []))
    except csv.Error as error:
        raise ForecastError(f"{name} is not a table: {error}") from error
    days: dict[str, int] = {}  # both at most _NAMES_KEPT
    families: dict[str, str] = {}
    while True:
        try:
            cells = next(reader, None)
            if cells is None:
                return
            if cells:
                yield _row(cells, layout, family, days, families)
        except (ValueError, csv.Error) as error:
            bad.add(f"{name}:{reader.line_num}", str(error))


def _layout(name: str, header: Sequence[str]) -> _Layout:
    at = {column.strip().lower(): i for i, column in enumerate(header)}
    at[REQUIRED_COLUMNS[0]] = at.get("date", at.get("\ufeffdate", -1))
    missing = [column for column in REQUIRED_COLUMNS if at.get(column, -1) < 0]
    counters = tuple((i, c.name, at[c.column]) for i, c in enumerate(COUNTERS) if c.column in at)
    if not any(COUNTERS[INDEX[name]].column in at for name in RULE_COUNTERS):
        missing.append(" or ".join(COUNTERS[INDEX[c]].column for c in SUM_COUNTERS))
    if missing:
        raise ForecastError(
            f"{name} lacks the columns {', '.join(missing)}: is it a drive-stats file? Its first "
            f"line begins with {','.join(header)[:80]!r}"
        )
    return _Layout(
        width=len(header),
        date=at["date"],
        serial=at["serial_number"],
        failure=at["failure"],
        model=at.get("model"),
        counters=counters,
        flags=tuple((column, at[column]) for column in FLAG_COLUMNS if column in at),
    )


def _row(
    cells: list[str],
    layout: _Layout,
    family: str | None,
    days: dict[str, int],
    families: dict[str, str],
) -> Row:
    """A row. Raises ValueError with what is wrong."""
    if len(cells) != layout.width:
        raise ValueError(f"{len(cells)} fields where the first line has {layout.width}")
    serial = cells[layout.serial].strip()
    if not serial or len(serial) > _MAX_TEXT:
        raise ValueError("no serial number" if not serial else "a serial number of no drive")
    text = cells[layout.date]
    day = days.get(text)
    if day is None:
        if len(days) >= _NAMES_KEPT:
            days.clear()
        try:
            day = days[text] = date.fromisoformat(text.strip()).toordinal()
        except ValueError as error:
            raise ValueError(f"date {text[:40]!r}") from error
    failure = cells[layout.failure].strip()
    if failure not in ("0", "1"):
        raise ValueError(f"failure is {failure[:40]!r}, not 0 or 1")
    if family is None:
        family = _family(cells, layout, families)
    return Row(serial, family, day, failure == "1", _values(cells, layout))


def _family(cells: list[str], layout: _Layout, families: dict[str, str]) -> str:
    if layout.model is None:
        return UNNAMED_FAMILY
    model = cells[layout.model][:_MAX_TEXT]
    found = families.get(model)
    if found is None:
        if len(families) >= _NAMES_KEPT:
            families.clear()
        found = families[model] = family_of(model)
    return found


def _values(cells: list[str], layout: _Layout) -> list[float]:
    values = [math.nan] * len(COUNTERS)
    for index, name, column in layout.counters:
        text = cells[column]
        if text:
            try:
                values[index] = decode(name, float(text))
            except ValueError as error:
                raise ValueError(f"{name} is {text[:40]!r}, no count") from error
    for name, column in layout.flags:
        text = cells[column]
        if text:
            at = INDEX[SPEC_FLAG]
            known = 0.0 if math.isnan(values[at]) else values[at]
            values[at] = max(known, float(flagged(name, float(text))))
    return values
