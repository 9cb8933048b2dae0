"""Tables of one dataset beside its records: side objects, columns, pages, read and checked."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from hpstore.codec.galois import Bytes
from hpstore.errors import ObjectNotFound
from hpstore.loaders.dataset.block_table import BLOCK_ROWS, BlockTable, Runs
from hpstore.loaders.dataset.coalesce import ObjectRanges, read_object_ranges
from hpstore.loaders.dataset.dataset_manifest import DatasetManifest, column_key, side_key
from hpstore.loaders.dataset.fields import Field
from hpstore.loaders.dataset.index_tables import (
    SIDE_MAGIC,
    Table,
    check_hash,
    check_header,
    decode_tables,
    side_dtypes,
    side_ranges,
    table_starts,
)
from hpstore.loaders.dataset.record_stream import Stream
from hpstore.objects.read.open_many import MOST_KEYS
from hpstore.pool.pool import Pool


class IndexObjects:
    """Objects of one dataset that hold tables. Thread-safe.

    All calls raise ObjectNotFound when the dataset was replaced or deleted, IntegrityError for
    damage that the pool cannot see, and what the pool raises.
    """

    def __init__(self, pool: Pool, name: str, manifest: DatasetManifest) -> None:
        self._pool, self._name, self._manifest = pool, name, manifest
        self._cuts = [
            (part, number, rows) for part in manifest.parts for number, rows in enumerate(part.cuts)
        ]

    def side_table(self, stream: Stream) -> BlockTable:
        """What lies beside the records of a stream, read as it is asked for."""
        dtypes = side_dtypes(stream.record)
        load = partial(self._load_sides, stream, dtypes)
        return BlockTable(stream.rows.tolist(), [(d, ()) for d in dtypes], load)

    def _load_sides(
        self, stream: Stream, dtypes: list[np.dtype[Any]], wanted: dict[int, Runs]
    ) -> list[list[list[Table]]]:
        """Rows of side objects. One that is a single block is checked against the manifest."""
        pieces = []
        for shard, runs in wanted.items():
            count = int(stream.rows[shard])
            size = table_starts(dtypes, count)[-1]
            bounds = [(0, size)] if count <= BLOCK_ROWS else side_ranges(dtypes, count, runs)
            pieces.append(ObjectRanges(self._side_key(stream, shard), bounds, size))
        made = []
        for (shard, runs), piece, found in zip(
            wanted.items(), pieces, self.get_pieces(pieces), strict=True
        ):
            if stream.rows[shard] <= BLOCK_ROWS:
                made.append([self._side_of(stream, shard, found[0].tobytes())])
                continue
            head, *values = found
            where = f"object {piece.key!r}"
            check_header(SIDE_MAGIC, head.tobytes(), len(dtypes), where=where)
            rows = iter(values)
            made.append([[np.frombuffer(next(rows), d) for d in dtypes] for _ in runs])
        return made

    def side_of(self, stream: Stream, shard: int) -> list[Table]:
        """All of a side object, checked against the manifest: see side_dtypes."""
        return self._side_of(stream, shard, self.get(self._side_key(stream, shard)))

    def _side_key(self, stream: Stream, shard: int) -> str:
        return side_key(self._name, stream.nonces[shard], stream.number, stream.numbers[shard])

    def _side_of(self, stream: Stream, shard: int, data: bytes) -> list[Table]:
        key, dtypes = self._side_key(stream, shard), side_dtypes(stream.record)
        check_hash(key, data, stream.side_hashes[shard])
        rows = int(stream.rows[shard])
        return decode_tables(SIDE_MAGIC, data, dtypes, rows, where=f"object {key!r}")

    def column_table(self, made: Field, column: str) -> BlockTable:
        """The values of a field of fixed size, read as they are asked for."""
        shape = made.inner_shape

        def load(wanted: dict[int, Runs]) -> list[list[list[Table]]]:
            pieces = []
            for cut, runs in wanted.items():
                part, number, rows = self._cuts[cut]
                ranges = [(a * made.row_bytes, (a + n) * made.row_bytes) for a, n in runs]
                key = column_key(self._name, part.column_nonce(column), column, number)
                pieces.append(ObjectRanges(key, ranges, rows * made.row_bytes))
            return [
                [[np.frombuffer(raw, made.storage).reshape(-1, *shape)] for raw in found]
                for found in self.get_pieces(pieces)
            ]

        return BlockTable([rows for _, _, rows in self._cuts], [(made.storage, shape)], load)

    def get(self, key: str) -> bytes:
        """A whole object."""
        try:
            return self._pool.get(key)
        except ObjectNotFound as error:
            raise self.gone(key) from error

    def get_pieces(self, pieces: Sequence[ObjectRanges]) -> list[list[Bytes]]:
        """Byte ranges of several objects, so many at a time as are opened together."""
        found = []
        for first in range(0, len(pieces), MOST_KEYS):
            found += self._get_some(pieces[first : first + MOST_KEYS])
        return found

    def _get_some(self, pieces: Sequence[ObjectRanges]) -> list[list[Bytes]]:
        readers = self._pool.open_many([piece.key for piece in pieces], preload=True)
        try:
            return [read_object_ranges(piece, readers[piece.key]) for piece in pieces]
        except ObjectNotFound as error:
            raise self.gone(error.key or pieces[0].key) from error
        finally:
            for reader in readers.values():
                if not isinstance(reader, Exception):
                    reader.close()

    def gone(self, key: str) -> ObjectNotFound:
        """The error for an object that is not there."""
        known = self._manifest.fingerprint
        return ObjectNotFound(
            f"object {key!r} of data set {self._name!r} is not there: the data set was replaced or "
            f"deleted since it was opened (fingerprint {known}). Open it again.",
            key=key,
        )
