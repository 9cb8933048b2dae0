"""Object commands: put, get, list, show, delete."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

import hpstore
from hpstore.cli.confirm import agree, agree_to_replace, first_of, on_terminal
from hpstore.cli.options import Json, PoolName, Yes
from hpstore.cli.output import (
    UNMENDED_EXIT_CODE,
    appears_whole,
    emit_json,
    input_file,
    output_file,
    require_place,
    say,
    standard_input,
    table,
    write_err,
    write_keys,
    write_out,
)
from hpstore.cli.progress_bar import progress_bar
from hpstore.errors import (
    ConfigError,
    IntegrityError,
    ObjectNotFound,
    SomeFailed,
    TooManyErasures,
    VersionConflict,
)
from hpstore.objects.object_info import ObjectInfo
from hpstore.units import MIB, format_bytes

Key = Annotated[str, typer.Argument(help="path-like key, such as runs/a")]
Version = Annotated[
    str | None, typer.Option("--version", help="this one, of `hpstore versions`; else the newest")
]
_GET_BYTES, _GET_TRIES = 64 * MIB, 4


def put(
    pool: PoolName,
    key: Key,
    file: Annotated[Path, typer.Argument(help="file to store, - for standard input")],
    if_absent: Annotated[bool, typer.Option("--if-absent", help="fail when it exists")] = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Store a file.

    hpstore put pool.toml data/train.bin train.bin

    Without a terminal to ask, an object of that key is replaced; --if-absent fails instead.
    """
    if not (yes or if_absent) and on_terminal():
        _agree_to_replace(pool, key)
    with (
        standard_input() if str(file) == "-" else input_file(file) as source,
        hpstore.open(pool) as opened,
        progress_bar(key) as bar,
    ):
        total = os.fstat(source.fileno()).st_size
        info = opened.put(
            key,
            source,
            if_absent=if_absent,
            progress=lambda count: bar.advance(count, total),
        )
    say(
        info.as_dict(),
        f"{key}: {format_bytes(info.size)} as {info.data}+{info.parity}, "
        f"{info.losses_tolerated} more devices may be lost",
        as_json=as_json,
    )


def _agree_to_replace(pool: str, key: str) -> None:
    """Ask before an object is replaced, before a file for it is read."""
    with hpstore.open(pool, read_only=True) as opened:
        try:
            found = format_bytes(opened.stat(key).size)
        except ObjectNotFound:
            return
        except (TooManyErasures, IntegrityError):
            found = "which cannot be read now"
    agree(f"replace object {key} of {pool}, {found}", yes=False)


