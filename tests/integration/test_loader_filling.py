"""In which order pages come into memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import hpstore
from hpstore.loaders import Dataset, DatasetWriter, Field
from hpstore.loaders.filling import everything_in_windows
from hpstore.loaders.slab import NEVER, Slab
from hpstore.loaders.windows import WindowOrder
from hpstore.units import KIB, MIB

COUNT = 4000


def test_a_window_shuffle_fills_memory_in_its_own_order_and_all_of_it(tmp_path: Path) -> None:
    """From a position: first the pages of the windows to come, then what is left; none goes."""
    paths = [tmp_path / f"d{i}" for i in range(4)]
    with hpstore.create(paths, data=2, parity=1, config=tmp_path / "pool.toml") as pool:
        with DatasetWriter(
            pool, "a", {"x": Field("uint8", (4096,))}, shard_bytes=4 * MIB, unit_bytes=256 * KIB
        ) as writer:
            writer.write_batch({"x": np.zeros((COUNT, 4096), np.uint8)})
        data = Dataset(pool, "a")
        order = WindowOrder(data.stripes(), 0, window_stripes=4)
        (stream,) = data.streams
        slab = Slab(data, stream, int(stream.page_starts[-1]))
        start = order.window_of(3, COUNT // 2)
        fills = list(everything_in_windows(data, order, {0: slab}, 3, start.start))
        assert all(fill.expire == NEVER for fill in fills)
        rest = order.indices(3, start.start, COUNT)
        wanted = data.locate(stream, rest).page
        filled: list[int] = []
        for fill in fills:
            filled += [int(page) for page in fill.pages[0]]
        first = list(dict.fromkeys(filled))
        assert set(first) == set(range(len(slab.pages.start)))
        assert set(first[: len(set(wanted))]) == set(wanted.tolist())
        window = order.indices(3, start.start, start.stop)
        own = set(data.locate(stream, window).page.tolist())
        assert set(first[: len(own)]) == own
        slab.close()
        data.close()
