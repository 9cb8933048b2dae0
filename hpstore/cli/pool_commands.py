"""Pool commands: create, look at, put and get, look after."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import typer
from typer.core import TyperGroup

import hpstore
from hpstore.cli import agent_commands, bench_command, durability_command, gpu_command
from hpstore.cli import device_commands as devices
from hpstore.cli.checkpoint_commands import checkpoints
from hpstore.cli.confirm import Yes, agree, first_of, refuse_existing
from hpstore.cli.dataset_commands import datasets
from hpstore.cli.device_commands import AllowRootDisk, note_shared_disks, rate_of, sharing
from hpstore.cli.health_commands import health
from hpstore.cli.output import (
    UNMENDED_EXIT_CODE,
    appears_whole,
    byte_progress,
    emit_json,
    object_progress,
    output_file,
    say,
    show_rebalance,
    show_report,
    show_status,
    standard_input,
    table,
)
from hpstore.errors import (
    ConfigError,
    IntegrityError,
    ObjectNotFound,
    SomeFailed,
    TooManyErasures,
    VersionConflict,
)
from hpstore.maintenance.rebalance import SPREAD
from hpstore.maintenance.rebuild import RebuildReport
from hpstore.objects.object_info import ObjectInfo
from hpstore.pool.pool_names import VARIABLE, table_path
from hpstore.units import MIB, format_bytes, parse_bytes


class _Commands(TyperGroup):
    """All commands. How a broken pipe and an interrupt end is said here: typer has its own way."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]  # click's Context
        try:
            found = super().invoke(ctx)
            sys.stdout.flush()
        except KeyboardInterrupt:
            sys.stderr.write("hpstore: interrupted; what was acknowledged is safe, run it again\n")
            raise typer.Exit(130) from None
        except BrokenPipeError:  # the reader has what it wanted
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the last flush
            raise typer.Exit(0) from None
        return found


app = typer.Typer(cls=_Commands, no_args_is_help=True, pretty_exceptions_enable=False,
                  context_settings={"help_option_names": ["-h", "--help"]},
                  help="Erasure-coded storage for training: data in, checkpoints out.")  # fmt: skip
app.command("agent")(agent_commands.run)
app.command()(devices.add)
app.command()(devices.evict)
app.command()(devices.drain)
app.command()(devices.readmit)
app.command()(devices.replace)
app.command()(devices.release)
app.command("sit-out")(devices.sit_out)
app.command("bench")(bench_command.run)
app.command("durability")(durability_command.run)
app.command("gpu")(gpu_command.run)
app.add_typer(checkpoints, name="checkpoint")
app.add_typer(datasets, name="dataset")
app.add_typer(health, name="health")


@app.callback(invoke_without_command=True)
def about(
    version: Annotated[bool, typer.Option("--version", help="print the version")] = False,
) -> None:
    """Erasure-coded storage for training: data in, checkpoints out."""
    if version:
        sys.stdout.write(f"hpstore {hpstore.__version__}\n")
        raise typer.Exit


PoolName = Annotated[str, typer.Argument(help="pool.toml, or the name of a registered pool")]
Key = Annotated[str, typer.Argument(help="path-like key, such as runs/a")]
Json = Annotated[bool, typer.Option("--json", help="one JSON document on standard output")]
Rate = Annotated[str, typer.Option(help="limit in bytes a second, such as 200MB")]
Version = Annotated[
    str | None, typer.Option("--version", help="this one, of `hpstore versions`; else the newest")
]
_GET_BYTES, _GET_TRIES = 64 * MIB, 4


@app.command()
def create(
    config: Annotated[Path, typer.Argument(help="the pool.toml to write")],
    devices: Annotated[list[str], typer.Argument(help="directories or URLs, one for each device")],
    data: Annotated[int, typer.Option(help="data units a stripe, k")],
    parity: Annotated[int, typer.Option(help="parity units a stripe, m: losses survived")],
    name: Annotated[str | None, typer.Option(help="register for hpstore.open(NAME)")] = None,
    unit: Annotated[str, typer.Option(help="stripe unit")] = "1MiB",
    group: Annotated[str, typer.Option(help="whose members may use the pool, too")] = "",
    mode: Annotated[
        str | None, typer.Option(help="rights on its directories; 0770 with --group, else 0700")
    ] = None,
    domain: Annotated[
        list[str] | None, typer.Option(help="failure domain of each device, in their order")
    ] = None,
    allow_root_disk: AllowRootDisk = False,
    as_json: Json = False,
) -> None:
    """Make a pool.

    hpstore create pool.toml --data 4 --parity 2 /mnt/a /mnt/b /mnt/c /mnt/d /mnt/e /mnt/f
    """
    pool = hpstore.create(
        devices, data=data, parity=parity, config=config, name=name, domains=domain,
        unit_bytes=parse_bytes(unit), settings=sharing(group, mode),
        allow_root_disk=allow_root_disk,
    )  # fmt: skip
    if name is not None and os.environ.get(VARIABLE):
        sys.stderr.write(f"hpstore: note: {name} is in {table_path()}, too, for URLs\n")
    with pool:
        status = pool.status()
    if status.effective_data < data:
        sys.stderr.write(
            f"hpstore: note: {len(devices)} devices are too few for {data}+{parity}: new objects "
            f"are {status.effective_data}+{parity} until devices are added\n"
        )
    note_shared_disks(pool.config.devices)
    if as_json:
        emit_json(status.as_dict())
    else:
        show_status(replace(status, sharing=()))  # that was just said