def get(
    pool: PoolName,
    key: Key,
    file: Annotated[Path, typer.Argument(help="file to write, - for standard output")],
    version: Version = None,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Read an object into a file.

    hpstore get pool.toml data/train.bin copy.bin
    """
    if as_json and str(file) == "-":
        raise ConfigError("standard output is for the object here: --json needs a file to write")
    if str(file) != "-":
        require_place(file)
        agree_to_replace(file, yes=yes)
    with hpstore.open(pool, read_only=True) as opened:
        for left in reversed(range(_GET_TRIES)):
            try:
                size = _get(opened, key, file, version)
                break
            except VersionConflict:
                if not left or not appears_whole(file):  # a pipe has got some of it
                    raise
    if as_json:
        emit_json({"key": key, "size": size, "file": str(file)})


def _get(opened: hpstore.Pool, key: str, file: Path, wanted: str | None) -> int:
    """Write one version of an object; returns its size. Raises VersionConflict when it is replaced
    meanwhile and the old one gone: two are never mixed."""
    with (
        opened.open(key, version=wanted) as reader,
        progress_bar(key) as bar,
        output_file(file) as out,
    ):
        size, version = reader.size, reader.version
        buffer = bytearray(min(_GET_BYTES, max(size, 1)))
        for start in range(0, size, len(buffer)):
            count = reader.read_into(buffer, start)
            if reader.version != version:
                raise VersionConflict(
                    f"object {key!r} was replaced while it was read; the {start} bytes that were "
                    "written are of the version before. Get it again.",
                    key=key,
                )
            out.write(memoryview(buffer)[:count])
            bar.advance(count, size)
    return size


def ls(
    pool: PoolName,
    prefix: Annotated[str, typer.Argument(help="only keys that begin so")] = "",
    long: Annotated[bool, typer.Option("--long", "-l", help="with sizes")] = False,
    as_json: Json = False,
) -> None:
    """List keys.

    hpstore ls pool.toml runs/ --long
    """
    with hpstore.open(pool, read_only=True) as opened:
        keys = opened.list(prefix)
        if not long:
            if as_json:
                emit_json(keys)
            else:
                write_keys(keys)
            return
        found = [(key, facts) for key in keys if (facts := _stat(opened, key)) is not None]
    unreadable = sum(isinstance(facts, str) for _, facts in found)
    if as_json:
        emit_json(
            [
                {"key": key, "error": facts} if isinstance(facts, str) else facts.as_dict()
                for key, facts in found
            ]
        )
    else:
        rows = [
            (key, "?", "?", facts)
            if isinstance(facts, str)
            else (
                key,
                format_bytes(facts.size),
                f"{facts.data}+{facts.parity}",
                facts.losses_tolerated,
            )
            for key, facts in found
        ]
        table("", ("key", "size", "layout", "losses tolerated"), rows)
    if unreadable:
        write_err(f"hpstore: {unreadable} of {len(found)} objects cannot be read\n")
        raise typer.Exit(UNMENDED_EXIT_CODE)


def _stat(opened: hpstore.Pool, key: str) -> ObjectInfo | str | None:
    """Facts of an object, why there are none, or None when it was deleted meanwhile."""
    try:
        return opened.stat(key)
    except ObjectNotFound:
        return None
    except (TooManyErasures, IntegrityError) as error:
        return str(error)


def stat(pool: PoolName, key: Key, version: Version = None, as_json: Json = False) -> None:
    """Show one object.

    hpstore stat pool.toml runs/a
    """
    with hpstore.open(pool, read_only=True) as opened:
        info = opened.stat(key, version=version)
    if as_json:
        emit_json(info.as_dict())
    else:
        table("", ("fact", "value"), list(info.as_dict().items()))


def versions(pool: PoolName, key: Key, as_json: Json = False) -> None:
    """List the versions of an object that devices hold, newest first.

    hpstore versions pool.toml runs/a

    Usually one. An older one can be read by `hpstore get --version`, while the newest cannot.
    """
    with hpstore.open(pool, read_only=True) as opened:
        found = opened.versions(key)
    if as_json:
        emit_json([version.as_dict() for version in found])
    elif not found:
        write_out(f"no version of {key}\n")
    else:
        rows = [
            (
                v.version,
                f"{v.standing}{', current' * v.current}",
                f"{v.columns} ({v.needed})",
                time.strftime("%F %T", time.localtime(v.written)),
            )
            for v in found
        ]
        table("", ("version", "standing", "columns (needed)", "written"), rows)


def rm(
    pool: PoolName,
    keys: Annotated[list[str], typer.Argument(help="keys to delete")],
    ignore_missing: Annotated[bool, typer.Option(help="do not fail on absent keys")] = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Delete objects; an absent one does not stop it.

    hpstore rm pool.toml runs/a runs/b
    """
    agree(f"delete {len(keys)} objects of {pool}: {first_of(keys)}", yes=yes, named=True)
    failed: Mapping[str, Exception] = {}
    with hpstore.open(pool) as opened:
        try:
            opened.delete_many(keys)
        except SomeFailed as error:
            failed = error.failed
    absent = [key for key, error in failed.items() if isinstance(error, ObjectNotFound)]
    broken = [error for error in failed.values() if not isinstance(error, ObjectNotFound)]
    if not ignore_missing:
        for key in absent:
            write_err(f"hpstore: ObjectNotFound: {failed[key]}\n")
    if as_json:
        deleted = [key for key in dict.fromkeys(keys) if key not in failed]
        failures = {"failed": [str(error) for error in broken]} if broken else {}
        emit_json({"deleted": deleted, "absent": absent, **failures})
    if broken:
        for reason in broken[:-1]:
            write_err(f"hpstore: {type(reason).__name__}: {reason}\n")
        raise broken[-1]
    if absent and not ignore_missing:
        raise typer.Exit(ObjectNotFound.exit_code)
