"""Ingest many files by several workers: each writes parts, which are published together.

The list of parts is a function of the arguments, and a part that is stored says of what it is: a
caller that was killed finds what is done when it calls again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

from hpstore.errors import ConfigError, HpstoreError, IngestError
from hpstore.format.checksum import digest128
from hpstore.loaders.dataset.dataset_manifest import check_new_name, part_key
from hpstore.loaders.dataset.fields import Field, check_fields, require_no_text
from hpstore.loaders.dataset.publish_dataset import DatasetInfo, publish_parts
from hpstore.loaders.dataset.record_layout import SHARD_BYTES
from hpstore.loaders.dataset.remove_dataset import delete_if_there
from hpstore.loaders.dataset.stored_manifests import published_manifest, require_pool, written_parts
from hpstore.loaders.ingestion.arrow_source import ArrowTables
from hpstore.loaders.ingestion.ingest_run import fields_by_look
from hpstore.loaders.ingestion.open_source import open_source
from hpstore.loaders.ingestion.part_committer import discard, replaceable
from hpstore.loaders.ingestion.sample_source import FieldsChanged, Source, printable
from hpstore.loaders.ingestion.source_formats import ENDINGS, SourceFormat, format_of
from hpstore.loaders.ingestion.source_paths import is_remote, local_path, source_files
from hpstore.loaders.ingestion.write_order import IngestPosition, records_of
from hpstore.loaders.ingestion.write_part import (
    LINEAGE,
    PartJob,
    PartReport,
    fingerprint_of,
    write_part,
)
from hpstore.pool.pool import Pool
from hpstore.units import bytes_argument, whole_argument

_log = logging.getLogger(__name__)
MOST_PARTS = 256  # by default: each has a few objects of its own
ONE_BY_ONE = (
    SourceFormat.PARQUET,
    SourceFormat.WEBDATASET,
    SourceFormat.JSONL,
    SourceFormat.CSV,
    SourceFormat.TFRECORD,
    SourceFormat.HDF5,
)
"""Formats of which each file of a folder is a source by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartsProgress:
    """How far it is: parts done, of how many in all, and their samples."""

    done: int
    total: int
    rows: int


Outcome = PartReport | HpstoreError | OSError
PartRunner = Callable[[Iterable[PartJob]], Iterator[tuple[PartJob, Outcome]]]
"""Runs jobs in any order and yields the outcome of every job that it has taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartsReport:
    """What ingest_parts published. `resumed`: parts of an earlier call."""

    name: str
    samples: int
    parts: int
    resumed: int
    sources: int
    fingerprint: str
    seconds: float


class PartsHere:
    """Jobs one after another, in this process and thread."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def __call__(self, jobs: Iterable[PartJob]) -> Iterator[tuple[PartJob, Outcome]]:
        for job in jobs:
            try:
                yield job, write_part(self._pool, job)
            except (HpstoreError, OSError) as error:
                yield job, error


def ingest_parts(
    pool: Pool,
    name: str,
    sources: str | Sequence[str | os.PathLike[str]],
    *,
    runner: PartRunner | None = None,
    parts: int | None = None,
    format: str = "auto",  # noqa: A002 (the word that users look for)
    source_options: Mapping[str, object] | None = None,
    fields: Mapping[str, Field] | Sequence[str] | None = None,
    shuffle: bool = False,
    seed: int = 0,
    resume: bool = True,
    overwrite: bool = False,
    layout: str = "auto",
    shard_bytes: int | str = SHARD_BYTES,
    compression: str | None = None,
    metadata: Mapping[str, object] | None = None,
    progress: Callable[[PartsProgress], None] | None = None,
) -> PartsReport:
    """Write files as one dataset, in parts that several workers may do at once.

    In the order of `sources`, or mixed within each part. Visible and durable when all is there.

    Parameters
    ----------
    pool, name, shuffle, seed, overwrite, layout, shard_bytes, compression, metadata
        As of DatasetWriter.
    sources
        Paths or URLs of files that are sources by themselves; or one local folder or pattern.
    runner, progress
        Who does the parts, such as RayParts (default: this process); called as parts are done.
    parts
        Divide the sources into so many. Default: one for each, at most 256.
    format, source_options, fields
        As of ingest(). Default: the fields of the first source, which all must have.
    resume
        Continue a call that was cut short; False: remove its parts first.

    Returns
    -------
    PartsReport

    Raises
    ------
    IngestError
        Parts were not written. The others are kept, the same call continues; nothing is visible.
    ConfigError, VersionConflict, TooFewDevices
        A wrong argument; the name is taken; as of publish_parts().
    """
    began, options = perf_counter(), dict(source_options or {})
    replaceable(require_pool(pool, "ingest_parts"), check_new_name(name), overwrite=overwrite)
    laid = {"layout": layout, "compression": compression, "shuffle": shuffle, "seed": seed}
    laid["shard_bytes"] = bytes_argument("shard_bytes", shard_bytes, least=1)
    paths, table = _paths(sources, format, options)
    jobs = _with_fields(_jobs(name, paths, parts, (format, options), laid), fields, table)
    _begin(pool, name, len(jobs), resume=resume)
    reports = _done(runner or PartsHere(pool), jobs, progress)
    info = _published(pool, jobs, reports, overwrite=overwrite, metadata=metadata)
    return _report(info, jobs, reports, perf_counter() - began)