@app.command()
def status(
    pool: PoolName,
    as_json: Json = False,
    watch: Annotated[
        bool,
        typer.Option("--watch", help="drawn anew every two seconds; plain where no terminal is"),
    ] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="with devices that left a week ago or earlier")
    ] = False,
) -> None:
    """Show devices, objects, what is degraded, space.  hpstore status pool.toml --json"""
    if watch and not as_json:
        from hpstore.cli.status_watch import watch as show

        show(pool)
    with hpstore.open(pool, read_only=True) as opened:
        while True:
            found = opened.status(past=everything)
            if not as_json:
                show_status(found)
                return
            emit_json(found.as_dict())
            if not watch:
                return
            time.sleep(2.0)


@app.command()
def put(
    pool: PoolName,
    key: Key,
    file: Annotated[Path, typer.Argument(help="file to store, - for standard input")],
    if_absent: Annotated[bool, typer.Option("--if-absent", help="fail when it exists")] = False,
    as_json: Json = False,
) -> None:
    """Store a file.  hpstore put pool.toml data/train.bin train.bin"""
    with (
        standard_input() if str(file) == "-" else _opened(file) as source,
        hpstore.open(pool) as opened,
        byte_progress(key, os.fstat(source.fileno()).st_size) as bar,
    ):
        info = opened.put(
            key,
            source,
            if_absent=if_absent,
            progress=lambda count: bar.advance(bar.task_ids[0], count),
        )
    say(info.as_dict(),
        f"{key}: {format_bytes(info.size)} as {info.data}+{info.parity}, "
        f"{info.losses_tolerated} more devices may be lost", as_json=as_json)  # fmt: skip


def _opened(file: Path) -> BinaryIO:
    if not file.is_file():
        raise ConfigError(f"{file} is not a file")
    return file.open("rb")


@app.command()
def get(
    pool: PoolName,
    key: Key,
    file: Annotated[Path, typer.Argument(help="file to write, - for standard output")],
    version: Version = None,
    force: Annotated[bool, typer.Option("--force", help="replace the file that is there")] = False,
    as_json: Json = False,
) -> None:
    """Read an object into a file.  hpstore get pool.toml data/train.bin copy.bin"""
    if as_json and str(file) == "-":
        raise ConfigError("standard output is for the object here: --json needs a file to write")
    refuse_existing(file, force=force)
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
        byte_progress(key, reader.size) as bar,
        output_file(file) as out,
    ):
        size, version = reader.size, reader.version
        buffer = bytearray(min(_GET_BYTES, max(size, 1)))
        for start in range(0, size, len(buffer)):
            count = reader.read_into(buffer, start)
            if reader.version != version:
                raise VersionConflict(
                    f"object {key!r} was replaced while it was read; the {start} bytes that were "
                    "written are of the version before. Get it again.", key=key,
                )  # fmt: skip
            out.write(memoryview(buffer)[:count])
            bar.advance(bar.task_ids[0], count)
    return size


@app.command()
def ls(
    pool: PoolName,
    prefix: Annotated[str, typer.Argument(help="only keys that begin so")] = "",
    long: Annotated[bool, typer.Option("--long", "-l", help="with sizes")] = False,
    as_json: Json = False,
) -> None:
    """List keys.  hpstore ls pool.toml runs/ --long"""
    with hpstore.open(pool, read_only=True) as opened:
        keys = opened.list(prefix)
        if not long:
            if as_json:
                emit_json(keys)
            else:
                sys.stdout.write("".join(f"{key}\n" for key in keys))
            return
        found = [(key, facts) for key in keys if (facts := _stat(opened, key)) is not None]
    unreadable = sum(isinstance(facts, str) for _, facts in found)
    if as_json:
        emit_json([{"key": key, "error": facts} if isinstance(facts, str) else facts.as_dict()
                   for key, facts in found])  # fmt: skip
    else:
        rows = [(key, "?", "?", facts) if isinstance(facts, str) else (
                    key, format_bytes(facts.size), f"{facts.data}+{facts.parity}",
                    facts.losses_tolerated)
                for key, facts in found]  # fmt: skip
        table("", ("key", "size", "layout", "losses tolerated"), rows)
    if unreadable:
        sys.stderr.write(f"hpstore: {unreadable} of {len(found)} objects cannot be read\n")
        raise typer.Exit(UNMENDED_EXIT_CODE)


