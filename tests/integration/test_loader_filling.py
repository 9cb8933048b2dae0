"""In which order pages come into memory."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

import hpstore
from hpstore.codec.galois import Bytes
from hpstore.loaders import DataLoader, Dataset, DatasetWriter, Field
from hpstore.loaders.batching import page_memory as slab_module
from hpstore.loaders.batching.page_memory import NEVER, PageMemory, Places
from hpstore.loaders.batching.page_prefetch import PagePrefetcher, everything, everything_in_windows
from hpstore.loaders.sampling.window_shuffle import WindowOrder
from hpstore.runtime import buffers
from hpstore.units import KIB, MIB
from tests.fault.common import Bench, Call, poll
from tests.integration.loader_cases import MODES, PLAIN, value_of, write

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
        slab = PageMemory(data, stream, int(stream.page_starts[-1]))
        start = order.window_of(3, COUNT // 2)
        fills = list(everything_in_windows(data, order, {0: slab}, 3, start.start, batch_rows=1))
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


def test_rows_are_known_once_all_pages_are_there_to_stay(tmp_path: Path) -> None:
    """Three shards, pages with padding and a short last one, filled in another order: the rows are
    those of the records. Unknown before, for pages that may go, and for samples out of range.
    """
    paths = [tmp_path / f"d{i}" for i in range(4)]
    made = np.random.default_rng(0).integers(0, 256, (2100, 3000), np.uint8)
    with hpstore.create(paths, data=2, parity=1, config=tmp_path / "pool.toml") as pool:
        with DatasetWriter(
            pool, "a", {"x": Field("uint8", (3000,))}, shard_bytes=2 * MIB, unit_bytes=256 * KIB
        ) as writer:
            writer.write_batch({"x": made})
        data = Dataset(pool, "a")
        (stream,) = data.streams
        count = int(stream.page_starts[-1])
        assert len(stream.rows) > 2
        assert 0 < stream.rows[-1] < stream.rows[0]
        indices = np.random.default_rng(1).permutation(len(made))
        slab, leaving = PageMemory(data, stream, count), PageMemory(data, stream, count)
        (fill,) = everything({0: slab})
        pages = np.random.default_rng(2).permutation(fill.pages[0])
        for part in np.array_split(pages, 3):
            assert slab.rows_of(indices) is None
            slab.read(slab.reserve(part) or {})
            leaving.read(leaving.reserve(part, 7) or {})
        rows = slab.rows_of(indices)
        assert rows is not None
        out = np.empty((len(indices), slab.stride), np.uint8)
        slab.gather_rows(rows, out)
        assert np.array_equal(out[:, :3000], made[indices])
        assert leaving.rows_of(indices) is None
        assert slab.rows_of(np.array([0, len(made)])) is None
        assert slab.rows_of(np.array([-1])) is None
        assert slab.rows_of(np.empty(0, np.int64)) is not None
        data.close()


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Dataset]:
    """300 records that fit into memory."""
    paths = [tmp_path / f"d{i}" for i in range(4)]
    with hpstore.create(paths, data=2, parity=1, config=tmp_path / "pool.toml") as pool:
        with DatasetWriter(pool, "a", {"x": Field("uint8", (3000,))}) as writer:
            writer.write_batch({"x": np.zeros((300, 3000), np.uint8)})
        with Dataset(pool, "a") as data:
            yield data


def test_a_run_may_end_on_a_thread_that_is_looking_at_its_pages(small: Dataset) -> None:
    """The garbage collector takes a dropped iterator at any moment, also while room is given up."""
    loader = DataLoader(small, 50, shuffle="window")
    batches = iter(loader)
    next(batches)
    (slab,) = batches._run._session.slabs.values()
    plain = slab._give_up

    def collecting() -> None:
        batches._run.abandon()
        plain()

    def reserve() -> None:
        slab._free.clear()
        slab._expiry.clear()
        slab._give_up = collecting
        slab.reserve(np.arange(1))

    thread = threading.Thread(target=reserve, daemon=True)
    thread.start()
    poll(60, lambda: not batches._run.going)
    slab.close()
    thread.join(60)
    assert not thread.is_alive()
    loader.close()


def test_a_sample_out_of_range_is_named_also_when_all_are_in_memory(small: Dataset) -> None:
    """A sampler of the user's gives one that is not there."""
    for wrong in (300, -301):
        with closing(DataLoader(small, 50, sampler=[*range(300), *range(300), wrong])) as loader:
            with pytest.raises(IndexError, match=f"sample {wrong} of data set 'a'"):
                list(loader)
            assert loader.stats()["mode"] == "resident"


