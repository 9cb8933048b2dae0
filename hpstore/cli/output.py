"""Tables for people, JSON for machines, files that appear whole."""

from __future__ import annotations

import json
import logging
import math
import os
import secrets
import shutil
import stat
import sys
import tempfile
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hpstore.errors import ConfigError
from hpstore.maintenance.rebalance import RebalanceReport
from hpstore.maintenance.rebuild import RebuildReport
from hpstore.runtime.rights import keep_rights
from hpstore.units import MIB, format_bytes

UNMENDED_EXIT_CODE = 50
_SPOOL_BYTES = 1 * MIB


def json_text(value: object, *, indent: int | None = None) -> str:
    """One JSON document. JSON has no NaN and no infinity: they become null."""
    return json.dumps(_finite(value), indent=indent, default=str, allow_nan=False)


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(child) for child in value]
    return value


def visible(text: str) -> str:
    """Text that a terminal shows and does not obey: what steers it, such as an escape sequence in
    the name of a tensor, is written as Python writes it. Lines and spaces stay."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c == "\n" or unicodedata.category(c) == "Zs" else _escape(c)
        for c in text
    )


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def plain(value: object, style: str = "") -> Text:
    """A value in a table or a tree; brackets in it are what they are, not rich's markup."""
    return Text(visible(str(value)), style)


def write_out(text: str) -> None:
    """Text for people on standard output."""
    sys.stdout.write(visible(text))


def write_err(text: str) -> None:
    """Text for people on standard error."""
    sys.stderr.write(visible(text))


def write_keys(keys: Sequence[str]) -> None:
    """A line each; for another program as they are."""
    text = "".join(f"{key}\n" for key in keys)
    sys.stdout.write(visible(text) if sys.stdout.isatty() else text)


class VisibleLog(logging.Formatter):
    """Lines of the log for a terminal or a journal."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


def log_with_times() -> None:
    """What a command that runs for months does: with INFO, and when it was."""
    logging.getLogger("hpstore").setLevel(logging.INFO)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(VisibleLog("%(asctime)s %(levelname)s %(message)s"))


def emit_json(value: object) -> None:
    """One JSON document on standard output."""
    sys.stdout.write(json_text(value, indent=1) + "\n")


def say(facts: object, text: str, *, as_json: bool) -> None:
    """What was done: one JSON document for machines, or text for people."""
    if as_json:
        emit_json(facts)
    else:
        write_out(text + "\n")


class StdoutConsole(Console):
    """The console of standard output; main() handles a pipe without a reader."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A table on standard output."""
    made = Table(title=plain(title) if title else None, title_justify="left")
    for column in columns:
        made.add_column(column, overflow="fold")
    for row in rows:
        made.add_row(*map(plain, row))
    StdoutConsole(width=None if sys.stdout.isatty() else 160).print(made)


def require_place(path: Path) -> None:
    """Raises ConfigError where no file can be made: look before work that takes long."""
    try:
        target = path.resolve()
    except RuntimeError as error:  # as pathlib has it
        raise ConfigError(f"{path} cannot be written: it is a loop of symbolic links") from error
    if target.is_dir() or not path.name:
        raise ConfigError(f"{str(path)!r} is a directory; give a file to write")
    if not target.parent.is_dir():
        raise ConfigError(f"{path} cannot be written: {target.parent} is not a directory")


@contextmanager
def output_file(path: Path) -> Iterator[BinaryIO]:
    """Where `get` writes: a regular file appears whole or not at all, with the mode of one that it
    replaces; anything else (a pipe, a device, standard output as "-") is written straight into."""
    if str(path) == "-":
        yield sys.stdout.buffer
        return
    require_place(path)
    if not appears_whole(path):
        with path.open("wb") as out:  # /dev/stdout of a pipe leads to no path
            yield out
        return
    target = path.resolve()
    # a short name: the target's may be the longest; no other process has it, of another host either
    part = target.with_name(f".{secrets.token_hex(8)}.part")
    try:
        with part.open("xb") as out:
            keep_rights(out.fileno(), target)
            yield out
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def appears_whole(path: Path) -> bool:
    """Whether what output_file yields there is nothing until it is whole."""
    return str(path) != "-" and (not path.exists() or path.is_file())


@contextmanager
def standard_input() -> Iterator[BinaryIO]:
    """A regular file with all of standard input, which may be larger than memory: its size and any
    part of it a second time are needed. What it takes lies in the folder for temporary files.

    Raises ConfigError when it is closed."""
    if sys.stdin is None:
        raise ConfigError("standard input is closed: there is nothing to store")
    status = os.fstat(sys.stdin.fileno())
    if stat.S_ISREG(status.st_mode) and status.st_size and not sys.stdin.buffer.tell():
        yield sys.stdin.buffer
        return
    with _spooled(sys.stdin.buffer) as spooled:
        yield spooled


@contextmanager
def input_file(path: Path) -> Iterator[BinaryIO]:
    """A file to be stored, as standard_input() gives it; those of /proc have no size before they
    are read. Raises ConfigError when it is none."""
    if not path.is_file():
        raise ConfigError(f"{path} is not a file")
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size:
            yield file
            return
        with _spooled(file) as spooled:
            yield spooled


@contextmanager
def _spooled(source: BinaryIO) -> Iterator[BinaryIO]:
    with tempfile.TemporaryFile() as spooled:
        shutil.copyfileobj(source, spooled, _SPOOL_BYTES)
        spooled.flush()
        yield spooled


def show_report(what: str, report: RebuildReport) -> None:
    """A scrub's or rebuild's report for people."""
    deletes = f" and {report.deletes} records of deleted ones" if report.deletes else ""
    write_out(
        f"{what}: {report.objects} objects{deletes}, {format_bytes(report.bytes)} looked at in "
        f"{report.seconds:.1f} s: {report.healthy} whole, {report.rebuilt} rebuilt, "
        f"{report.relaid} restriped, {report.waiting} waiting for a missing "
        f"device, {report.stuck} stuck with "
        f"too few devices; {report.damaged_columns} damaged columns found, "
        f"{report.columns_written} written\n"
    )
    if report.set_aside:
        write_out(
            f"SET ASIDE {report.set_aside} files that no writer of this pool made, or tombstones "
            "without their content: they count for nothing, and are in quarantine/ on their "
            "devices. Such a device is damaged, or not trustworthy.\n"
        )
    for key, reason in report.unreadable.items():
        write_out(f"UNREADABLE {key}: {reason}\n")
    for key, reason in report.failed.items():
        write_out(f"NOT HEALED {key}: {reason}\n")
    for why, count in report.put_off.items():
        write_out(f"PUT OFF {count} objects: {why}\n")
    if report.unlisted:
        write_out(
            f"NOT LISTED to the end: {', '.join(report.unlisted)}: what only these devices hold "
            "was not looked at; run it again when they answer\n"
        )
    if report.waiting:
        write_out("evict the missing devices if they are gone for good, then rebuild again\n")


def show_rebalance(report: RebalanceReport) -> None:
    """A rebalance's report for people."""
    write_out(
        f"{report.columns_moved} columns, {format_bytes(report.bytes)}, moved in "
        f"{report.seconds:.1f} s: devices differed by {report.spread_before:.0%} of their size, "
        f"now by {report.spread_after:.0%}\n"
    )
    for key, reason in report.failed.items():
        write_out(f"NOT MOVED {key}: {reason}\n")
