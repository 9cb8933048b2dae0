"""Dataset commands: ingest, list, show, verify, remove. torch is imported when one runs."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

import hpstore
from hpstore.cli.confirm import agree
from hpstore.cli.options import Json, PoolName, Ray, Yes, size_option
from hpstore.cli.output import UNMENDED_EXIT_CODE, emit_json, say, table, write_out
from hpstore.cli.progress_bar import progress_bar
from hpstore.units import MIB, format_bytes

if TYPE_CHECKING:
    from hpstore.loaders import DatasetInfo, DatasetReport, IngestReport, PartsReport
    from hpstore.loaders.ingestion.ingest_journal import Progressed

datasets = typer.Typer(no_args_is_help=True, help="Ingest, list, show, verify, remove data sets.")

Name = Annotated[str, typer.Argument(help="name of the data set, such as train")]
Version = Annotated[
    str | None, typer.Option("--version", help="name of a version (default: the newest)")
]
Restart = Annotated[
    bool, typer.Option("--restart", help="throw away what an unfinished ingest stored")
]
Append = Annotated[
    bool, typer.Option("--append", help="behind the samples that are there: a new version")
]
NewVersion = Annotated[
    str | None, typer.Option("--version", help="with --append: name of the new version")
]
Kind = Annotated[
    str, typer.Option("--format", help="auto, or one of docs/data.md: images, parquet, jsonl, ...")
]
Fields = Annotated[
    list[str] | None, typer.Option(help="only this field of each sample; repeatable")
]
Options = Annotated[
    list[str] | None, typer.Option(help="NAME=VALUE of the format (docs/data.md); repeatable")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="replace a data set")]
Layout = Annotated[str, typer.Option(help="rows, columns or auto")]
Compression = Annotated[str, typer.Option(help="lz4, zstd or blosc")]
_SHOWN = 20


@datasets.command()
def ingest(
    pool: PoolName,
    name: Name,
    source: Annotated[str, typer.Argument(help="folder, file, pattern or URL to read")],
    kind: Kind = "auto",
    field: Fields = None,
    option: Options = None,
    shuffle: Annotated[bool, typer.Option(help="mix the samples, or keep their order")] = True,
    seed: Annotated[int, typer.Option(min=0, help="of the shuffle; recorded")] = 0,
    on_error: Annotated[str, typer.Option(help="bad records: raise or skip")] = "raise",
    max_skipped: Annotated[int, typer.Option(min=0, help="bad records to skip at most")] = 10_000,
    workers: Annotated[
        int | None, typer.Option(min=1, help="files or records to read at a time")
    ] = None,
    restart: Restart = False,
    overwrite: Overwrite = False,
    append: Append = False,
    version: NewVersion = None,
    layout: Layout = "auto",
    shard: Annotated[int, size_option("size of an object", "256MiB")] = 256 * MIB,
    unit: Annotated[int | None, size_option("page, such as 1MiB (default: by the records)")] = None,
    compression: Compression = "",
    check_images: Annotated[bool, typer.Option(help="find images that are cut short")] = True,
    as_json: Json = False,
) -> None:
    """Write a folder, tars, tables or arrays as a dataset; run it again if it was interrupted.
    Of a folder with train/ and val/ each is a dataset: NAME/train, NAME/val.

    hpstore dataset ingest pool.toml train /data/imagenet/train
    """
    made = _ingested(
        pool,
        name,
        source,
        format=kind,
        source_options=_options(option or []),
        fields=field or None,
        shuffle=shuffle,
        seed=seed,
        on_error=on_error,
        max_skipped=max_skipped,
        workers=workers,
        resume=not restart,
        overwrite=overwrite,
        append=append,
        version=version,
        layout=layout,
        shard_bytes=shard,
        unit_bytes=unit,
        compression=compression or None,
        check_images=check_images,
    )
    _show_made(made, as_json=as_json)


def _ingested(pool: str, name: str, source: str, **options: Any) -> dict[str, IngestReport]:
    """Reports by the name of the split; "" of a source without any."""
    from hpstore.loaders import ingest_splits
    from hpstore.loaders.ingestion import ingest as ingest_one
    from hpstore.loaders.ingestion.source_splits import splits_of

    split = bool(splits_of(source))
    with hpstore.open(pool) as opened, progress_bar("ingest") as bar:
        options["progress"] = bar.samples
        if split:
            return ingest_splits(opened, name, source, **options)
        return {"": ingest_one(opened, name, source, **options)}


def _show_made(made: dict[str, IngestReport], *, as_json: bool) -> None:
    if as_json:
        found = {split: report.as_dict() for split, report in made.items()}
        emit_json(found.get("", found))
        return
    for report in made.values():
        _show_ingest(report)


def _options(given: list[str]) -> dict[str, object]:
    """NAME=VALUE as a dict. Values are texts: a group may be called 0."""
    made: dict[str, object] = {}
    for each in given:
        name, equals, value = each.partition("=")
        if not equals:
            raise typer.BadParameter(f"{each!r} is not NAME=VALUE", param_hint="--option")
        number = name == "record_tokens" and re.fullmatch("0|[1-9][0-9]*", value)
        made[name] = int(value) if number else value
    return made


def _show_ingest(report: IngestReport) -> None:
    order = f"order {report.order['kind']}"
    if "seed" in report.order:
        order += f" with seed {report.order['seed']}"
    went_on = f", {report.resumed_samples} of them before" if report.resumed_samples else ""
    write_out(
        f"{report.name}: {report.samples} samples{went_on}, {format_bytes(report.bytes)} from "
        f"{report.source} ({report.format}) in {report.seconds:.1f} s; fields "
        f"{', '.join(report.fields)}; {order}; {len(report.skipped)} bad records left out, "
        f"{report.ignored} other entries ignored\n"
    )
    for skipped in report.skipped[:_SHOWN]:
        write_out(f"LEFT OUT {skipped.name}: {skipped.problem}\n")
    if len(report.skipped) > _SHOWN:
        write_out(f"and {len(report.skipped) - _SHOWN} more (all of them: --json)\n")


@datasets.command()
def ingest_parts(
    pool: PoolName,
    name: Name,
    source: Annotated[str, typer.Argument(help="folder or pattern of files, each with samples")],
    ray: Ray = None,
    parts: Annotated[
        int | None, typer.Option("--parts", min=1, help="so many (default: one for each file)")
    ] = None,
    kind: Kind = "auto",
    field: Fields = None,
    option: Options = None,
    shuffle: Annotated[bool, typer.Option(help="mix the samples of each part")] = False,
    seed: Annotated[int, typer.Option(min=0, help="of the shuffle; recorded")] = 0,
    restart: Restart = False,
    overwrite: Overwrite = False,
    layout: Layout = "auto",
    shard: Annotated[int, size_option("size of an object", "256MiB")] = 256 * MIB,
    compression: Compression = "",
    as_json: Json = False,
) -> None:
    """Write files as one dataset in parts, by a Ray cluster; run it again if it was interrupted.

    hpstore dataset ingest-parts pool.toml train '/data/shards/*.parquet' --ray auto
    """
    report = _ingested_by_parts(
        pool,
        name,
        source,
        ray,
        parts=parts,
        format=kind,
        source_options=_options(option or []),
        fields=field or None,
        shuffle=shuffle,
        seed=seed,
        resume=not restart,
        overwrite=overwrite,
        layout=layout,
        shard_bytes=shard,
        compression=compression or None,
    )
    say(
        asdict(report),
        f"{report.name}: {report.samples} samples of {report.sources} files in {report.parts} "
        f"parts, {report.resumed} of them before; {report.seconds:.1f} s",
        as_json=as_json,
    )


def _ingested_by_parts(
    pool: str, name: str, source: str, ray: str | None, **options: Any
) -> PartsReport:
    from hpstore.loaders import ingest_parts as ingest_files

    with hpstore.open(pool) as opened, progress_bar("ingest") as bar:
        if ray is not None:
            from hpstore.loaders.ingestion.ray_parts import RayParts  # takes seconds to import

            options["runner"] = RayParts(opened, address=ray)
        options["progress"] = lambda step: bar.steps(step.done, step.total)
        return ingest_files(opened, name, source, **options)


@datasets.command()
def ls(pool: PoolName, as_json: Json = False) -> None:
    """List datasets, and ingests that were cut short.

    hpstore dataset ls pool.toml
    """
    from hpstore.loaders import list_datasets, unfinished_ingests
    from hpstore.loaders.dataset.stored_manifests import waiting_parts

    with hpstore.open(pool, read_only=True) as opened:
        found, unfinished = list_datasets(opened), unfinished_ingests(opened)
        waiting = waiting_parts(opened)
    if as_json:
        emit_json(_listed(found, unfinished, waiting))
        return
    published = [
        (
            d.name,
            f"damaged: {d.problem}" if d.problem else "published",
            d.rows,
            format_bytes(d.record_bytes),
            ", ".join(d.fields or ()),
        )
        for d in found
    ]
    cut_short = [
        (name, "unfinished ingest", p.rows, format_bytes(p.nbytes), "")
        for name, p in unfinished.items()
    ]
    written = [
        (name, f"{done} of {count} parts written", "", "", "")
        for name, (done, count) in waiting.items()
    ]
    table(
        "",
        ("data set", "state", "samples", "size", "fields"),
        [*published, *cut_short, *written],
    )


def _listed(
    found: list[DatasetInfo],
    unfinished: dict[str, Progressed],
    waiting: dict[str, tuple[int, int]],
) -> list[dict[str, object]]:
    """What `ls` gives as JSON."""
    rows: list[dict[str, object]] = [
        {
            "name": d.name,
            "state": "damaged" if d.problem else "published",
            "samples": d.rows,
            "bytes": d.record_bytes,
            "fields": list(d.fields or ()),
            "layout": d.layout,
            "compression": d.compression,
            "fingerprint": d.fingerprint,
            "version": d.version,
            "problem": d.problem,
        }
        for d in found
    ]
    rows += [
        {
            "name": name,
            "state": "unfinished",
            "samples": p.rows,
            "bytes": p.nbytes,
            "skipped": len(p.skipped),
        }
        for name, p in unfinished.items()
    ]
    rows += [
        {"name": name, "state": "unfinished", "parts": done, "parts_in_all": count}
        for name, (done, count) in waiting.items()
    ]
    return rows


@datasets.command()
def info(pool: PoolName, name: Name, version: Version = None, as_json: Json = False) -> None:
    """Show what a dataset holds and where it came from.

    hpstore dataset info pool.toml train
    """
    from hpstore.loaders import Dataset

    with (
        hpstore.open(pool, read_only=True) as opened,
        Dataset(opened, name, version=version) as found,
    ):
        keys = [
            found.shard_key(stream, shard)
            for stream in found.streams
            for shard in range(stream.shard_count)
        ]
        tolerated = min((opened.stat(key).losses_tolerated for key in keys), default=None)
        manifest, streams, classes = found.manifest, found.streams, found.classes
    facts = {
        "name": name,
        "samples": manifest.rows,
        "layout": manifest.layout,
        "compression": manifest.compression,
        "shards": len(keys),
        "parts": len(manifest.parts),
        "unit_bytes": {s.name: s.unit_bytes for s in streams},
        "bytes": sum(int(s.payload_bytes.sum()) for s in streams),
        "losses_tolerated": tolerated,
        "shuffle_seed": manifest.shuffle_seed,
        "fingerprint": manifest.fingerprint,
        "version": manifest.version_name,
    }
    fields = {
        n: {"dtype": f.dtype, "shape": list(f.shape), "kind": str(f.kind)}
        | ({"optional": True} if f.optional else {})
        | ({"media_type": f.media_type} if f.media_type else {})
        for n, f in manifest.fields.items()
    }
    if as_json:
        metadata = manifest.metadata
        emit_json({**facts, "fields": fields, "classes": classes, "metadata": metadata})
        return
    table("", ("fact", "value"), list(facts.items()))
    rows = [
        (n, f.dtype, list(f.shape), str(f.kind), "yes" if f.optional else "", f.media_type)
        for n, f in manifest.fields.items()
    ]
    table("", ("field", "dtype", "shape", "kind", "optional", "media type"), rows)
    if classes:
        table("", ("field", "classes", "names"), [_named(n, c) for n, c in classes.items()])
    for key, value in manifest.metadata.items():
        if key != "classes" or not classes:
            write_out(f"{key}: {value}\n")


def _named(field: str, names: Sequence[str]) -> tuple[str, int, str]:
    """A row for the classes of a field: how many, and the first ones."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return field, len(names), ", ".join(names[:_SHOWN]) + more


