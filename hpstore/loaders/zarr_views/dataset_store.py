"""A dataset as zarr sees it: a group with an array for each field of fixed size. Read-only.

The arrays are made up as they are read: samples of any layout, page size, compression and number of
parts become dense chunks of one shape, each row checked against its checksum on the way.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt
from zarr.abc.store import ByteRequest
from zarr.core.buffer import Buffer

from hpstore.codec.galois import Bytes
from hpstore.errors import ConfigError, ObjectNotFound, VersionConflict
from hpstore.interop.parallel_calls import Span
from hpstore.interop.zarr.base_store import BlockingStore, byte_span
from hpstore.loaders.dataset.dataset import Dataset, reopen_dataset
from hpstore.loaders.dataset.dataset_manifest import PREFIX
from hpstore.loaders.dataset.fields import Field, FieldKind, mask_name
from hpstore.loaders.dataset.record_layout import Int64s
from hpstore.loaders.dataset.shard_layout import CRC_BYTES, INDEX_ENTRY_BYTES
from hpstore.loaders.dataset.zarr_attributes import DTYPE, MASK
from hpstore.pool.pool import Pool
from hpstore.units import MIB, div_ceil

SHARD_ROWS = 4096  # rows of a chunk at most: zarr reads its index, 64 KiB then, for each access
SHARD_BYTES = 8 * MIB  # and about so many bytes
SCALAR_ROWS = 65_536  # rows of a chunk of scalars, at most 4 MiB
BATCH_BYTES = 64 * MIB  # records held at a time, as one may be far larger than the field
_DOCUMENT = "zarr.json"
_ABSENT = np.iinfo(np.uint64).max  # in an index: there is no such chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayView:
    """One field as a zarr v3 array. Pure arithmetic.

    Fixed fields: shards of `chunk_rows` samples, each an inner chunk of its own, so that one is
    read alone. Scalars: plain chunks. Rows after the last are absent, or zero.
    """

    name: str
    field: Field
    rows: int
    mask: str = ""  # name of the array that says where there is a value; "": there always is one

    @property
    def sharded(self) -> bool:
        return self.field.kind is FieldKind.FIXED

    @property
    def chunk_rows(self) -> int:
        """Samples of a chunk."""
        most = min(SHARD_ROWS, SHARD_BYTES // self.field.row_bytes) if self.sharded else SCALAR_ROWS
        return max(1, min(most, self.rows))

    @property
    def chunks(self) -> int:
        """How many there are."""
        return div_ceil(self.rows, self.chunk_rows)

    def rows_of(self, chunk: int) -> Span:
        """Samples of a chunk that exist."""
        return chunk * self.chunk_rows, min(self.rows, (chunk + 1) * self.chunk_rows)

    def key(self, chunk: int) -> str:
        """Key of a chunk below the array."""
        return "/".join(["c", str(chunk), *["0"] * len(self.field.inner_shape)])

    def payload_bytes(self, chunk: int) -> int:
        """Where rows end in a chunk."""
        first, last = self.rows_of(chunk)
        return (last - first) * self.field.row_bytes

    def size(self, chunk: int) -> int:
        """Bytes of a chunk."""
        if self.sharded:
            return self.payload_bytes(chunk) + self.chunk_rows * INDEX_ENTRY_BYTES + CRC_BYTES
        return self.chunk_rows * self.field.row_bytes

    def tail(self, chunk: int) -> bytes:
        """What follows the rows: the index of a shard, or zeros for rows that do not exist."""
        if not self.sharded:
            return bytes(self.size(chunk) - self.payload_bytes(chunk))
        first, last = self.rows_of(chunk)
        table = np.full((self.chunk_rows, 2), _ABSENT, "<u8")
        table[: last - first, 0] = np.arange(last - first) * self.field.row_bytes
        table[: last - first, 1] = self.field.row_bytes
        raw = table.tobytes()
        return raw + int(google_crc32c.value(raw)).to_bytes(CRC_BYTES, "little")

    def document(self) -> bytes:
        """zarr.json. What zarr 3 does not know are attributes: bfloat16, which is uint16, and where
        an optional field has its mask."""
        shape = self.field.inner_shape
        kind = self.field.storage.kind
        codecs: list[Any] = [{"name": "bytes", "configuration": {"endian": "little"}}]
        if self.sharded:
            inner = {
                "chunk_shape": [1, *shape],
                "codecs": codecs,
                "index_codecs": [*codecs, {"name": "crc32c"}],
                "index_location": "end",
            }
            codecs = [{"name": "sharding_indexed", "configuration": inner}]
        fills: Mapping[str, object] = {"b": False, "f": 0.0, "c": [0.0, 0.0]}
        return _json(
            {
                "zarr_format": 3,
                "node_type": "array",
                "shape": [self.rows, *shape],
                "data_type": self.field.storage.name,
                "chunk_grid": {
                    "name": "regular",
                    "configuration": {"chunk_shape": [self.chunk_rows, *shape]},
                },
                "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
                "fill_value": fills.get(kind, 0),
                "codecs": codecs,
                "attributes": {
                    DTYPE: self.field.dtype,
                    **({MASK: self.mask} if self.mask else {}),
                },
            }
        )


def _json(document: object) -> bytes:
    return json.dumps(document).encode()


class DatasetStore(BlockingStore):
    """What `zarr.open` reads a published dataset from: a group, an array for each field.

    Fields of fixed size only; ragged ones have no zarr form and are left out. Read-only.
    Thread-safe. The dataset is opened at the first use, and errors of opening it are raised there.
    A dataset that is replaced or deleted meanwhile raises VersionConflict; a record that does not
    match its checksum IntegrityError.

    Parameters
    ----------
    pool
        An open pool, which stays the caller's; or a pool's name, or the path of its pool.toml: then
        the pool is opened on first use, shared by the process, and closed at its end.
    name
        Name of the dataset.
    read_only
        It must be True.
    fingerprint
        The one that the dataset must have, else the first use raises ConfigError. Default: any.

    Raises
    ------
    ConfigError
        `read_only` is False, or there is no such pool.
    """

    supports_writes = False
    supports_deletes = False

    def __init__(
        self,
        pool: Pool | str | os.PathLike[str],
        name: str,
        *,
        read_only: bool = True,
        fingerprint: str | None = None,
    ) -> None:
        if not read_only:
            raise ConfigError(f"data set {name!r} is written by DatasetWriter, not through zarr")
        super().__init__(pool, name, read_only=True)
        self.name, self._fingerprint = name, fingerprint
        self._opened: dict[str, tuple[Dataset, dict[str, ArrayView]]] = {}

    def with_read_only(self, read_only: bool = False) -> DatasetStore:
        """The same dataset; never writable (ConfigError)."""
        if not read_only:
            raise ConfigError(f"{self} is read-only: data sets are written by DatasetWriter")
        return DatasetStore(self._own or self._config.path, self.name, fingerprint=self.fingerprint)

    @property
    def fingerprint(self) -> str:
        """Of the dataset, which is opened for it."""
        return self._view()[0].fingerprint

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (str(self._config.path), self.name, self.fingerprint)

    def __str__(self) -> str:
        return f"hpstore://{self._config.name}/{PREFIX}/{self.name}"

    def close(self) -> None:
        """Close the dataset; the next use opens it again."""
        super().close()
        for dataset, _ in [self._opened.pop(key) for key in list(self._opened)]:
            dataset.close()

    def _connect(self) -> None:
        self._view()

    def _view(self) -> tuple[Dataset, dict[str, ArrayView]]:
        """The dataset, opened by the first who asks, and its arrays."""
        found = self._opened.get("it")
        if found is not None:
            return found
        if self._fingerprint is None:
            dataset = Dataset(self._pool(), self.name)
        else:
            dataset = reopen_dataset(self._pool(), self.name, None, self._fingerprint)
        arrays = {
            name: ArrayView(
                name=name,
                field=made,
                rows=len(dataset),
                mask=mask_name(name) if made.optional else "",
            )
            for name, made in dataset.stored.items()
            if not made.is_ragged
        }
        self._fingerprint = dataset.fingerprint
        return self._opened.setdefault("it", (dataset, arrays))  # atomic: one wins

    def has(self, key: str) -> bool:
        """Whether a key is of the group itself or of one of its arrays. May block.

        Parameters
        ----------
        key
            Key below the dataset, there or not.

        Returns
        -------
        bool
            False for a key in a folder that is not an array's.

        Raises
        ------
        ObjectNotFound, ConfigError
            The dataset is not there, or has another fingerprint.
        """
        name, below, _ = key.partition("/")
        return not below or name in self._view()[1]

    def _document(self, key: str) -> bytes | None:
        """The zarr.json that a key names."""
        dataset, arrays = self._view()
        name, _, rest = key.partition("/")
        if key == _DOCUMENT:
            facts = {"name": self.name, "fingerprint": dataset.fingerprint}
            attributes = {"hpstore": {**facts, "metadata": dict(dataset.metadata)}}
            return _json({"zarr_format": 3, "node_type": "group", "attributes": attributes})
        return arrays[name].document() if rest == _DOCUMENT and name in arrays else None

    def _chunk(self, key: str) -> tuple[ArrayView, int] | None:
        """The array and the chunk that a key names."""
        name, _, rest = key.partition("/")
        view = self._view()[1].get(name)
        match = re.fullmatch(r"c/(0|[1-9][0-9]{0,18})(/0)*", rest)
        if view is None or match is None:
            return None
        chunk = int(match[1])
        return (view, chunk) if chunk < view.chunks and view.key(chunk) == rest else None

    def _keys(self, prefix: str) -> list[str]:
        _, arrays = self._view()
        keys = [_DOCUMENT]
        for name, view in arrays.items():
            if f"{name}/".startswith(prefix) or prefix.startswith(f"{name}/"):
                keys.append(f"{name}/{_DOCUMENT}")
                keys += [f"{name}/{view.key(chunk)}" for chunk in range(view.chunks)]
        return sorted(key for key in keys if key.startswith(prefix))

    def _size(self, key: str) -> int | None:
        document, found = self._document(key), self._chunk(key)
        if document is not None:
            return len(document)
        return None if found is None else found[0].size(found[1])

    def _read(self, key: str, requests: Sequence[ByteRequest | None]) -> list[Bytes] | None:
        document, found = self._document(key), self._chunk(key)
        if document is not None:
            raw = np.frombuffer(document, np.uint8)
            return [raw[slice(*byte_span(request, len(raw)))] for request in requests]
        if found is None:
            return None
        view, chunk = found
        spans = [byte_span(request, view.size(chunk)) for request in requests]
        try:
            return _read_chunk(self._view()[0], view, chunk, spans)
        except ObjectNotFound as error:
            # zarr would take a FileNotFoundError for a chunk of fill values
            raise VersionConflict(str(error), key=error.key) from error

    async def set(self, key: str, value: Buffer) -> None:
        """Always ValueError."""
        self._check_writable()

    async def delete(self, key: str) -> None:
        """Always ValueError."""
        self._check_writable()


def _read_chunk(
    dataset: Dataset, view: ArrayView, chunk: int, spans: Sequence[Span]
) -> list[Bytes]:
    """Spans of one made-up chunk; the rows of all of them are read at once."""
    end, width = view.payload_bytes(chunk), view.field.row_bytes
    bounds = [(low // width, div_ceil(min(high, end), width)) for low, high in spans]
    wanted = [np.arange(first, last, dtype=np.int64) for first, last in bounds]
    rows = np.unique(np.concatenate([np.empty(0, np.int64), *wanted]))
    values = _read_rows(dataset, view, rows + view.rows_of(chunk)[0])
    tail = view.tail(chunk) if any(high > end for _, high in spans) else b""
    results = []
    for (low, high), (first, last) in zip(spans, bounds, strict=True):
        out = np.empty(high - low, np.uint8)
        stop = max(low, min(high, end))
        if low < stop:
            at = int(np.searchsorted(rows, first))
            part = values[at : at + last - first].reshape(-1)
            out[: stop - low] = part[low - first * width : stop - first * width]
        out[stop - low :] = np.frombuffer(tail[stop - end : high - end], np.uint8)
        results.append(out)
    return results


def _read_rows(dataset: Dataset, view: ArrayView, rows: Int64s) -> npt.NDArray[np.uint8]:
    """Values of samples, (n, row bytes); verified."""
    width = view.field.row_bytes
    if not view.sharded:
        return dataset.scalars(view.name, rows).reshape(-1).view(np.uint8).reshape(-1, width)
    stream = next(s for s in dataset.streams if view.name in s.record.fields)
    offset = stream.record.offsets[view.name]
    ends = np.cumsum(dataset.locate(stream, rows).length)
    out = np.empty((len(rows), width), np.uint8)
    done = 0
    while done < len(rows):
        before = int(ends[done - 1]) if done else 0
        stop = max(done + 1, int(np.searchsorted(ends, before + BATCH_BYTES, "right")))
        records, _ = dataset.read_records(stream, rows[done:stop])
        for row, record in enumerate(records, done):
            out[row] = record[offset : offset + width]
        done = stop
    return out


def _reopen(path: str, name: str, fingerprint: str) -> DatasetStore:
    return DatasetStore(path, name, fingerprint=fingerprint)
