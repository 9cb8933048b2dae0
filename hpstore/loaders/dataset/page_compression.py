"""Compression of pages, one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from hpstore.codec.compression import decode, encoder
from hpstore.codec.galois import Bytes
from hpstore.errors import ConfigError, IntegrityError
from hpstore.format.geometry import ALIGNMENT_BYTES
from hpstore.loaders.dataset.coalesce import plan_spans, read_spans
from hpstore.loaders.dataset.open_objects import in_reach
from hpstore.loaders.dataset.record_layout import Int64s
from hpstore.loaders.dataset.record_stream import Locations, PageTable, Stream
from hpstore.objects.read.pooled_reader import PooledReader
from hpstore.objects.read.unit_batch_read import UnitFill
from hpstore.runtime.buffers import aligned_array
from hpstore.units import round_up

CODECS = ("lz4", "zstd", "blosc")
CHUNK_PAGES = 32  # read and decoded at a time


def checked_compression(name: str | None) -> str:
    """A codec's name, "" for none. Raises ConfigError."""
    if not name:
        return ""
    if name not in CODECS:
        raise ConfigError(f"compression {name!r} is not one of {', '.join(CODECS)}")
    return name


def compress_pages(
    codec: str, payload: Bytes, unit_bytes: int, itemsize: int
) -> tuple[Bytes, npt.NDArray[np.uint32]]:
    """Pages compressed and stored back to back at multiples of 4 KiB, and their stored lengths.

    A page that does not get shorter is stored as it is; then the two lengths are equal.
    """
    encode, pages = encoder(codec), list[Bytes]()
    for start in range(0, len(payload), unit_bytes):
        page = payload[start : start + unit_bytes]
        made = encode(page, itemsize)
        pages.append(np.frombuffer(made, np.uint8) if len(made) < len(page) else page)
    total = sum(round_up(len(page), ALIGNMENT_BYTES) for page in pages)
    out, at = aligned_array(total), 0
    for page in pages:
        out[at : at + len(page)] = page
        at += round_up(len(page), ALIGNMENT_BYTES)
    return out, np.array([len(page) for page in pages], np.uint32)


def read_compressed(
    open_shard: Callable[[int], PooledReader], stream: Stream, pages: PageTable, places: Locations
) -> list[Bytes]:
    """Records out of compressed pages, views of one buffer of their own; a page is decoded once."""
    position = _positions(places.length)
    out = np.empty(int(position[-1]), np.uint8)
    shard = places.shard.astype(np.int64)
    end = places.start + places.length
    first = stream.page_starts[shard] + places.start // stream.unit_bytes
    count = np.maximum(end - 1, places.start) // stream.unit_bytes - (
        places.start // stream.unit_bytes
    )
    record = np.repeat(np.arange(len(shard)), count + 1)  # one row for each page of each record
    step = np.arange(len(record)) - np.repeat(np.cumsum(count + 1) - count - 1, count + 1)
    page = first[record] + step
    wanted = np.unique(page)
    order = np.argsort(page, kind="stable")
    bounds = [*np.searchsorted(page[order], wanted, "left").tolist(), len(order)]
    for index, (number, raw) in enumerate(_decoded(open_shard, stream, pages, wanted)):
        low = int(pages.start[number])
        for row in record[order[bounds[index] : bounds[index + 1]]].tolist():
            a, b = max(int(places.start[row]), low), min(int(end[row]), low + len(raw))
            to = int(position[row]) + a - int(places.start[row])
            out[to : to + b - a] = raw[a - low : b - low]
    stops = (position[:-1] + places.length).tolist()
    return [out[a:b] for a, b in zip(position[:-1].tolist(), stops, strict=True)]


