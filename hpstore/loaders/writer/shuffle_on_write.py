"""Shuffle on write: a second pass over what was stored, in the order of a seeded permutation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from hpstore.codec.galois import Bytes
from hpstore.errors import ConfigError
from hpstore.loaders.dataset.assemble_fields import field_bytes
from hpstore.loaders.dataset.fields import Array, FieldKind
from hpstore.loaders.dataset.record_layout import Int64s
from hpstore.loaders.dataset.record_reader import StoredData
from hpstore.loaders.sampling.random_draws import check_seed
from hpstore.loaders.writer.part_writer import PartWriter
from hpstore.units import MIB

CHUNK_BYTES = 32 * MIB  # of records in memory at a time
CHUNK_ROWS = 1 << 14
More = Callable[[Int64s], tuple[dict[str, Array], dict[str, Sequence[Bytes]]]]


def shuffle_seed(shuffle: object, seed: int) -> int | None:
    """The seed of the order of writing, None for none. Raises ConfigError: "window" and the like
    are for loaders.
    """
    if not isinstance(shuffle, bool):
        raise ConfigError(f"shuffle {shuffle!r} of what is written: give True or False")
    return check_seed(seed) if shuffle else None


def permutation(rows: int, seed: int, part: int) -> Int64s:
    """The order of writing: place i gets the sample that was written as number p[i]."""
    found: Int64s = np.random.default_rng([seed, part]).permutation(rows).astype(np.int64)
    return found


def copy_in_order(
    data: StoredData,
    order: Int64s,
    writer: PartWriter,
    *,
    numbers: Int64s | None = None,
    more: More | None = None,
) -> None:
    """Append the samples of `data` in another order. Each is read once and verified.

    `numbers`: what an ordered writer records for them; their indices unless given. `more` gives the
    values of further fields for some of the samples, in their order.
    """
    done = 0
    for rows in _chunks(data, order):
        batch: dict[str, Array] = {}
        ragged: dict[str, Sequence[Bytes]] = {}
        for name, field in data.stored.items():
            if field.kind is FieldKind.SCALAR:
                batch[name] = data.scalars(name, rows)
        for stream in data.streams:
            records, places = data.read_records(stream, rows)
            for name, values in field_bytes(stream.record, records, places.ragged).items():
                field = data.stored[name]
                if field.kind is FieldKind.RAGGED:
                    ragged[name] = values
                else:
                    raw = np.stack(values).view(field.storage)
                    batch[name] = raw.reshape(len(rows), *field.inner_shape)
        if more is not None:
            fixed, others = more(rows)
            batch, ragged = batch | fixed, ragged | others
        recorded = rows if numbers is None else numbers[done : done + len(rows)]
        writer.append(batch, ragged, len(rows), recorded)
        done += len(rows)


def _chunks(data: StoredData, order: Int64s) -> Iterator[Int64s]:
    """Rows whose records fit in memory together."""
    for at in range(0, len(order), CHUNK_ROWS):
        rows = order[at : at + CHUNK_ROWS]
        size = np.zeros(len(rows), np.int64)
        for stream in data.streams:
            size += data.locate(stream, rows).length
        yield from np.split(rows, np.flatnonzero(np.diff(np.cumsum(size) // CHUNK_BYTES)) + 1)
