"""Turn a source into a dataset: in parts that survive a kill, published all at once.

Memory: four shard buffers per stream, one window, and 64 MiB that are read ahead.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from time import perf_counter
from typing import Any

from hpstore.errors import (
    BudgetExceeded,
    ConfigError,
    DeviceError,
    HpstoreError,
    IngestError,
    LockTimeout,
    RedundancyError,
    without_promise,
)
from hpstore.loaders.dataset.dataset_manifest import DatasetManifest
from hpstore.loaders.dataset.dataset_versions import read_manifest
from hpstore.loaders.dataset.fields import Field, check_fields, require_no_text
from hpstore.loaders.dataset.record_layout import SHARD_BYTES
from hpstore.loaders.dataset.stored_manifests import require_pool
from hpstore.loaders.ingestion.infer_fields import LOOKED_AT, fitted, fitted_columns, infer_fields
from hpstore.loaders.ingestion.ingest_append import (
    append_base,
    fields_of_base,
    require_same_meaning,
)
from hpstore.loaders.ingestion.ingest_journal import CHOSEN, Journal, Progressed, Skipped, mismatch
from hpstore.loaders.ingestion.ingest_report import IngestCallback, IngestProgress, IngestReport
from hpstore.loaders.ingestion.open_source import open_source
from hpstore.loaders.ingestion.part_committer import (
    PartsWriter,
    Target,
    earlier_run,
    is_published,
    replaceable,
)
from hpstore.loaders.ingestion.sample_source import (
    FieldsChanged,
    IndexedSource,
    Source,
    printable,
    require_unchanged,
)
from hpstore.loaders.ingestion.source_rows import GROUP_BYTES, SourceItem
from hpstore.loaders.ingestion.write_order import (
    WINDOW_BYTES,
    IngestPosition,
    PlacedRows,
    Records,
    records_of,
)
from hpstore.loaders.writer.dataset_writer import require_same_fields
from hpstore.loaders.writer.shuffle_on_write import shuffle_seed
from hpstore.pool.pool import Pool
from hpstore.units import bytes_argument, whole_argument

_log = logging.getLogger(__name__)
Fields = Mapping[str, Field] | Sequence[str]
MAX_SKIPPED = 10_000
ON_ERROR = ("raise", "skip")


def ingest(
    pool: Pool,
    name: str,
    source: object,
    *,
    format: str = "auto",  # noqa: A002 (the word that users look for)
    fields: Mapping[str, Field] | Sequence[str] | None = None,
    names: Sequence[str] | None = None,
    check_images: bool = True,
    source_options: Mapping[str, object] | None = None,
    shuffle: bool = True,
    seed: int = 0,
    window_bytes: int | str = WINDOW_BYTES,
    workers: int | None = None,
    on_error: str = "raise",
    max_skipped: int = MAX_SKIPPED,
    resume: bool = True,
    overwrite: bool = False,
    append: bool = False,
    version: str | None = None,
    layout: str = "auto",
    shard_bytes: int | str = SHARD_BYTES,
    unit_bytes: int | str | None = None,
    compression: str | None = None,
    metadata: Mapping[str, object] | None = None,
    progress: IngestCallback | None = None,
) -> IngestReport:
    """Write the samples of `source` as dataset `name`; visible and durable when all of it is there.

    Parameters
    ----------
    pool, name, overwrite, append, version, layout, shard_bytes, unit_bytes, compression, metadata
        As of DatasetWriter.
    source, format, names, check_images, source_options
        As of open_source().
    fields
        What to take of a sample: names, or names with types. Default: all, of the source's types.
    shuffle, seed, window_bytes
        A permutation by `seed`; where records have no numbers, of blocks, mixed in such windows.
    on_error, max_skipped
        "raise" for a bad record, or "skip" up to so many of them and report them.
    resume, workers, progress
        Continue a call that was cut short, or discard its parts; threads; called as parts grow.

    Returns
    -------
    IngestReport

    Raises
    ------
    ConfigError, IngestError, VersionConflict, ObjectNotFound
        A wrong argument, a bad record or another source; as of DatasetWriter.
    """
    asked = _begun(on_error, max_skipped) | {"window_bytes": window_bytes, "workers": workers}
    asked |= _place(pool, name, append=append, overwrite=overwrite, version=version)
    how = {"names": names, "check_images": check_images, "source_options": source_options}
    opened = open_source(source, format=format, **how)  # type: ignore[arg-type]  # as given
    laid = {"layout": layout, "compression": compression} | _sizes(shard_bytes, unit_bytes)
    run = _run(opened, asked, laid, shuffle_seed(shuffle, seed), metadata, progress)
    return run.report(fields, resume=resume)


# Any below: arguments of _Run by name
def _begun(on_error: str, max_skipped: int) -> dict[str, Any]:
    """Since when it runs, and what becomes of bad records."""
    if on_error not in ON_ERROR:
        raise ConfigError(f"on_error {on_error!r}: choose raise or skip")
    whole_argument("max_skipped", max_skipped, least=0)
    return {"began": perf_counter(), "skip": on_error == "skip", "max_skipped": max_skipped}


def _place(
    pool: Pool, name: str, *, append: bool, overwrite: bool, version: str | None
) -> dict[str, Any]:
    """Where it goes, and what is there."""
    require_pool(pool, "ingest")
    base = append_base(pool, name, append=append, overwrite=overwrite, version=version)
    replaces = None if base else replaceable(pool, name, overwrite=overwrite)
    return {"pool": pool, "name": name, "base": base, "replaces": replaces, "label": version}


def _sizes(shard_bytes: int | str, unit_bytes: int | str | None) -> dict[str, int | None]:
    """Those of the writer, as numbers: a resumed ingest compares them."""
    shard = bytes_argument("shard_bytes", shard_bytes, least=1)
    unit = None if unit_bytes is None else bytes_argument("unit_bytes", unit_bytes, least=1)
    return {"shard_bytes": shard, "unit_bytes": unit}


def _run(
    source: Source,
    asked: dict[str, Any],
    laid: dict[str, Any],
    seed: int | None,
    metadata: Mapping[str, object] | None,
    progress: IngestCallback | None,
) -> _Run:
    """What is asked for, checked. Appended samples are written as the dataset was."""
    base: DatasetManifest | None = asked["base"]
    if base is not None:
        require_same_meaning(base, source)
        laid = laid | {"layout": base.layout, "compression": base.compression or None}
        seed = base.shuffle_seed
    asked["window_bytes"] = bytes_argument("window_bytes", asked["window_bytes"], least=1)
    asked["workers"] = _workers(source, asked["workers"])
    return _Run(
        **asked,
        source=source,
        options=laid,
        seed=seed,
        metadata={**source.metadata, **(metadata or {})},
        progress=progress,
    )


def _workers(source: Source, asked: int | None) -> int:
    if asked is not None:
        return whole_argument("workers", asked, least=1)
    return source.threads if isinstance(source, IndexedSource) else 1


@dataclass(slots=True, kw_only=True)
class _Run:
    """One call of ingest."""

    pool: Pool
    name: str
    source: Source
    options: dict[str, Any]  # of the writer
    replaces: str | None
    seed: int | None
    window_bytes: int
    workers: int
    skip: bool
    max_skipped: int
    metadata: dict[str, object]
    progress: IngestCallback | None
    base: DatasetManifest | None  # what is appended to
    label: str | None
    began: float  # perf_counter()
    whole: bool = False  # all of a sample is taken: one with more than the fields is a bad record

    def report(self, fields: Fields | None, *, resume: bool) -> IngestReport:
        """Write and publish."""
        require_no_text(fields)
        manifest, done, resumed = self._go(fields, resume=resume)
        return IngestReport(
            name=self.name,
            source=self.source.where,
            format=self.source.kind,
            samples=done.rows,
            bytes=done.nbytes,
            fields={n: (f.dtype, f.shape) for n, f in manifest.fields.items()},
            order=done.plan["order"],
            skipped=done.skipped,
            ignored=self.source.ignored,
            resumed_samples=resumed,
            fingerprint=manifest.fingerprint,
            seconds=perf_counter() - self.began,
        )

    def _go(
        self, fields: Fields | None, *, resume: bool
    ) -> tuple[DatasetManifest, Progressed, int]:
        """As report(); the manifest, the journal, and the samples there were."""
        try:
            return self._once(fields, resume=resume)
        except FieldsChanged as found:
            _log.warning("the ingest of %r begins again: %s", self.name, found)
            return self._once(fields, resume=False)

    def _once(
        self, fields: Fields | None, *, resume: bool
    ) -> tuple[DatasetManifest, Progressed, int]:
        journal = Journal(self.pool, self.name)
        found, gone = earlier_run(self.pool, self.name, journal, resume=resume)
        before = None if found is None else found.plan.get(CHOSEN)
        if found is not None and fields is not None and before is False:
            raise self._other(found, f"no fields were chosen, now they are {list(fields)}")
        chosen_by_user = fields is not None or bool(before)
        self.whole = not chosen_by_user and self.source.fields is None
        if self.base is not None and fields is None:
            fields = fields_of_base(self.name, self.base, self.source)
        recalled = found is not None and not isinstance(fields, Mapping)
        if found is not None and not isinstance(fields, Mapping):
            if fields is not None and [n for n, *_ in found.plan["fields"]] != list(fields):
                raise self._other(found, f"fields were {found.plan['fields']}, now {fields}")
            fields = {n: Field.from_json(raw) for n, *raw in found.plan["fields"]}
        chosen, records, ahead = self._opened(fields, recalled=recalled, whole=not chosen_by_user)
        if self.base is not None:
            require_same_fields(self.name, self.base, chosen)
        plan = {**self._plan(chosen, records), CHOSEN: chosen_by_user}
        start = Progressed(source=self.source.fingerprint(), plan=plan)
        done = self._appended_before(journal, start) if resume else None
        if done is not None:
            ahead.close()
            return read_manifest(self.pool, self.name), done, done.rows
        if found is not None:
            self._check(found, start)
            start, ahead = found, records.read_rows(found.place, self._piece_bytes())
        start = replace(start, writing=gone)
        target = Target(
            pool=self.pool,
            name=self.name,
            fields=chosen,
            seed=self.seed,
            replaces=self.replaces,
            base=self.base,
            label=self.label,
            metadata={**self.metadata, "ingest": self._lineage(start)},
            **self.options,
        )
        with contextlib.closing(ahead), PartsWriter(target, start, journal) as parts:
            try:
                self._copy(ahead, parts, chosen, records)
                require_unchanged(self.source, start.source)
                manifest = parts.publish()
            except (DeviceError, RedundancyError, LockTimeout, BudgetExceeded) as error:
                raise self._stopped(error, parts.progressed.rows) from error
        return manifest, parts.progressed, start.rows

    def _stopped(self, error: HpstoreError, rows: int) -> HpstoreError:
        """What devices have ended, saying what stands. The put of the manifest may have counted."""
        of_it = "of" if self.base is None else "was appended to"
        if error.maybe_visible:
            stands = (
                f"Whether data set {self.name!r} was published is not certain: look at its number "
                "of samples before you do it again"
            )
        else:
            stands = (
                f"Nothing {of_it} data set {self.name!r}{' is visible' * (self.base is None)}; "
                f"{rows} samples are kept. When that is mended, the same call goes on from there"
            )
        made = type(error)(f"{without_promise(error)} {stands}", device=error.device, key=error.key)
        made.maybe_visible = error.maybe_visible
        return made

    def _appended_before(self, journal: Journal, wanted: Progressed) -> Progressed | None:
        """What this very call had appended when it was killed right after that: not again."""
        found = journal.read() if self.base is not None else None
        if found is None or not is_published(self.pool, self.name, found):
            return None
        if mismatch(found, wanted):
            return None
        journal.remove()
        return found

    def _opened(
        self, fields: Fields | None, *, recalled: bool, whole: bool
    ) -> tuple[dict[str, Field], Records, Generator[PlacedRows, None, None]]:
        """Fields, the records in the order of writing, and these from the first one on. `recalled`:
        the fields are what an earlier run had from the source; `whole`: the user chose none."""
        if recalled and isinstance(fields, Mapping):
            self.source.recall(fields)
        elif fields is not None:
            types = fields if isinstance(fields, Mapping) else {}
            self.source.restrict(list(fields), types)
        if whole and fields is not None:
            self.source.keep_whole()
        known = self.source.fields
        if known is not None and fields is not None:
            for name in fields:
                if name not in known:
                    raise ConfigError(f"{self.source.where} has no {name!r}")
        self._raise_known()
        records = records_of(self.source, self.seed, self.window_bytes, self.workers)
        ahead = records.read_rows(IngestPosition(), self._piece_bytes())
        if isinstance(fields, Mapping):
            return check_fields(fields), records, ahead
        if known is None:
            known, ahead = self._inferred(ahead, fields)
        elif fields is not None:
            known = {name: known[name] for name in fields}
        return check_fields(known), records, ahead

    def _piece_bytes(self) -> int:
        """What is written at a time: a small part of a shard."""
        return max(1, min(GROUP_BYTES, int(self.options["shard_bytes"]) // 16))

    def _raise_known(self) -> None:
        """Do not begin when it is known that a record is bad."""
        if not isinstance(self.source, IndexedSource) or self.skip:
            return
        for index, problem in self.source.broken.items():
            raise self._bad(self.source.name_of(index), problem, 0)

    def _inferred(
        self, ahead: Generator[PlacedRows, None, None], names: Sequence[str] | None
    ) -> tuple[dict[str, Field], Generator[PlacedRows, None, None]]:
        fields, first = fields_by_look(ahead, names, self.source.where)
        return fields, _joined(first, ahead)

    def _plan(self, fields: Mapping[str, Field], records: Records) -> dict[str, Any]:
        return {
            "fields": [[name, *made.to_json()] for name, made in fields.items()],
            "order": records.describe(),
            **self.options,
            **self._append_plan(),
        }

    def _append_plan(self) -> dict[str, Any]:
        """Pages of the dataset that is appended to: a run that is resumed has the same."""
        if self.base is None:
            return {}
        return {"append": list(self.base.parts[0].units)}

    def _lineage(self, start: Progressed) -> dict[str, object]:
        return {
            "source": printable(self.source.where),
            "format": self.source.kind,
            "fingerprint": start.source,
            "order": start.plan["order"],
        }

    def _check(self, found: Progressed, wanted: Progressed) -> None:
        problem = mismatch(found, wanted)
        if problem:
            raise self._other(found, problem)

    def _other(self, found: Progressed, problem: str) -> IngestError:
        return IngestError(
            f"an ingest of {self.name!r} was cut short after {found.rows} samples and cannot "
            f"be continued: {problem}. These samples are kept; resume=False (--restart) throws "
            "them away and begins anew"
        )

    def _copy(
        self,
        ahead: Iterator[PlacedRows],
        parts: PartsWriter,
        fields: dict[str, Field],
        records: Records,
    ) -> None:
        """Every record into the writer, or onto the list of those left out."""
        resumed = parts.progressed.place.position
        for placed in ahead:
            columns = placed.rows.columns
            if columns is not None:
                columns = fitted_columns(columns, fields, whole=self.whole)
            if columns is None or not parts.write_rows(columns, placed):
                self._copy_singly(placed, parts, fields)
            if self.progress is not None:
                self.progress(
                    IngestProgress(
                        records=placed.first + len(placed.rows),
                        total=records.expected,
                        bytes=parts.nbytes,
                        resumed=resumed,
                        estimated=self.source.length is None,
                    )
                )

    def _copy_singly(
        self, placed: PlacedRows, parts: PartsWriter, fields: dict[str, Field]
    ) -> None:
        """One after another: so each bad record is found, and only those."""
        for count, item in enumerate(placed.rows.items(), 1):
            problem = item.problem or self._written(item, parts, fields)
            if problem:
                self._left_out(item, problem, parts)
            parts.took(placed.after(count))

    def _written(self, item: SourceItem, parts: PartsWriter, fields: dict[str, Field]) -> str:
        """Write one sample; returns what is wrong with it."""
        assert item.sample is not None
        try:
            sample = fitted(item.sample, fields, whole=self.whole)
        except ConfigError as error:
            return str(error)
        return parts.write(sample, item.origin)

    def _left_out(self, item: SourceItem, problem: str, parts: PartsWriter) -> None:
        if not self.skip:
            raise self._bad(item.name, problem, parts.progressed.rows)
        if parts.skipped >= self.max_skipped:
            raise IngestError(
                f"{self.source.where}: more than {self.max_skipped} bad records, the last one "
                f"{item.name}: {problem}. Nothing is visible; {parts.progressed.rows} samples are "
                "kept. Is this the right source? max_skipped (--max-skipped) allows more"
            )
        name, problem = printable(item.name), printable(problem)
        parts.skip(Skipped(name=name, origin=item.origin, problem=problem))

    def _bad(self, name: str, problem: str, rows: int) -> IngestError:
        return IngestError(
            f"{self.source.where}: bad record {name}: {problem}. Nothing is visible; {rows} "
            'samples are kept and the same call goes on from there. on_error="skip" (--on-error '
            "skip) leaves bad records out"
        )


def fields_by_look(
    ahead: Iterator[PlacedRows], names: Sequence[str] | None, where: str
) -> tuple[dict[str, Field], list[PlacedRows]]:
    """The fields that the first records have, and these, which `ahead` gives no more."""
    first = list[PlacedRows]()
    while sum(len(placed.rows) for placed in first) < LOOKED_AT:
        placed = next(ahead, None)
        if placed is None:
            break
        first.append(placed)
    rows = chain.from_iterable(placed.rows.items() for placed in first)
    items = list(islice(rows, LOOKED_AT))
    samples = [item.sample for item in items if item.sample is not None]
    if names is not None:
        samples = [fitted(sample, names) for sample in samples]
    if not samples:
        said = f"{items[0].name}: {items[0].problem}" if items else "it is empty"
        raise IngestError(
            f"{where}: no sample to tell the fields from ({said}); nothing was "
            "written. Give fields={...}"
        )
    return infer_fields(samples), first


def _joined(
    first: Iterable[PlacedRows], rest: Generator[PlacedRows, None, None]
) -> Generator[PlacedRows]:
    """Both, closed together."""
    yield from first
    yield from rest