def _report(
    info: DatasetInfo, jobs: Sequence[PartJob], reports: Sequence[PartReport], seconds: float
) -> PartsReport:
    return PartsReport(
        name=info.name,
        samples=info.rows,
        parts=len(jobs),
        resumed=sum(report.resumed for report in reports),
        sources=sum(len(job.sources) for job in jobs),
        fingerprint=info.fingerprint,
        seconds=seconds,
    )


def _jobs(
    name: str,
    paths: Sequence[str],
    parts: int | None,
    read: tuple[str, Mapping[str, object]],
    laid: Mapping[str, Any],
) -> list[PartJob]:
    """The parts, their fields not known yet. `read`: format and its options."""
    count = (
        min(len(paths), MOST_PARTS) if parts is None else whole_argument("parts", parts, least=1)
    )
    if count > len(paths):
        raise ConfigError(f"parts={count} of {len(paths)} sources: a part has at least one")
    return [
        PartJob(
            name=name,
            part=(at, count),
            sources=tuple(paths[len(paths) * at // count : len(paths) * (at + 1) // count]),
            format=read[0],
            options=read[1],
            fields={},
            typed=False,
            whole=False,
            laid=laid,
        )
        for at in range(count)
    ]


def _with_fields(
    jobs: Sequence[PartJob],
    asked: Mapping[str, Field] | Sequence[str] | None,
    table: ArrowTables | None,
) -> list[PartJob]:
    """Those of the table, else of the first source, where they are not given with their types."""
    require_no_text(asked)
    typed, whole = isinstance(asked, Mapping), asked is None
    if isinstance(asked, Mapping):
        taken = check_fields(asked)
    else:
        first = jobs[0]
        source = table or open_source(
            first.sources[0], format=first.format, source_options=first.options
        )
        taken = _known_fields(source, asked)
    return [replace(job, fields=taken, typed=typed, whole=whole) for job in jobs]


def _paths(
    sources: str | Sequence[str | os.PathLike[str]], kind: str, options: Mapping[str, Any]
) -> tuple[list[str], ArrowTables | None]:
    """URLs, and paths as other processes find them. One text is a folder or pattern of files, and
    may be a table, whose fields are known."""
    if isinstance(sources, str):
        return _files_of(sources, kind, options)
    if not all(isinstance(path, str | os.PathLike) for path in sources):
        raise ConfigError("sources is a list of paths or URLs, or one folder or pattern of files")
    if not sources:
        raise ConfigError("sources is empty: there is nothing to ingest")
    return [_absolute(path) for path in sources], None


def _absolute(path: str | os.PathLike[str]) -> str:
    return os.fspath(path) if is_remote(path) else os.path.abspath(local_path(path))


def _files_of(
    where: str, asked: str, options: Mapping[str, Any]
) -> tuple[list[str], ArrowTables | None]:
    """The files of a folder or pattern, where each is a source by itself."""
    kind = format_of(where, asked)
    if kind not in ONE_BY_ONE:
        raise ConfigError(
            f"{where} is of format {kind}, whose files are no sources by themselves: parts are "
            f"made of {', '.join(ONE_BY_ONE)}. Use ingest(), or give sources=[...]"
        )
    if kind is SourceFormat.PARQUET:
        table = ArrowTables(where, **options)
        return [_absolute(path) for path in table.files], table
    found = source_files(where, ENDINGS[kind], options.get("storage", {}))
    return [_absolute(str(file)) for file in found], None


def _begin(pool: Pool, name: str, count: int, *, resume: bool) -> None:
    """Remove what an earlier call stored, notes first, or see that it fits, else IngestError."""
    published, _ = published_manifest(pool, name)
    gone = published.nonces if published is not None else set()
    found = {}
    for part, note in written_parts(pool, name).items():
        if note.nonces & gone:  # a call that was killed had published it
            delete_if_there(pool, part_key(name, part))
        else:
            found[part] = note
    if not resume:
        for part in found:
            delete_if_there(pool, part_key(name, part))
        discard(pool, name, (nonce for note in found.values() for nonce in note.nonces))
        return
    others = sorted({of for _, of in found} - {count})
    if others:
        raise IngestError(
            f"data set {name!r} has parts of an ingest into {others[0]}, this one makes {count}: "
            f"go on with parts={others[0]} and the same sources, or give resume=False (--restart), "
            "which removes them. Nothing was changed"
        )


def _known_fields(source: Source, asked: Sequence[str] | None) -> dict[str, Field]:
    """Those of a source, all or by name."""
    if asked is not None:
        source.restrict(list(asked), {})
    known = source.fields
    if known is None:
        ahead = records_of(source, None, 0, 1).read_rows(IngestPosition())
        with contextlib.closing(ahead):
            known, _ = fields_by_look(ahead, asked, source.where)
    lacking = [name for name in asked or () if name not in known]
    if lacking:
        raise ConfigError(f"{source.where} has no {lacking[0]!r}")
    return check_fields(known if asked is None else {name: known[name] for name in asked})


def _done(
    runner: PartRunner, jobs: Sequence[PartJob], progress: Callable[[PartsProgress], None] | None
) -> list[PartReport]:
    """Reports of all parts. After a failure no further part is begun."""
    failed = dict[int, HpstoreError | OSError]()
    done = list[PartReport]()

    def wanted() -> Iterator[PartJob]:
        for job in jobs:
            if failed:
                return
            yield job

    for job, outcome in runner(wanted()):
        if not isinstance(outcome, PartReport):
            failed[job.part[0]] = outcome
            continue
        done.append(outcome)
        if progress is not None:
            rows = sum(report.rows for report in done)
            progress(PartsProgress(done=len(done), total=len(jobs), rows=rows))
    if failed:
        number, error = min(failed.items())
        more = "" if isinstance(error, FieldsChanged) else ". The same call writes the rest"
        raise IngestError(
            f"{jobs[0].name!r}: {len(done)} of {len(jobs)} parts are stored and kept, nothing is "
            f"visible; part {number} was not written: {error}{more}"
        ) from error
    return done


def _published(
    pool: Pool,
    jobs: Sequence[PartJob],
    reports: Sequence[PartReport],
    *,
    overwrite: bool,
    metadata: Mapping[str, object] | None,
) -> DatasetInfo:
    """All parts as the dataset, if they are those of this call and of one kind of source."""
    name = jobs[0].name
    notes = written_parts(pool, name)
    made = {report.part: report.fingerprint for report in reports}
    known = dict[str, object]()
    for at, job in enumerate(jobs):
        note = notes.get(job.part)
        if note is None or fingerprint_of(note.metadata) != made.get(job.part):
            raise IngestError(
                f"data set {name!r}: part {at} is gone or another one: another process ingests it. "
                "Nothing is visible"
            )
        facts = {what: value for what, value in note.metadata.items() if what != LINEAGE}
        if at and facts != known:
            odd = sorted(n for n in {*facts, *known} if facts.get(n) != known.get(n))
            raise IngestError(
                f"data set {name!r}: {odd[0]} of {job.sources[0]} differs from that of "
                f"{jobs[0].sources[0]}: the same numbers would stand for others. Nothing is visible"
            )
        known = facts
    prints = [made[job.part] for job in jobs]
    laid = jobs[0].laid
    lineage = {
        "source": printable(jobs[0].sources[0]),
        "sources": sum(len(job.sources) for job in jobs),
        "format": jobs[0].format,
        "fingerprint": digest128(json.dumps(prints).encode()).hex(),
        "order": {"kind": "parts", "seed": laid["seed"]}
        if laid["shuffle"]
        else {"kind": "sequential"},
    }
    together = {**known, **(metadata or {}), LINEAGE: lineage}
    return publish_parts(pool, name, overwrite=overwrite, metadata=together)
