"""Records of several shards straight from the devices into their rows, so many shards at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from hpstore.codec.galois import Bytes
from hpstore.loaders.dataset.large_records import part_bounds
from hpstore.loaders.dataset.open_objects import in_reach
from hpstore.loaders.dataset.piecewise_read import LARGE_BYTES
from hpstore.loaders.dataset.record_layout import Int64s
from hpstore.loaders.dataset.record_stream import Locations
from hpstore.loaders.dataset.table_checks import matches
from hpstore.objects.read.pooled_reader import PooledReader
from hpstore.objects.read.record_batch_read import Scatter, Scattered


def parts_in_reach(places: Locations, most: int) -> Iterator[Int64s]:
    """Numbers of the records that are read at once: of PART_BYTES and of `most` shards. Those that
    are read piece by piece are left out."""
    for first, last in part_bounds(places.length):
        if places.length[first] <= LARGE_BYTES:  # else a part by itself
            for some in in_reach(places.shard[first:last], most):
                yield first + some


def scatter_rows(
    open_shard: Callable[[int], PooledReader],
    places: Locations,
    part: Int64s,
    rows: Sequence[Bytes],
    addresses: Int64s | None,
    room: Sequence[Bytes] | None,
) -> Scattered:
    """Read records number `part`, at least one, in reach; arguments as StoredData.read_rows."""
    listed = part.tolist()
    scatter = Scatter(
        [rows[number] for number in listed],
        partial(matches, places.checksum[part].tolist()),
        None if addresses is None else addresses[part],
        None if room is None else [room[number] for number in listed],
    )
    shards = places.shard[part]
    for shard in np.unique(shards).tolist():
        mine = np.flatnonzero(shards == shard)
        reader = open_shard(shard)
        reader.add_to(scatter, places.start[part[mine]], mine)
    return reader.run_scatter(scatter)
