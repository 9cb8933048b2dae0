"""Pages that come and go beside those who copy from them, and memory that goes with its loader."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch

import hpstore
from hpstore.errors import TooManyErasures
from hpstore.loaders import DataLoader, Dataset, DatasetWriter, Field, LoaderMemory, Mixture
from hpstore.loaders.batching.assembler import Assembler
from hpstore.loaders.batching.batch_buffers import Slots
from hpstore.loaders.batching.batch_counters import Counts
from hpstore.loaders.batching.page_memory import PageMemory
from hpstore.loaders.dataset.block_table import GROUP_BLOCKS, BlockTable
from hpstore.units import KIB, MIB
from tests.fault.common import poll

COUNT = 400
SIZE = 16 * KIB


@pytest.fixture(params=["fixed", "ragged"])
def data(pool: hpstore.Pool, request: pytest.FixtureRequest) -> Iterator[Dataset]:
    """Every byte of a sample is its number modulo 251."""
    field = Field("uint8", (SIZE,)) if request.param == "fixed" else Field("bytes")
    rows = [np.full(SIZE, i % 251, np.uint8) for i in range(COUNT)]
    with DatasetWriter(pool, "d", {"x": field, "i": Field("int64")}, unit_bytes=256 * KIB) as out:
        x: Any = np.stack(rows) if request.param == "fixed" else [row.tobytes() for row in rows]
        out.write_batch({"x": x, "i": np.arange(COUNT)})
    with Dataset(pool, "d") as opened:
        yield opened


def wrong(batch: dict[str, Any]) -> list[int]:
    return [i for n, i in enumerate(batch["i"].tolist()) if (batch["x"][n] != i % 251).any()]


def test_no_page_is_given_up_while_a_batch_is_copied_from_it(
    data: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch made long ahead finds pages there of an earlier window, which ends meanwhile."""
    stream = data.streams[0]
    slab = PageMemory(data, stream, 2)

    def load(pages: list[int], expire: int) -> None:
        slab.read(slab.reserve(np.array(pages), expire) or {})

    load([0, 1], 1)
    fillers = [threading.Thread(target=load, args=([2, 3], 9))]
    for name in ("gather", "pieces"):
        original = getattr(PageMemory, name)

        def slowly(slab: PageMemory, *args: Any, original: Any = original, **kwargs: Any) -> Any:
            found = original(slab, *args) if original.__name__ == "pieces" else None
            slab.advance(5)
            fillers[0].start()
            fillers[0].join(0.3)
            return original(slab, *args, **kwargs) if found is None else found

        monkeypatch.setattr(PageMemory, name, slowly)
    made = Assembler(data, Slots(64 * MIB, None), {stream.number: slab}, Counts())
    batch = made.batch(np.arange(20), awaited=0, urgent=lambda: False)
    assert not wrong(batch)
    fillers[0].join(60)
    assert (slab._slot[:4] >= 0).tolist() == [False, False, True, True]


def test_room_comes_when_nobody_copies_any_more(data: Dataset) -> None:
    stream = data.streams[0]
    slab = PageMemory(data, stream, 2)
    places = slab.reserve(np.array([0, 1]), expire=1)
    assert places
    slab.read(places)
    taken: list[Any] = []
    where = data.locate(stream, np.arange(3))
    other = threading.Thread(target=lambda: taken.append(slab.reserve(np.array([2, 3]), expire=9)))
    with slab.resident(where) as slots:
        assert (slots >= 0).all()
        other.start()
        slab.advance(5)
        other.join(0.2)
        assert not taken
        views = slab.pieces(slots, where).views()
        assert all((view == i).all() for i, view in enumerate(views))
    other.join(60)
    assert taken[0].keys() == {2, 3}


def test_all_room_for_pages_is_used_before_any_is_used_again(data: Dataset) -> None:
    """Memory that is first used after many epochs would look like a leak."""
    slab = PageMemory(data, data.streams[0], 4)
    first = slab.reserve(np.array([0, 1, 2]), expire=1)
    assert first
    slab.read(first)
    slab.advance(1)
    second = slab.reserve(np.array([3, 4]), expire=2)
    assert second
    assert len(set(first.values()) | set(second.values())) == 4


