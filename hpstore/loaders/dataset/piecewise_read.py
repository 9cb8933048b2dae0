"""Records that are too large to be read at once: piece by piece, into where they are wanted.

Read as a whole, a record of 2 GiB would take that much once more beside the batch, once more where
devices are lost, and all of the pool's memory, for which the reads themselves then wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import xxhash

from hpstore.codec.galois import Bytes
from hpstore.loaders.dataset.page_compression import page_pieces
from hpstore.loaders.dataset.record_stream import Locations, PageTable, Stream
from hpstore.objects.read.pooled_reader import PooledReader
from hpstore.units import MIB

LARGE_BYTES = 64 * MIB  # of a record that is read piece by piece; the largest read at once is less

Target = tuple[int, Bytes]  # bytes of the record from its byte `first` on, and where they go


def read_large(
    open_shard: Callable[[int], PooledReader],
    stream: Stream,
    pages: Callable[[], PageTable],
    place: Locations,
    targets: Sequence[Target],
) -> bool:
    """Read one record, of a single `place`, into `targets`; whether it matches its checksum.

    Memory: the pool's windows, or a page. Raises what reading raises.
    """
    shard, start, length = int(place.shard[0]), int(place.start[0]), int(place.length[0])
    digest, at = xxhash.xxh3_64(), 0

    def deliver(offset: int, piece: Bytes) -> None:
        nonlocal digest, at
        if offset == start:  # also from the first again, where the object was replaced meanwhile
            digest, at = xxhash.xxh3_64(), 0
        digest.update(piece.data)
        for first, target in targets:
            low, high = max(first, at), min(first + len(target), at + len(piece))
            if low < high:
                target[low - first : high - first] = piece[low - at : high - at]
        at += len(piece)

    if stream.compression:
        for offset, piece in page_pieces(open_shard, stream, pages(), place):
            deliver(offset, piece)
    else:
        open_shard(shard).read_ranges([(start, start + length)], deliver)
    return int(digest.intdigest()) == int(place.checksum[0])
