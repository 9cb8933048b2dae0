"""Write a dataset: samples into shards, visible all at once when the writer closes."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import numpy as np

from hpstore.codec.galois import Bytes
from hpstore.errors import ConfigError, ObjectNotFound, VersionConflict
from hpstore.loaders.dataset.class_names import other_meaning
from hpstore.loaders.dataset.dataset_manifest import (
    DatasetManifest,
    DatasetPart,
    check_label,
    check_new_name,
    manifest_key,
    part_key,
)
from hpstore.loaders.dataset.dataset_versions import change_dataset, read_manifest
from hpstore.loaders.dataset.fields import (
    Array,
    Field,
    FieldKind,
    check_fields,
    check_names,
    fixed_rows,
    fixed_value,
    mask_name,
    ragged_rows,
    ragged_value,
    stored_fields,
)
from hpstore.loaders.dataset.optional_values import blank, filled, take_masks
from hpstore.loaders.dataset.page_compression import checked_compression
from hpstore.loaders.dataset.publish_dataset import joined_content, publish
from hpstore.loaders.dataset.record_layout import SHARD_BYTES, group_fields
from hpstore.loaders.dataset.record_reader import StoredData
from hpstore.loaders.dataset.stored_manifests import require_pool, require_same_columns
from hpstore.loaders.dataset.stored_values import StoredValues
from hpstore.loaders.writer.part_writer import PartOptions, PartWriter
from hpstore.loaders.writer.shuffle_on_write import copy_in_order, permutation, shuffle_seed
from hpstore.membership.members import check_unit
from hpstore.pool.pool import Pool
from hpstore.runtime.closing import Closing
from hpstore.units import bytes_argument, whole_argument

_log = logging.getLogger(__name__)


class DatasetWriter(Closing):
    """Writes one dataset, or one part of it. Use it as a context manager; one thread at a time.

    close() publishes: before it nothing is visible, after it everything is, and durable. An
    exception in the block, or abandon(), publishes nothing and removes what was stored; what a
    killed process leaves is invisible and removed by `remove_orphans`. Memory: two shard buffers
    a stream.

    Parameters
    ----------
    pool
        An open pool. It stays the caller's.
    name
        Name of the dataset.
    fields
        Fields of a sample by name, in the order in which samples have them.
    layout
        "rows": large fields of a sample together. "columns": each by itself. Or "auto".
    shard_bytes
        Payload of an object: a number or text such as "64MiB".
    unit_bytes
        Bytes of a page, a number or text. Default: chosen from the records.
    compression
        "lz4", "zstd" or "blosc", page by page. None: none.
    shuffle
        Store the samples in an order drawn from `seed`, kept with the dataset
        (StoredData.written_as). close() then writes all of it a second time.
    seed
        0 <= seed < 2**64.
    part
        (i, n) with 0 <= i < n, for n writers of one dataset, published by `publish_parts`.
    overwrite
        Replace what is there, in close(). Versions that are kept stay.
    append
        Add to the dataset that is there, in close(), which makes a new version of it; the one
        before is kept. Others may append and read meanwhile. Fields must be those of the dataset;
        its layout, compression, pages and shuffle are taken over, `metadata` replaces its own.
    version
        With `append`: what the new version is called. Default: "v" and its number.
    metadata
        JSON, recorded with the dataset.

    Raises
    ------
    ConfigError, InvalidKey
        An argument is wrong, or no dataset can have this name. Nothing was written.
    VersionConflict
        The name is taken, and neither `overwrite` nor `append` was given. What is there is
        unchanged.
    ObjectNotFound
        There is nothing to append to.
    """

    def __init__(
        self,
        pool: Pool,
        name: str,
        fields: Mapping[str, Field],
        *,
        layout: str = "auto",
        shard_bytes: int | str = SHARD_BYTES,
        unit_bytes: int | str | None = None,
        compression: str | None = None,
        shuffle: bool = False,
        seed: int = 0,
        part: tuple[int, int] | None = None,
        overwrite: bool = False,
        append: bool = False,
        version: str | None = None,
        metadata: Mapping[str, object] | None = None,
    ) -> None:
        self.pool, self.name = require_pool(pool, "a DatasetWriter"), check_new_name(name)
        self.fields = check_fields(fields)
        self.part, self.overwrite = _checked_part(part), overwrite
        self.label = check_label(version)
        self.metadata = _checked_metadata(metadata)
        self._seed = shuffle_seed(shuffle, seed)
        self._base = self._appended_to() if append else None
        if self._base is not None:
            layout, compression = self._base.layout, self._base.compression or None
            self._seed, unit_bytes = self._base.shuffle_seed, None
        elif self.label:
            raise ConfigError("version= names what append=True makes; a new data set begins at v1")
        self.layout, records = group_fields(stored_fields(self.fields), layout)
        self.compression = checked_compression(compression)
        shard_bytes = bytes_argument("shard_bytes", shard_bytes, least=1)
        if unit_bytes is not None:
            unit_bytes = bytes_argument("unit_bytes", unit_bytes, least=1)
            check_unit(pool.config, pool.data + pool.parity, unit_bytes)
        self._key = manifest_key(name) if part is None else part_key(name, part)
        self._version = None if append else self._version_there()
        self._options = PartOptions(
            fields=stored_fields(self.fields),
            records=records,
            shard_bytes=shard_bytes,
            unit_bytes=unit_bytes,
            compression=self.compression,
            alike=part is not None,
        )
        self._units = self._base.parts[0].units if self._base is not None else ()
        self._part_writers = [PartWriter(pool, name, self._options, units=self._units)]
        self._rows, self._state, self._pid = 0, "open", os.getpid()

    def __len__(self) -> int:
        return self._rows

    def _appended_to(self) -> DatasetManifest:
        """The newest manifest. Raises ConfigError for fields that are not its own."""
        if self.part is not None or self.overwrite:
            raise ConfigError("append=True goes with neither part= nor overwrite=True")
        base = read_manifest(self.pool, self.name)
        require_same_fields(self.name, base, self.fields)
        require_same_columns(self.pool, self.name, base)
        return base

    def write(self, sample: Mapping[str, object]) -> int:
        """Append one sample. Nothing of it is visible before close().

        After another error than those below the writer has failed: close() publishes nothing.

        Parameters
        ----------
        sample
            A value for each field: an array or a CPU tensor of the field's dtype and shape, bytes,
            str, what JSON holds or, for a field of one number, a number; None where it is optional.
            Values are copied before the return.

        Returns
        -------
        int
            Index of the sample, in the order of writing.

        Raises
        ------
        ConfigError
            A dtype, a shape or the names of the fields are wrong; the message names the field.
            Nothing was written and the writer goes on. Or the writer is closed or has failed.
        """
        self._usable()
        batch, ragged = checked_sample(self.fields, sample, f"sample {self._rows}")
        self._append(batch, ragged, 1)
        return self._rows - 1

    def write_batch(self, batch: Mapping[str, object]) -> range:
        """Append samples. Nothing of them is visible before close().

        Parameters
        ----------
        batch
            Values of n samples by field. Fixed fields: arrays (n, *shape), or lists of n values;
            ragged fields: lists of n values. Of optional fields lists with None, or beside the
            values `<name>_mask`, bools (n,) that are True where there is one. They are copied
            before the return.

        Returns
        -------
        range
            Indices of the samples, in the order of writing.

        Raises
        ------
        ConfigError
            As write() raises it, and for fields of different numbers of rows.
        """
        self._usable()
        where = f"batch at sample {self._rows}"
        arrays, ragged, rows = checked_batch(self.fields, batch, where)
        first = self._rows
        self._append(arrays, ragged, rows)
        return range(first, self._rows)

    def _append(
        self, batch: Mapping[str, Array], ragged: Mapping[str, Sequence[Bytes]], rows: int
    ) -> None:
        if not rows:
            return
        self._state = "failed"  # unless all of it gets in: streams must not differ in rows
        self._part_writers[0].append(batch, ragged, rows)
        self._rows += rows
        self._state = "open"

    def _usable(self) -> None:
        if self._state == "failed":
            raise ConfigError(
                f"writer of data set {self.name!r} failed before; nothing was published. Write it "
                "again with a new writer."
            )
        if self._state != "open":
            raise ConfigError(f"writer of data set {self.name!r} is {self._state}")
        if self._pid != os.getpid():
            raise ConfigError(
                f"writer of data set {self.name!r} was opened by another process: open one in each "
                "with part=(i, n)"
            )

    def _version_there(self) -> str | None:
        """Version of the manifest that is there. Raises VersionConflict unless it may go."""
        for key in {self._key, manifest_key(self.name)}:
            if not self.overwrite and self.pool.exists(key):
                raise VersionConflict(
                    f"{key!r} exists; it is unchanged. overwrite=True replaces it.", key=key
                )
        try:
            return self.pool.stat(self._key).version
        except ObjectNotFound:
            return None

    def close(self) -> None:
        """Store the rest, shuffle if asked for, publish. Durable on return; idempotent.

        Raises VersionConflict when another process published the name meanwhile, whose dataset is
        unchanged, or deleted it; nothing of this writer stays then.
        """
        if self._state in ("closed", "abandoned"):
            return
        try:
            self._usable()
            self._state = "failed"
            made = self._part_writers[0].finish()
            if self._seed is not None:
                made = self._shuffled(made)
            manifest = self._manifest(made, self._seed)
            if self._base is not None:
                self._append_part(manifest)
            else:
                self._putting(True)
                publish(self.pool, self.name, self._key, manifest, version=self._version)
        except (ConfigError, ObjectNotFound, VersionConflict) as error:
            if not error.maybe_visible:  # else what was met may be this writer's own
                self._state = "failed"
            self.abandon()
            raise
        except BaseException:
            self.abandon()
            raise
        self._state = "closed"
        if self._seed is not None:
            self._part_writers[0].remove()

    def _append_part(self, manifest: DatasetManifest) -> None:
        """Publish the newest manifest with what was written behind it."""

        def behind(newest: DatasetManifest) -> DatasetManifest:
            require_same_fields(self.name, newest, self.fields)
            odd = other_meaning(newest.metadata, self.metadata or {}, self.fields, more=True)
            if odd is not None:
                raise ConfigError(
                    f"append to data set {self.name!r}: {odd} would be others than there, and "
                    "the same numbers would stand for others. Nothing was appended; give what is "
                    "there, classes in their order, new ones behind them"
                )
            parts = (*newest.parts, *manifest.parts)
            content = joined_content(self.pool, self.name, newest, parts)
            metadata = self.metadata or newest.metadata
            return replace(newest, parts=parts, content=content, metadata=metadata)

        if self._rows:
            label = self.label or None
            change_dataset(self.pool, self.name, behind, label=label, putting=self._putting)
        else:
            self._part_writers[0].remove()

    def _putting(self, now: bool) -> None:
        """An unacknowledged put may still become visible."""
        self._state = "unclear" if now else "failed"

    def _shuffled(self, made: DatasetPart) -> DatasetPart:
        """The same samples in another order: all are written again, the first ones go later."""
        writer = PartWriter(self.pool, self.name, self._options, ordered=True, units=self._units)
        self._part_writers.append(writer)
        number = len(self._base.parts) if self._base else self.part[0] if self.part else 0
        order = permutation(made.rows, self._seed or 0, number)
        with StoredData(self.pool, self.name, self._manifest(made, None)) as data:
            copy_in_order(data, order, writer)
        return writer.finish()

    def _manifest(self, made: DatasetPart, shuffle_seed: int | None) -> DatasetManifest:
        return DatasetManifest(
            fields=self.fields,
            layout=self.layout,
            data=self.pool.data,
            compression=self.compression,
            shuffle_seed=shuffle_seed,
            metadata=self.metadata,
            parts=(made,),
            content=made.content,
            part=self.part,
        )

    def abandon(self) -> None:
        """Publish nothing; remove what was stored, as far as that goes now. Idempotent.

        When close() failed in the put of the manifest, that may still become visible (PROTOCOL 8):
        then all objects stay, until remove_orphans finds that nothing names them.
        """
        if self._state in ("closed", "abandoned") or self._pid != os.getpid():
            return
        unclear, self._state = self._state == "unclear", "abandoned"
        if unclear:
            _log.warning(
                "data set %r: it is not clear whether it was published; its objects stay", self.name
            )
            return
        for writer in self._part_writers:
            writer.remove()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self.abandon()
        else:
            self.close()

    def __reduce__(self) -> Any:  # Any: the form that pickling asks for
        raise ConfigError(
            "a DatasetWriter does not move to another process: open one in each with part=(i, n)"
        )


def require_same_fields(name: str, manifest: DatasetManifest, fields: Mapping[str, Field]) -> None:
    """Raise ConfigError unless a dataset has these fields, in this order."""
    if list(manifest.fields.items()) != list(fields.items()):
        raise ConfigError(
            f"data set {name!r} has fields {dict(manifest.fields)}, not {dict(fields)}: nothing "
            "was appended"
        )


def checked_batch(
    fields: Mapping[str, Field], batch: Mapping[str, object], where: str
) -> tuple[dict[str, Array], dict[str, Sequence[Bytes]], int]:
    """Arrays of fixed fields and masks, bytes of ragged ones, and how many rows. ConfigError."""
    batch, masks = take_masks(batch, fields, where)
    check_names(batch, fields, where)
    arrays: dict[str, Array] = {}
    ragged: dict[str, Sequence[Bytes]] = {}
    for name, made in fields.items():
        values = batch[name]
        if isinstance(values, StoredValues):
            if values.fit(made):
                ragged[name] = values.rows
                if made.optional:
                    there = values.there
                    arrays[mask_name(name)] = (
                        np.ones(len(values), np.bool_) if there is None else there
                    )
                continue
            values = [values.value(row) for row in range(len(values))]
        if made.optional:
            values, arrays[mask_name(name)] = filled(made, values, masks.get(name))
        if made.kind is FieldKind.RAGGED:
            ragged[name] = ragged_rows(name, made, values, where)
        else:
            arrays[name] = fixed_rows(name, made, values, where)
    counts = {name: len(values) for name, values in (arrays | ragged).items()}
    if len(set(counts.values())) > 1:
        raise ConfigError(f"{where}: fields have different numbers of rows: {counts}")
    return arrays, ragged, next(iter(counts.values()))


def checked_sample(
    fields: Mapping[str, Field], sample: Mapping[str, object], where: str
) -> tuple[dict[str, Array], dict[str, list[Bytes]]]:
    """A sample as a batch of one: arrays of fixed fields, bytes of ragged ones. ConfigError."""
    check_names(sample, fields, where)
    batch: dict[str, Array] = {}
    ragged: dict[str, list[Bytes]] = {}
    for name, made in fields.items():
        value = sample[name]
        if made.optional:
            batch[mask_name(name)] = np.array([value is not None])
            value = blank(made) if value is None else value
        if made.kind is FieldKind.RAGGED:
            ragged[name] = [ragged_value(name, made, value, where)]
        else:
            batch[name] = fixed_value(name, made, value, where)[None]
    return batch, ragged


def _checked_metadata(metadata: Mapping[str, object] | None) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(json.dumps(dict(metadata or {}), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"metadata of a data set is JSON: {error}") from error
    return found


def _checked_part(part: tuple[int, int] | None) -> tuple[int, int] | None:
    if part is None:
        return None
    if not isinstance(part, tuple | list) or len(part) != 2:
        raise ConfigError(f"part {part!r}: (i, n) with 0 <= i < n")
    number, count = (whole_argument("part", one, least=0) for one in part)
    if number >= count:
        raise ConfigError(f"part {part}: (i, n) with 0 <= i < n")
    return (number, count)
