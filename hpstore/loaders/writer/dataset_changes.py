"""Change a dataset: rows that go, a field that comes. Each makes a new version of it.

Parts in which nothing changes are shared with the version before. A part with rows that go is
rewritten without them; a field of single values is a column beside what is there, any other one
lies within the records, which are rewritten.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import numpy as np

from hpstore.codec.galois import Bytes
from hpstore.errors import ConfigError, ObjectNotFound, VersionConflict
from hpstore.loaders.dataset.dataset_manifest import ContentDigest, DatasetManifest, DatasetPart
from hpstore.loaders.dataset.dataset_versions import change_dataset, read_manifest
from hpstore.loaders.dataset.fields import Array, Field, FieldKind, check_fields, stored_fields
from hpstore.loaders.dataset.publish_dataset import DatasetInfo, dataset_info, joined_content
from hpstore.loaders.dataset.python_numbers import as_numbers
from hpstore.loaders.dataset.record_layout import SHARD_BYTES, Int64s, group_fields
from hpstore.loaders.dataset.record_reader import StoredData
from hpstore.loaders.dataset.stored_manifests import require_pool, require_same_columns
from hpstore.loaders.writer.dataset_writer import checked_batch
from hpstore.loaders.writer.part_writer import PartOptions, PartWriter, new_nonce, remove_written
from hpstore.loaders.writer.shuffle_on_write import copy_in_order
from hpstore.loaders.writer.stream_writer import FieldColumnWriter, SmallObjects, put_small
from hpstore.loaders.writer.upload_queue import Uploads
from hpstore.pool.pool import Pool

_log = logging.getLogger(__name__)
BLOCK_ROWS = 1 << 16  # that a predicate, or a function that gives values, is asked for at a time
Predicate = Callable[[Mapping[str, Array]], object]
Values = Callable[[range], object]


def delete_rows(
    pool: Pool, name: str, rows: Sequence[int] | Predicate, *, version: str | None = None
) -> DatasetInfo:
    """Make a version without some samples; the others keep their order. Durable on return.

    The version before stays (delete_version deletes it); until then nothing is given free, and
    parts that lose samples are stored twice.

    Parameters
    ----------
    pool
        An open pool.
    name
        Name of the dataset.
    rows
        Indices of the samples that go, or a function of the fields of single values: it gets a dict
        of arrays (n, *shape), 65,536 samples at a time, in order, and returns n bools, True for
        those that go. Of optional fields it gets `<name>_mask`, too: where that is False there is
        no value, and zeros stand in its place. bfloat16 comes as float32.
    version
        What the new version is called. Default: "v" and its number.

    Returns
    -------
    DatasetInfo
        Facts about the new version, or about the newest one where no sample was to go.

    Raises
    ------
    ConfigError
        An index is not there, the function returned something else, or no sample would be left.
        Nothing was changed.
    VersionConflict
        Another process changed these samples meanwhile, or `version` is taken. Nothing was changed.
    ObjectNotFound, IntegrityError, TooFewDevices
        As DatasetWriter raises them.
    """
    base = read_manifest(require_pool(pool, "delete_rows"), name)
    with StoredData(pool, name, base) as data:
        stays = _staying(data, rows)
        if stays.all():
            return dataset_info(pool, name, base)
        if not stays.any():
            raise ConfigError(
                f"no sample of data set {name!r} would be left: nothing was changed; "
                "delete_dataset deletes it"
            )
        with _Writers(pool, name, base) as writers:
            parts = _without(data, stays, writers)
            return writers.publish(base.fields, parts, version, whole=False)


def _staying(data: StoredData, rows: Sequence[int] | Predicate) -> Array:
    """True for each sample that stays. Raises ConfigError."""
    stays: Array = np.ones(len(data), np.bool_)
    if not callable(rows):
        _require_sized("rows", rows, "whole numbers, or a function")
        given = np.asarray(rows if len(rows) else np.empty(0, np.int64))
        if given.dtype.kind not in "iu" or given.ndim != 1:
            raise ConfigError("rows: whole numbers, or a function; nothing was changed")
        bad = given[(given < -len(data)) | (given >= len(data))]
        if len(bad):
            raise ConfigError(
                f"data set {data.name!r} has no sample {bad[0]}, it has {len(data)}; nothing was "
                "changed"
            )
        stays[given] = False
        return stays
    scalars = {n: made for n, made in data.stored.items() if made.kind is FieldKind.SCALAR}
    for block in _blocks(len(data)):
        here = np.arange(block.start, block.stop)
        found = {n: as_numbers(m.dtype, data.scalars(n, here)) for n, m in scalars.items()}
        goes = np.asarray(rows(found))
        if goes.shape != (len(block),) or goes.dtype != np.bool_:
            raise ConfigError(
                f"the function gave an array {goes.shape} of {goes.dtype} for {len(block)} "
                "samples: it returns one True or False for each. Nothing was changed"
            )
        stays[block.start : block.stop] = ~goes
    return stays


def _require_sized(what: str, given: object, wanted: str) -> None:
    """Raise ConfigError for what has no length, such as a generator."""
    if not hasattr(given, "__len__"):
        raise ConfigError(
            f"{what} are a {type(given).__name__}: give {wanted}. Nothing was changed"
        )


def _blocks(rows: int) -> Iterator[range]:
    for at in range(0, rows, BLOCK_ROWS):
        yield range(at, min(at + BLOCK_ROWS, rows))


def _without(data: StoredData, stays: Array, writers: _Writers) -> tuple[DatasetPart, ...]:
    """The parts, those that lose samples rewritten."""
    parts, first = [], 0
    options = _options(data.manifest, data.manifest.fields)
    for part in data.manifest.parts:
        kept = first + np.flatnonzero(stays[first : first + part.rows])
        first += part.rows
        if len(kept) == part.rows:
            parts.append(part)
        elif len(kept):
            ordered = data.manifest.shuffle_seed is not None
            writer = writers.begin(options, ordered=ordered, units=part.units)
            copy_in_order(data, kept, writer, numbers=data.written_as(kept))
            parts.append(writer.finish())
    return tuple(parts)


def add_field(
    pool: Pool,
    name: str,
    field: str,
    made: Field,
    values: Sequence[object] | Array | Values,
    *,
    version: str | None = None,
) -> DatasetInfo:
    """Make a version with one more field, the last. Durable on return.

    A field of single values is written beside what is there. Any other one lies within the records:
    all of the dataset is rewritten. The version before stays (delete_version deletes it).

    Parameters
    ----------
    pool
        An open pool.
    name
        Name of the dataset.
    field
        Name of the field.
    made
        What it is.
    values
        A value for each sample, in their order, as DatasetWriter.write_batch takes them; or a
        function that gets a range of at most 65,536 samples and returns their values.
    version
        What the new version is called. Default: "v" and its number.

    Returns
    -------
    DatasetInfo
        Facts about the new version.

    Raises
    ------
    ConfigError
        There is such a field already, or values do not fit. Nothing was changed.
    VersionConflict
        Another process changed the dataset meanwhile, or `version` is taken. Nothing was changed.
    ObjectNotFound, IntegrityError, TooFewDevices
        As DatasetWriter raises them.
    """
    base = read_manifest(require_pool(pool, "add_field"), name)
    if field in base.fields:
        raise ConfigError(f"data set {name!r} has a field {field!r}; nothing was changed")
    fields = check_fields({**base.fields, field: made})
    give: Values = values if callable(values) else _given_values(field, values, base.rows)
    with _Writers(pool, name, base) as writers:
        if made.kind is FieldKind.SCALAR:
            parts = _beside(writers, base, field, made, give)
        else:
            with StoredData(pool, name, base) as data:
                parts = _rewritten(data, field, made, give, writers)
        return writers.publish(fields, parts, version, whole=True)


def _given_values(field: str, values: Sequence[object] | Array, rows: int) -> Values:
    """As a function, the values of all samples. Raises ConfigError."""
    _require_sized("values", values, "one for each sample, or a function")
    if len(values) != rows:
        raise ConfigError(
            f"{len(values)} values of field {field!r} for {rows} samples; nothing was changed"
        )
    return partial(_slice, values)


def _slice(values: Sequence[object] | Array, rows: range) -> object:
    found = values[rows.start : rows.stop]
    return found if hasattr(found, "shape") else list(found)


def _beside(
    writers: _Writers, base: DatasetManifest, field: str, made: Field, give: Values
) -> tuple[DatasetPart, ...]:
    """The parts, each with a column more, or two, whose objects are under nonces of their own."""
    stored = stored_fields({field: made})
    names = {name: str(len(base.stored) + number) for number, name in enumerate(stored)}
    parts, first = [], 0
    for part in base.parts:
        columns = [writers.begin_column(n, stored[n], column) for n, column in names.items()]
        for block in _blocks(part.rows):
            arrays, _ = _given(field, made, give, range(first + block.start, first + block.stop))
            for name, column in zip(names, columns, strict=True):
                column.writer.add(arrays[name])
        first += part.rows
        hashes = {n: column.finish() for n, column in zip(names.values(), columns, strict=True)}
        nonces = {n: column.nonce for n, column in zip(names.values(), columns, strict=True)}
        parts.append(
            replace(
                part,
                columns={**part.columns, **hashes},
                column_nonces={**part.column_nonces, **nonces},
            )
        )
    return tuple(parts)


def _given(
    field: str, made: Field, give: Values, rows: range
) -> tuple[dict[str, Array], dict[str, Sequence[Bytes]]]:
    """The values of a field for some samples. Raises ConfigError."""
    where = f"samples {rows.start} to {rows.stop}"
    arrays, ragged, count = checked_batch({field: made}, {field: give(rows)}, where)
    if count != len(rows):
        raise ConfigError(f"{where}: {count} values of field {field!r}; nothing was changed")
    return arrays, ragged


def _rewritten(
    data: StoredData, field: str, made: Field, give: Values, writers: _Writers
) -> tuple[DatasetPart, ...]:
    """All parts as they were, with a field more in their records."""
    parts, first = [], 0
    options = _options(data.manifest, {**data.manifest.fields, field: made})

    def more(rows: Int64s) -> tuple[dict[str, Array], dict[str, Sequence[Bytes]]]:
        return _given(field, made, give, range(int(rows[0]), int(rows[-1]) + 1))

    for part in data.manifest.parts:
        ordered = data.manifest.shuffle_seed is not None
        writer = writers.begin(options, ordered=ordered, units=())
        order = np.arange(first, first + part.rows)
        copy_in_order(data, order, writer, numbers=data.written_as(order), more=more)
        first += part.rows
        parts.append(writer.finish())
    return tuple(parts)


def _options(manifest: DatasetManifest, fields: Mapping[str, Field]) -> PartOptions:
    stored = stored_fields(fields)
    _, records = group_fields(stored, manifest.layout)
    return PartOptions(
        fields=stored,
        records=records,
        shard_bytes=SHARD_BYTES,
        unit_bytes=None,
        alike=True,
        compression=manifest.compression,
    )


@dataclass(frozen=True, slots=True)
class _Column:
    """A column that comes later than its part."""

    pool: Pool
    writer: FieldColumnWriter
    uploads: Uploads
    small: SmallObjects
    nonce: str

    def finish(self) -> tuple[str, ...]:
        """Store the rest: the hashes of its objects, which are durable on return."""
        self.writer.finish()
        put_small(self.pool, self.small)
        self.uploads.settle()
        self.uploads.close()
        return tuple(self.writer.hashes)


class _Writers:
    """What one change writes; removed again unless it was published."""

    def __init__(self, pool: Pool, name: str, base: DatasetManifest) -> None:
        self._pool, self._name, self._base = pool, name, base
        self._parts: list[PartWriter] = []
        self._columns: list[_Column] = []
        self._unclear = False

    def begin(self, options: PartOptions, *, ordered: bool, units: Sequence[int]) -> PartWriter:
        """A part. Raises ConfigError when it would lie otherwise than the others."""
        require_same_columns(self._pool, self._name, self._base)
        writer = PartWriter(self._pool, self._name, options, ordered=ordered, units=units)
        self._parts.append(writer)
        return writer

    def begin_column(self, field: str, made: Field, column: str) -> _Column:
        """The column of a field in one part, under a nonce of its own."""
        uploads, nonce = Uploads(), new_nonce()
        small: SmallObjects = {}
        writer = FieldColumnWriter(
            self._pool,
            (self._name, nonce, column),
            field,
            made,
            uploads=uploads,
            small=small,
            content=ContentDigest(),
        )
        self._columns.append(_Column(self._pool, writer, uploads, small, nonce))
        return self._columns[-1]

    def publish(
        self,
        fields: Mapping[str, Field],
        parts: tuple[DatasetPart, ...],
        version: str | None,
        *,
        whole: bool,
    ) -> DatasetInfo:
        """The new version: these parts, and what was appended behind those before meanwhile.

        `whole`: nothing may have been appended. Raises VersionConflict.
        """
        base, count = self._base, len(self._base.parts)

        def changed(newest: DatasetManifest) -> DatasetManifest:
            same = newest.parts[:count] == base.parts and newest.fields == base.fields
            if not same or (whole and len(newest.parts) > count):
                raise VersionConflict(
                    f"data set {self._name!r} was changed by another process meanwhile: nothing "
                    "was changed. Try again."
                )
            made = replace(newest, fields=fields, parts=(*parts, *newest.parts[count:]))
            return replace(made, content=joined_content(self._pool, self._name, made, made.parts))

        def putting(now: bool) -> None:
            self._unclear = now  # an unacknowledged put may still become visible

        try:
            made = change_dataset(self._pool, self._name, changed, label=version, putting=putting)
        except (ConfigError, ObjectNotFound, VersionConflict) as error:
            self._unclear = error.maybe_visible  # a dataset that went is found before any put
            raise
        return dataset_info(self._pool, self._name, made)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for column in self._columns:
            column.uploads.close()
        if kind is None:
            return
        if self._unclear:
            _log.warning(
                "data set %r: it is not clear whether it was changed; what was written stays",
                self._name,
            )
            return
        for part in self._parts:
            part.remove()
        for column in self._columns:
            remove_written(self._pool, self._name, column.nonce)