def _stat(opened: hpstore.Pool, key: str) -> ObjectInfo | str | None:
    """Facts of an object, why there are none, or None when it was deleted meanwhile."""
    try:
        return opened.stat(key)
    except ObjectNotFound:
        return None
    except (TooManyErasures, IntegrityError) as error:
        return str(error)


@app.command()
def stat(pool: PoolName, key: Key, version: Version = None, as_json: Json = False) -> None:
    """Show one object.  hpstore stat pool.toml runs/a"""
    with hpstore.open(pool, read_only=True) as opened:
        info = opened.stat(key, version=version)
    if as_json:
        emit_json(info.as_dict())
    else:
        table("", ("fact", "value"), list(info.as_dict().items()))


@app.command()
def versions(pool: PoolName, key: Key, as_json: Json = False) -> None:
    """List what devices hold of an object, newest first.  hpstore versions pool.toml runs/a

    Usually one. An older one can be read by `hpstore get --version`, while the newest cannot.
    """
    with hpstore.open(pool, read_only=True) as opened:
        found = opened.versions(key)
    if as_json:
        emit_json([version.as_dict() for version in found])
    elif not found:
        sys.stdout.write(f"no version of {key}\n")
    else:
        rows = [(v.version, f"{v.standing}{', current' * v.current}", f"{v.columns} ({v.needed})",
                 time.strftime("%F %T", time.localtime(v.written))) for v in found]  # fmt: skip
        table("", ("version", "standing", "columns (needed)", "written"), rows)


@app.command()
def rm(
    pool: PoolName,
    keys: Annotated[list[str], typer.Argument(help="keys to delete")],
    ignore_missing: Annotated[bool, typer.Option(help="do not fail on absent keys")] = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Delete objects; goes on past absent ones.  hpstore rm pool.toml runs/a runs/b"""
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
            sys.stderr.write(f"hpstore: ObjectNotFound: {failed[key]}\n")
    if as_json:
        deleted = [key for key in dict.fromkeys(keys) if key not in failed]
        failures = {"failed": [str(error) for error in broken]} if broken else {}
        emit_json({"deleted": deleted, "absent": absent, **failures})
    if broken:
        for reason in broken[:-1]:
            sys.stderr.write(f"hpstore: {type(reason).__name__}: {reason}\n")
        raise broken[-1]
    if absent and not ignore_missing:
        raise typer.Exit(ObjectNotFound.exit_code)


@app.command()
def rebuild(
    pool: PoolName,
    rate: Rate = "",
    include_missing: Annotated[
        bool, typer.Option(help="do not wait for missing devices that are still members")
    ] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="put nothing off that retention will soon delete")
    ] = False,
    as_json: Json = False,
) -> None:
    """Make every object whole on the devices there are.  hpstore rebuild pool.toml --rate 500MB"""
    with hpstore.open(pool) as opened, object_progress("rebuild") as progress:
        report = opened.rebuild(
            progress=progress, rate_bytes_per_second=rate_of(rate), include_missing=include_missing,
            everything=everything,
        )  # fmt: skip
    _finish("rebuild", report, as_json)


@app.command()
def scrub(
    pool: PoolName,
    prefix: Annotated[str, typer.Option(help="only keys that begin so")] = "",
    rate: Rate = "",
    restart: Annotated[bool, typer.Option("--restart", help="from the beginning")] = False,
    as_json: Json = False,
) -> None:
    """Verify every block and mend what is damaged.  hpstore scrub pool.toml --rate 200MB"""
    with hpstore.open(pool) as opened, object_progress("scrub") as progress:
        report = opened.scrub(
            prefix=prefix,
            progress=progress,
            rate_bytes_per_second=rate_of(rate),
            resume=not restart,
        )
    _finish("scrub", report, as_json)


@app.command()
def rebalance(
    pool: PoolName,
    rate: Rate = "",
    spread: Annotated[
        float, typer.Option(min=0.001, max=1.0, help="of fullness, above which columns are moved")
    ] = SPREAD,
    as_json: Json = False,
) -> None:
    """Move columns from full devices to empty ones.  hpstore rebalance pool.toml --rate 200MB"""
    with hpstore.open(pool) as opened, object_progress("rebalance") as progress:
        report = opened.admin.rebalance(
            spread=spread, progress=progress, rate_bytes_per_second=rate_of(rate)
        )
    if as_json:
        emit_json(report.as_dict())
    else:
        show_rebalance(report)


def _finish(what: str, report: RebuildReport, as_json: bool) -> None:
    if as_json:
        emit_json(report.as_dict())
    else:
        show_report(what, report)
    if report.unreadable or report.failed or report.stuck:
        raise typer.Exit(UNMENDED_EXIT_CODE)


__all__ = ["app"]