datasets.command("inspect")(info)


@datasets.command()
def verify(pool: PoolName, name: Name, version: Version = None, as_json: Json = False) -> None:
    """Read every byte and compare every checksum.

    hpstore dataset verify pool.toml train
    """
    from hpstore.loaders import verify_dataset

    with hpstore.open(pool, read_only=True) as opened, progress_bar("verify") as bar:
        report = verify_dataset(opened, name, version=version, progress=bar.objects)
    if as_json:
        emit_json(report.as_dict())
    else:
        _show_verified(report)
    if not report.clean:
        raise typer.Exit(UNMENDED_EXIT_CODE)


def _show_verified(report: DatasetReport) -> None:
    write_out(
        f"{report.name}: {report.samples} samples, {format_bytes(report.bytes)} read: "
        + (
            "clean\n"
            if report.clean
            else f"{report.bad_count} bad samples, {report.problem_count} other problems\n"
        )
    )
    for sample in report.bad_samples[:_SHOWN]:
        write_out(f"BAD sample {sample}\n")
    for problem in report.problems[:_SHOWN]:
        write_out(f"PROBLEM {problem}\n")


@datasets.command()
def versions(pool: PoolName, name: Name, as_json: Json = False) -> None:
    """List the versions of a dataset, the oldest first.

    hpstore dataset versions pool.toml train
    """
    from hpstore.loaders import list_versions

    with hpstore.open(pool, read_only=True) as opened:
        found = list_versions(opened, name)
    if as_json:
        emit_json([asdict(one) for one in found])
        return
    rows = [
        (
            one.name,
            f"damaged: {one.problem}" if one.problem else "newest" if one.current else "kept",
            one.rows,
            time.strftime("%F %T", time.localtime(one.created)) if one.created else "",
            ", ".join(one.fields),
        )
        for one in found
    ]
    table("", ("version", "state", "samples", "made", "fields"), rows)


@datasets.command()
def rm(
    pool: PoolName,
    name: Name,
    version: Annotated[
        str | None, typer.Option("--version", help="only this version, which is not the newest")
    ] = None,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Delete a dataset with its versions, one version, or an unfinished ingest.

    hpstore dataset rm pool.toml train --version v1 --yes
    """
    from hpstore.loaders import delete_dataset, delete_version

    if version is not None:
        agree(f"delete version {version} of data set {name} of {pool}", yes=yes)
        with hpstore.open(pool) as opened:
            removed = delete_version(opened, name, version)
        gone = {"deleted": name, "version": version, "objects": removed}
        told = f"version {version} of data set {name} is deleted, {removed} objects with it"
        say(gone, told, as_json=as_json)
        return
    agree(f"delete data set {name} of {pool}", yes=yes)
    with hpstore.open(pool) as opened:
        delete_dataset(opened, name)
    say({"deleted": name}, f"data set {name} is deleted", as_json=as_json)
