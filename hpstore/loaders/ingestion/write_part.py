"""One part of a dataset from its files.

A part is what one DatasetWriter puts: it is there whole or not at all, and its note says of which
files it is. So a worker may die, or do its part twice.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hpstore.errors import ConfigError, IngestError, VersionConflict
from hpstore.format.checksum import digest128
from hpstore.loaders.dataset.dataset_manifest import DatasetManifest, part_key
from hpstore.loaders.dataset.fields import Field
from hpstore.loaders.dataset.stored_manifests import published_manifest
from hpstore.loaders.ingestion.infer_fields import fitted, fitted_columns
from hpstore.loaders.ingestion.open_source import open_source
from hpstore.loaders.ingestion.sample_source import (
    FieldsChanged,
    Source,
    printable,
    require_unchanged,
)
from hpstore.loaders.ingestion.write_order import IngestPosition, PlacedRows, records_of
from hpstore.loaders.writer.dataset_writer import DatasetWriter
from hpstore.pool.pool import Pool

LINEAGE = "ingest"  # what the metadata of a dataset call where it came from


@dataclass(frozen=True, slots=True, kw_only=True)
class PartJob:
    """One part: these sources one after another.

    `typed`: the caller said what the fields are; else they are those of the first source.
    `whole`: all of a sample is taken, and one with more fields is bad.
    """

    name: str
    part: tuple[int, int]
    sources: tuple[str, ...]
    format: str
    options: Mapping[str, object]  # of the format
    fields: Mapping[str, Field]
    typed: bool
    whole: bool
    laid: Mapping[str, Any]  # Any: options of DatasetWriter by name


@dataclass(frozen=True, slots=True, kw_only=True)
class PartReport:
    """A part that is stored. `fingerprint`: of what; `resumed`: it was there before."""

    part: tuple[int, int]
    rows: int
    fingerprint: str
    resumed: bool = False


def write_part(pool: Pool, job: PartJob) -> PartReport:
    """Write one part, unless it is there of these very sources. Durable on return.

    Raises IngestError for a bad record, and where a part of other sources or options is in its
    place; what the sources and the writer raise. Then nothing is changed.
    """
    opened = [_opened(path, job) for path in job.sources]
    prints = [source.fingerprint() for source in opened]
    facts = _facts(job, opened, prints)
    there = _part_there(pool, job, facts)
    if there is not None:
        return there
    try:
        with DatasetWriter(
            pool, job.name, job.fields, part=job.part, overwrite=True, metadata=facts, **job.laid
        ) as writer:
            for source, before in zip(opened, prints, strict=True):
                _copy(source, job, writer)
                require_unchanged(source, before)
    except FieldsChanged as error:  # ingest() begins again; parts have the fields of all others
        raise FieldsChanged(
            f"{error}, and all parts have the fields that the first rows show. Give fields={{...}} "
            "with Field(..., optional=True) for it, and resume=False: parts that are stored have "
            "other fields"
        ) from error
    except VersionConflict:  # another worker was given the same part, and was faster
        there = _part_there(pool, job, facts)
        if there is None:
            raise
        return there
    return PartReport(part=job.part, rows=len(writer), fingerprint=fingerprint_of(facts))


def fingerprint_of(metadata: Mapping[str, Any]) -> str:
    """Of what a part holds, by its metadata; "" where they do not say."""
    lineage = metadata.get(LINEAGE)
    return str(lineage.get("fingerprint", "")) if isinstance(lineage, dict) else ""


def _opened(path: str, job: PartJob) -> Source:
    """A source, read as the fields of the part."""
    source = open_source(path, format=job.format, source_options=job.options)
    if job.typed:
        source.restrict(list(job.fields), job.fields)
        return source
    known = source.fields
    if known is not None:
        _require_alike(source, known, job)
    source.recall(job.fields)
    if job.whole:
        source.keep_whole()
    return source


def _require_alike(source: Source, known: Mapping[str, Field], job: PartJob) -> None:
    """Raise IngestError where a source has other fields than the first one."""
    for name in known if job.whole else job.fields:
        ours, theirs = job.fields.get(name), known.get(name)
        if ours is not None and theirs in (ours, replace(ours, optional=False)):
            continue
        raise IngestError(
            f"{source.where}: its {name!r} is {_shown(theirs)}, that of the first source "
            f"{_shown(ours)}: give fields={{...}} with what all of them hold"
        )
    lacking = [name for name in job.fields if name not in known]
    if lacking:
        raise IngestError(f"{source.where} has no {lacking[0]!r}, which the first source has")


def _shown(field: Field | None) -> str:
    return "not there" if field is None else str(field.to_json())


def _facts(job: PartJob, opened: Sequence[Source], prints: list[str]) -> dict[str, object]:
    """Metadata of the part: what its sources have in common, and which they are."""
    common = dict(opened[0].metadata)
    for source in opened[1:]:
        if source.metadata != common:
            raise IngestError(
                f"{source.where}: its metadata, such as names of classes, differ from those of "
                f"{opened[0].where}. Nothing of this part is visible"
            )
    facts = {
        "sources": prints,
        "fields": [[name, *made.to_json()] for name, made in job.fields.items()],
        "laid": dict(job.laid),
    }
    digest = digest128(json.dumps(facts, sort_keys=True).encode()).hex()
    return {**common, LINEAGE: {"source": printable(job.sources[0]), "fingerprint": digest}}


def _part_there(pool: Pool, job: PartJob, facts: Mapping[str, object]) -> PartReport | None:
    """This very part if it is stored and waits to be published."""
    key = part_key(job.name, job.part)
    if not pool.exists(key):
        return None
    note = DatasetManifest.decode(pool.get(key), where=f"object {key!r}")
    published, _ = published_manifest(pool, job.name)
    if published is not None and note.nonces & published.nonces:
        return None  # a call that was killed had published it
    if note.metadata != json.loads(json.dumps(facts)):
        raise IngestError(
            f"part {job.part[0]} of {job.part[1]} of data set {job.name!r} is stored of other "
            "files or with other options, or a file has changed since. It is kept; resume=False "
            "(--restart) removes all parts and begins again"
        )
    fingerprint = fingerprint_of(facts)
    return PartReport(part=job.part, rows=note.rows, fingerprint=fingerprint, resumed=True)


def _copy(source: Source, job: PartJob, writer: DatasetWriter) -> None:
    """Every record of a source."""
    records = records_of(source, None, 0, 1)
    with contextlib.closing(records.read_rows(IngestPosition())) as ahead:
        for placed in ahead:
            columns = placed.rows.columns
            if columns is not None:
                columns = fitted_columns(columns, job.fields, whole=job.whole)
            if columns is None:
                _copy_singly(source, placed, job, writer)
                continue
            try:
                writer.write_batch(columns)
            except ConfigError:
                _copy_singly(source, placed, job, writer)


def _copy_singly(source: Source, placed: PlacedRows, job: PartJob, writer: DatasetWriter) -> None:
    """One after another, so that a bad record is found."""
    for item in placed.rows.items():
        problem = item.problem
        if item.sample is not None:
            try:
                writer.write(fitted(item.sample, job.fields, whole=job.whole))
            except ConfigError as error:
                problem = str(error)
        if problem:
            raise IngestError(f"{source.where}: bad record {item.name}: {problem}")
