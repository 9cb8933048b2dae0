"""Write a data set: samples into shards, visible all at once when the writer closes."""

from __future__ import annotations

import json
import logging
import os
import secrets
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from hpstore.closing import Closing
from hpstore.codec.galois import Bytes
from hpstore.errors import ConfigError, HpstoreError, ObjectNotFound, VersionConflict
from hpstore.geometry import check_unit_bytes
from hpstore.loaders.fields import (
    Array,
    Field,
    FieldKind,
    check_fields,
    check_names,
    fixed_rows,
    fixed_value,
    ragged_rows,
    ragged_value,
)
from hpstore.loaders.layout import SHARD_BYTES, UNIT_BYTES, group_fields
from hpstore.loaders.manifest import (
    Content,
    DatasetManifest,
    Part,
    check_dataset_name,
    column_names,
    manifest_key,
    object_prefix,
    part_key,
)
from hpstore.loaders.pages import checked_compression
from hpstore.loaders.streams import ColumnWriter, StreamWriter, cuts_of
from hpstore.loaders.uploads import Uploads
from hpstore.pool import Pool

_log = logging.getLogger(__name__)


class DatasetWriter(Closing):
    """Writes one data set, or one part of it. Use it as a context manager; one thread at a time.

    close() publishes: before it nothing is visible, after it everything is, and durable. An
    exception in the block, or abandon(), publishes nothing and removes what was stored; what a
    killed process leaves is invisible and removed by `remove_orphans`. Memory: two shard buffers
    a stream.

    `layout`: "rows" (large fields of a sample together), "columns" (each by itself) or "auto".
    `shard_bytes`: payload of an object. `unit_bytes`: page, chosen from the records unless given.
    `compression`: "lz4", "zstd" or "blosc", page by page. `part`: (i, n) for n writers of one data
    set, published by `publish_parts`. `overwrite`: replace a published one. `metadata`: JSON.
    For parts that end with detach(): `nonce` names their objects, pages are those of `like`.

    Raises ConfigError, VersionConflict when the name is taken.
    """

    def __init__(
        self,
        pool: Pool,
        name: str,
        fields: Mapping[str, Field],
        *,
        layout: str = "auto",
        shard_bytes: int = SHARD_BYTES,
        unit_bytes: int | None = None,
        compression: str | None = None,
        shuffle: bool = False,
        seed: int = 0,
        part: tuple[int, int] | None = None,
        overwrite: bool = False,
        metadata: Mapping[str, object] | None = None,
        nonce: str | None = None,
        like: Part | None = None,
    ) -> None:
        self.pool, self.name = pool, check_dataset_name(name)
        self.fields = check_fields(fields)
        self.layout, records = group_fields(self.fields, layout)
        self.part, self.overwrite = _checked_part(part), overwrite
        self.metadata = json.loads(json.dumps(dict(metadata or {})))
        self.compression = checked_compression(compression)
        if unit_bytes is not None:
            check_unit_bytes(unit_bytes)
        elif part is not None and any(record.ragged for record in records.values()):
            unit_bytes = UNIT_BYTES  # all parts must choose alike
        self.replaces = self._published_version()  # version of the manifest that is there
        self.nonce = nonce or secrets.token_hex(8)
        units = [stream.unit_bytes for stream in like.streams] if like else None
        self._uploads, self._content = Uploads(), Content()
        limit = pool.config.settings.memory_bytes // (2 * (pool.data + pool.parity))
        self._streams = {
            stream: StreamWriter(
                pool, (name, self.nonce, number), stream, record,
                unit_bytes=units[number] if units else unit_bytes, unit_limit=limit,
                shard_bytes=shard_bytes, compression=self.compression, uploads=self._uploads,
                content=self._content,
            )
            for number, (stream, record) in enumerate(records.items())
        }  # fmt: skip
        scalars = [n for n, f in self.fields.items() if f.kind is FieldKind.SCALAR]
        self._columns = {
            field: ColumnWriter(
                pool, (name, self.nonce, column), field, self.fields[field],
                uploads=self._uploads, content=self._content,
            )
            for field, column in column_names(list(self.fields), scalars).items()
        }  # fmt: skip
        self._rows, self._state, self._pid = 0, "open", os.getpid()

    def __len__(self) -> int:
        return self._rows

    def write(self, sample: Mapping[str, object]) -> int:
        """Append one sample; returns its index. Values are copied before the return.

        Raises ConfigError naming the field when dtype, shape or the fields are wrong; nothing was
        written then and the writer goes on.
        """
        self._usable()
        where = f"sample {self._rows}"
        check_names(sample, self.fields, where)
        batch: dict[str, Array] = {}
        ragged: dict[str, list[Bytes]] = {}
        for name, made in self.fields.items():
            if made.kind is FieldKind.RAGGED:
                ragged[name] = [ragged_value(name, made, sample[name], where)]
            else:
                batch[name] = fixed_value(name, made, sample[name], where)[None]
        self._append(batch, ragged, 1)
        return self._rows - 1

    def write_batch(self, batch: Mapping[str, object]) -> range:
        """Append samples; returns their indices. Values are copied before the return.

        Fixed fields: arrays (n, *shape), or lists of n values; ragged fields: lists of n values.
        Raises ConfigError as write().
        """
        self._usable()
        where = f"batch at sample {self._rows}"
        check_names(batch, self.fields, where)
        arrays: dict[str, Array] = {}
        ragged: dict[str, list[Bytes]] = {}
        for name, made in self.fields.items():
            if made.kind is FieldKind.RAGGED:
                ragged[name] = ragged_rows(name, made, batch[name], where)
            else:
                arrays[name] = fixed_rows(name, made, batch[name], where)
        counts = {name: len(values) for name, values in (arrays | ragged).items()}
        if len(set(counts.values())) > 1:
            raise ConfigError(f"{where}: fields have different numbers of rows: {counts}")
        first = self._rows
        self._append(arrays, ragged, next(iter(counts.values())))
        return range(first, self._rows)

    def _append(
        self, batch: Mapping[str, Array], ragged: Mapping[str, list[Bytes]], rows: int
    ) -> None:
        if not rows:
            return
        self._state = "failed"  # unless all of it gets in: streams must not differ in rows
        for stream in self._streams.values():
            stream.add(batch, ragged)
        for name, column in self._columns.items():
            column.add(batch[name])
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

    def _published_version(self) -> str | None:
        """Version of the manifest that is there. Raises VersionConflict unless it may go."""
        try:
            version = self.pool.stat(manifest_key(self.name)).version
        except ObjectNotFound:
            return None
        if not self.overwrite:
            raise VersionConflict(
                f"data set {self.name!r} exists; it is unchanged. overwrite=True replaces it."
            )
        return version

    def close(self) -> None:
        """Store the rest and publish. Durable on return; idempotent.

        Raises VersionConflict when somebody else published the name meanwhile: theirs is unchanged.
        """
        if self._state in ("closed", "abandoned", "detached"):
            return
        try:
            self._usable()
            self._publish(self._finish())
        except BaseException:
            self.abandon()
            raise
        self._state = "closed"

    def detach(self) -> Part:
        """Store the rest and publish nothing: the caller keeps the record, and who has it has the
        objects. Durable on return; the writer is done. An error leaves the objects to abandon().
        """
        self._usable()
        part = self._finish()
        self._state = "detached"
        return part

    def _finish(self) -> Part:
        """Everything but the manifest."""
        self._state = "failed"
        for column in self._columns.values():
            column.finish()
        streams = tuple(stream.finish() for stream in self._streams.values())
        self._uploads.settle()
        self._uploads.close()
        names = column_names(list(self.fields), list(self._columns))
        return Part(
            nonce=self.nonce,
            rows=self._rows,
            streams=streams,
            cuts=cuts_of(self._rows),
            columns={names[n]: tuple(c.hashes) for n, c in self._columns.items()},
            content=self._content.hexdigest(),
        )

    def _publish(self, part: Part) -> None:
        manifest = DatasetManifest(
            fields=self.fields,
            layout=self.layout,
            data=self.pool.data,
            compression=self.compression,
            shuffle_seed=None,
            metadata=self.metadata,
            parts=(part,),
            content=part.content,
            part=self.part,
            created_ms=time.time_ns() // 1_000_000,
        )
        if self.part is not None:
            self.pool.put(part_key(self.name, self.part), manifest.encode())
            return
        self.pool.put(
            manifest_key(self.name),
            manifest.encode(),
            if_absent=self.replaces is None,
            if_version=self.replaces,
        )

    def abandon(self) -> None:
        """Publish nothing; remove what was stored, as far as that goes now. Idempotent."""
        if self._state in ("closed", "abandoned", "detached") or self._pid != os.getpid():
            return
        self._state = "abandoned"
        self._uploads.close()  # its error is why we are here, or nobody asked
        prefix = object_prefix(self.name, self.nonce)
        try:
            for key in self.pool.list(prefix + "/"):
                self.pool.delete(key)
        except (HpstoreError, OSError) as error:
            _log.warning(
                "data set %r was not published; objects under %r stay until remove_orphans: %s",
                self.name, prefix, error,
            )  # fmt: skip

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


def _checked_part(part: tuple[int, int] | None) -> tuple[int, int] | None:
    if part is None:
        return None
    number, count = part
    if not 0 <= number < count:
        raise ConfigError(f"part {part}: (i, n) with 0 <= i < n")
    return (int(number), int(count))


__all__ = ["DatasetWriter"]