def test_who_waits_for_pages_is_woken_by_the_last_of_them(
    data: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by each: that costs the threads that read them the interpreter's lock."""
    slab = PageMemory(data, data.streams[0], 5)
    tell, there = slab._moved.notify_all, list[int]()

    def notify_all() -> None:
        there.append(int((slab._slot >= 0).sum()))
        tell()

    monkeypatch.setattr(slab._moved, "notify_all", notify_all)
    wanted = ([0, 1, 3], [2])
    waiting = [
        threading.Thread(target=slab.wait, args=(np.array(p), lambda: False), daemon=True)
        for p in wanted
    ]
    for thread in waiting:
        thread.start()
    poll(60, lambda: len(slab._missing) == 2)
    for page in range(5):
        slab.read(slab.reserve(np.array([page])) or {})
        if page >= 2:
            waiting[page == 2].join(60)
    assert there == [3, 4]
    assert not any(thread.is_alive() for thread in waiting)
    assert not slab._missing


@pytest.mark.parametrize("rank", range(4))
def test_ranks_whose_rows_all_pad_the_epoch_wait_for_nothing(pool: hpstore.Pool, rank: int) -> None:
    """The last global batch holds five samples for four ranks of 16 rows."""
    count = 1925
    with DatasetWriter(pool, "d", {"x": Field("uint8", (4096,))}, unit_bytes=256 * KIB) as out:
        out.write_batch({"x": np.zeros((count, 4096), np.uint8)})
    loader = DataLoader(
        Dataset(pool, "d"),
        16,
        shuffle="window",
        memory=LoaderMemory(window_bytes=1),
        cache=0,
        rank=rank,
        world_size=4,
        tail="pad",
        timeout=60,
    )
    with closing(loader):
        assert [len(list(loader)) for _ in range(3)] == 3 * [len(loader)]


def test_a_block_counts_as_there_when_it_is() -> None:
    """PROTOCOL 22: a child that is forked while another thread installs one has a copy of that."""

    def load(wanted: dict[int, Any]) -> list[Any]:
        return [[[np.arange(first, first + n)] for first, n in runs] for runs in wanted.values()]

    table = BlockTable([100], [(np.dtype(np.int64), ())], load, block_rows=10, budget_bytes=160)
    table.get(np.array([0, 10]))  # both slots are full
    seen: list[tuple[list[int], list[int]]] = []

    class Values:
        """They look at the table while they are copied."""

        def __len__(self) -> int:
            return 10

        def __array__(self, *_: Any, **__: Any) -> Any:
            seen.append((np.flatnonzero(table._slot >= 0).tolist(), table._holds.tolist()))
            return np.arange(20, 30)

    values: Any = [Values()]
    table._install(2, values)
    assert seen[0] == ([1], [-1, 1])
    assert table.get(np.array([25, 15]))[0].tolist() == [25, 15]


def test_many_rows_of_few_blocks_bring_their_neighbours() -> None:
    """The batches of a window would each wait for a few more. A neighbour that cannot be read, or
    for which there is no room, is left alone; rows all over the table bring nothing."""
    bad, asked = {3}, list[list[int]]()

    def load(wanted: dict[int, Any]) -> list[Any]:
        (runs,) = wanted.values()
        asked.append([first // 10 for first, _ in runs])
        if bad & set(asked[-1]):
            raise TooManyErasures("of a neighbour")
        return [[[np.arange(first, first + n)] for first, n in runs]]

    def table(budget: int = 1 << 20) -> BlockTable:
        return BlockTable(
            [400], [(np.dtype(np.int64), ())], load, block_rows=10, budget_bytes=budget
        )

    one = table()
    one.get(np.array([200]))
    there = [*range(16, 20), *range(21, 32)]
    for first, blocks in ((160, [there]), (330, [list(range(32, 40))])):
        asked.clear()
        rows = np.arange(first, first + GROUP_BLOCKS) // 2 + first // 2
        assert one.get(rows)[0].tolist() == rows.tolist()
        assert asked == blocks
    asked.clear()
    rows = np.array([5] * GROUP_BLOCKS)
    assert one.get(rows)[0].tolist() == rows.tolist()
    assert asked == [list(range(16)), [0]]
    for other, wanted in ((table(), rows[1:]), (table(1600), rows)):
        asked.clear()
        other.get(wanted)
        assert asked == [[0]]
    with pytest.raises(TooManyErasures):
        one.get(np.array([35]))


def test_a_closed_loader_keeps_no_pages(data: Dataset) -> None:
    """It can be iterated anew: with the memory of one, not of all that were closed."""
    loader, engines = DataLoader(data, 16, shuffle=True), []
    for _ in range(3):
        list(loader)
        engines.append(weakref.ref(loader.engine()))
        loader.close()
        gc.collect()
    assert [engine() for engine in engines] == [None, None, None]


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint64", "bfloat16", "bool", "complex64"])
@pytest.mark.parametrize("shape", [(), (80,), (2, 3)])
def test_a_mixture_puts_rows_of_any_dtype_together(
    pool: hpstore.Pool, dtype: str, shape: tuple[int, ...]
) -> None:
    """Unsigned integers are those of tokens."""
    sets = []
    for number in range(2):
        field = Field(dtype, shape)
        with DatasetWriter(pool, f"d{number}", {"x": field}) as out:
            out.write_batch({"x": np.full((40, *shape), number).astype(field.storage)})
        sets.append(Dataset(pool, f"d{number}"))
    batch = next(iter(DataLoader(Mixture(sets, [1, 1]), 16)))["x"]
    assert tuple(batch.shape) == (16, *shape)
    rows = {tuple(row) for row in batch.reshape(16, -1).view(torch.uint8).tolist()}
    ones = torch.as_tensor(sets[1][0]["x"]).reshape(1, -1).view(torch.uint8)[0].tolist()
    assert rows == {tuple(ones), (0,) * len(ones)}