@pytest.mark.parametrize("mode", ["resident", "window"])
def test_memory_is_cleared_before_the_first_page_comes_into_it_and_never_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Also where clearing it writes into it, as on a kernel without MADV_POPULATE_WRITE."""
    monkeypatch.setattr(buffers, "_madvise", lambda *_: -1)
    cleared: list[tuple[int, int]] = []

    def noted(memory: Bytes) -> None:
        buffers.touch(memory)
        cleared.append((memory.ctypes.data, memory.ctypes.data + len(memory)))

    monkeypatch.setattr(slab_module, "touch", noted)
    with Bench(tmp_path).create(4, data=2, parity=1) as pool:
        data = write(pool, "rows", PLAIN, COUNT // 10)
        with closing(DataLoader(data, batch_size=16, seed=1, **MODES[mode])) as loader:
            for _ in range(3):
                for batch in loader:
                    for row, label in zip(batch["image"], batch["label"].tolist(), strict=True):
                        assert np.array_equal(row.numpy(), value_of(PLAIN["image"], label))
    ends = sorted(cleared)
    assert ends
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(ends))


@pytest.fixture
def several(tmp_path: Path) -> Iterator[Dataset]:
    """2100 records in three shards and more."""
    paths = [tmp_path / f"d{i}" for i in range(4)]
    with hpstore.create(paths, data=2, parity=1, config=tmp_path / "pool.toml") as pool:
        with DatasetWriter(
            pool, "a", {"x": Field("uint8", (3000,))}, shard_bytes=2 * MIB, unit_bytes=256 * KIB
        ) as writer:
            writer.write_batch({"x": np.zeros((2100, 3000), np.uint8)})
        with Dataset(pool, "a") as data:
            yield data


def test_pages_wait_until_there_is_room_for_all_of_them(several: Dataset) -> None:
    """Half of the room comes first: nothing is taken or read before the rest does."""
    (stream,) = several.streams
    slab = PageMemory(several, stream, 4)
    slab.read(slab.reserve(np.arange(2), 5) or {})
    slab.read(slab.reserve(np.arange(2, 4), 9) or {})
    found: list[Places | None] = []
    thread = threading.Thread(target=lambda: found.append(slab.reserve(np.arange(4, 8), 20)))
    thread.start()
    poll(60, lambda: slab._leaves == 5)
    slab.advance(5)
    poll(60, lambda: slab._leaves == 9)
    assert not found
    assert (slab._slot[4:8] < 0).all()
    slab.advance(9)
    thread.join(60)
    (places,) = found
    assert places is not None
    assert sorted(places) == [4, 5, 6, 7]
    with pytest.raises(ValueError, match="5 pages at once, there is room for 4"):
        slab.reserve(np.arange(8, 13))
    slab.close()


@pytest.mark.parametrize("which", [0, 1])
def test_the_end_of_one_slab_is_the_end_of_all(
    tmp_path: Path, which: int, caplog: pytest.LogCaptureFixture
) -> None:
    """As when a late read has cost it its room: who waits for pages of another stream goes on."""
    fields = {"x": Field("uint8", (4096,)), "raw": Field("bytes")}
    with Bench(tmp_path).create(4, data=2, parity=1) as pool:
        with DatasetWriter(pool, "two", fields, unit_bytes=64 * KIB, layout="columns") as writer:
            for number in range(200):
                writer.write({"x": np.zeros(4096, np.uint8), "raw": bytes(number)})
        data = Dataset(pool, "two")
        slabs = {s.number: PageMemory(data, s, int(s.page_starts[-1])) for s in data.streams}
        assert len(slabs) == 2
        closed, other = list(slabs.values())[:: -1 if which else 1]
        closed.close()
        with closing(PagePrefetcher(slabs, everything(slabs))):
            last = np.array([len(other.pages.start) - 1])
            assert Call(lambda: other.wait(last, lambda: False)).ended(10)
        assert caplog.text.count("filling ends with a slab") == 1
        data.close()