def page_pieces(
    open_shard: Callable[[int], PooledReader], stream: Stream, pages: PageTable, place: Locations
) -> Iterator[tuple[int, Bytes]]:
    """One record out of compressed pages, in order: where a piece lies in the shard, and the piece.

    Pieces are good until the next is asked for. Memory: CHUNK_PAGES as they are stored, and one.
    """
    shard, start, length = int(place.shard[0]), int(place.start[0]), int(place.length[0])
    before, unit = int(stream.page_starts[shard]), stream.unit_bytes
    wanted = np.arange(before + start // unit, before + (start + length - 1) // unit + 1)
    for number, raw in _decoded(open_shard, stream, pages, wanted):
        low = int(pages.start[number])
        first, last = max(start, low), min(start + length, low + len(raw))
        yield first, raw[first - low : last - low]


def _decoded(
    open_shard: Callable[[int], PooledReader], stream: Stream, pages: PageTable, numbers: Int64s
) -> Iterator[tuple[int, Bytes]]:
    """Compressed pages in ascending order, and their bytes, good until the next is asked for."""
    scratch = np.empty(stream.unit_bytes, np.uint8)
    for at in range(0, len(numbers), CHUNK_PAGES):
        chunk = numbers[at : at + CHUNK_PAGES]
        for number, stored in zip(
            chunk.tolist(), _read_pages(open_shard, pages, chunk), strict=True
        ):
            raw = scratch[: int(pages.length[number])]
            _decode(stream, pages, number, stored, raw)
            yield number, raw


def read_pages(
    open_shard: Callable[[int], PooledReader],
    stream: Stream,
    pages: PageTable,
    numbers: Int64s,
    target: Callable[[int], Bytes],
    arrived: Callable[[int], None],
) -> None:
    """Read whole pages, ascending numbers, each into target(page); then arrived(page) is called.

    A target may be shorter than the page: then the rest of the page is padding and left out. All by
    the calling thread. Raises TooManyErasures, IntegrityError; what has arrived stays.
    """
    if stream.compression:
        for page, raw in _decoded(open_shard, stream, pages, numbers):
            _fill(target(page), raw, 0)
            arrived(page)
        return
    for shard in np.unique(pages.shard[numbers]).tolist():
        mine = numbers[pages.shard[numbers] == shard]
        _read_raw_pages(open_shard(shard), stream, pages, mine.tolist(), target, arrived)


def fill_pages(
    open_shard: Callable[[int], PooledReader],
    stream: Stream,
    pages: PageTable,
    numbers: Int64s,
    target: Callable[[int], Bytes],
    arrived: Callable[[int], None],
    shards_at_once: int,
) -> Int64s:
    """As read_pages, straight into the targets: they hold a whole unit each, aligned to 4 KiB.

    `shards_at_once`: as StoredData has it. Returns the pages whose reads did not end: somebody may
    still write into their memory, which must not be used again (PROTOCOL 21). They have not
    arrived.
    """
    late = [
        _fill_some(open_shard, stream, pages, numbers[some], target, arrived)
        for some in in_reach(pages.shard[numbers], shards_at_once)
    ]
    return np.concatenate([numbers[:0], *late])


def _fill_some(
    open_shard: Callable[[int], PooledReader],
    stream: Stream,
    pages: PageTable,
    numbers: Int64s,
    target: Callable[[int], Bytes],
    arrived: Callable[[int], None],
) -> Int64s:
    """Pages, at least one, of shards that are all open at once."""
    listed = numbers.tolist()
    fill = UnitFill([target(page) for page in listed], lambda index: arrived(listed[index]))
    for shard in np.unique(pages.shard[numbers]).tolist():
        mine = np.flatnonzero(pages.shard[numbers] == shard)
        reader = open_shard(shard)
        reader.add_to(fill, pages.start[numbers[mine]], mine)
    found = reader.run_fill(fill)
    rest = numbers[~found.good & ~found.late]
    read_pages(open_shard, stream, pages, rest, target, arrived)
    return numbers[found.late]


def _read_raw_pages(
    reader: PooledReader,
    stream: Stream,
    pages: PageTable,
    numbers: list[int],
    target: Callable[[int], Bytes],
    arrived: Callable[[int], None],
) -> None:
    """Pages of one shard; neighbours are read as one range."""
    by_start = {int(pages.start[page]): page for page in numbers}
    left = set(numbers)
    ranges: list[tuple[int, int]] = []
    for page in numbers:
        start = int(pages.start[page])
        end = start + int(pages.length[page])
        if ranges and ranges[-1][1] == start:
            ranges[-1] = (ranges[-1][0], end)
        else:
            ranges.append((start, end))

    def deliver(offset: int, found: Bytes) -> None:
        at = 0
        while at < len(found):
            start = (offset + at) // stream.unit_bytes * stream.unit_bytes
            page, inside = by_start[start], offset + at - start
            piece = found[at : at + stream.unit_bytes - inside]
            if page in left:  # else it is delivered again, from a new place of the object
                _fill(target(page), piece, inside)
                if inside + len(piece) == pages.length[page]:  # pieces come in order
                    left.remove(page)
                    arrived(page)
            at += len(piece)

    reader.read_ranges(ranges, deliver)


def _fill(target: Bytes, piece: Bytes, at: int) -> None:
    count = max(0, min(len(piece), len(target) - at))
    target[at : at + count] = piece[:count]


def _positions(lengths: Int64s) -> Int64s:
    """Where records begin in one buffer, and its length: multiples of 64."""
    return np.concatenate([[0], np.cumsum(-(-lengths // 64) * 64)]).astype(np.int64)


def _read_pages(
    open_shard: Callable[[int], PooledReader], pages: PageTable, numbers: Int64s
) -> list[Bytes]:
    """Stored bytes of pages, ascending."""
    length = pages.stored_length[numbers]
    plan = plan_spans(pages.shard[numbers], pages.stored_start[numbers], length)
    buffer = np.empty(plan.total, np.uint8)
    for shard in np.unique(plan.shard).tolist():
        read_spans(open_shard(shard), plan, shard, buffer)
    return [
        buffer[at : at + count]
        for at, count in zip(plan.position.tolist(), length.tolist(), strict=True)
    ]


def _decode(stream: Stream, pages: PageTable, number: int, stored: Bytes, out: Bytes) -> None:
    try:
        with stream.decoding.running():
            decode(stream.compression, stored, out)
    except IntegrityError as error:
        raise IntegrityError(
            f"page {number} of stream {stream.name!r} (samples {pages.first_sample[number]}...): "
            f"{error}, although the pool's own checksums hold. Nothing was changed."
        ) from error
