"""Windows far smaller than the data: room is given up and taken again, and nobody waits for ever.

A pool of one data unit a stripe, three samples a unit, windows of one stripe: a slab has room for
a fraction of the 33 stripes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpstore.loaders import DataLoader, Dataset, DatasetWriter, Field, LoaderMemory
from hpstore.loaders.batching.batch_maker import worth_reading
from hpstore.loaders.batching.page_memory import NEVER, PageMemory, Places
from hpstore.loaders.batching.page_prefetch import page_bounds, stripes_kept
from hpstore.loaders.dataset.record_layout import Int64s
from hpstore.pool.pool import Pool
from hpstore.units import KIB
from tests.fault.common import within
from tests.integration.data_sets import make_pool
from tests.integration.loader_cases import COUNT, MODES, check, flat, labels, ranks, write
from tests.thorough import some_of

FIELDS = {"image": Field("uint8", (3, 80, 80)), "label": Field("int64")}
LIMIT = 60.0
WINDOW: dict[str, Any] = {
    "cache": 0,
    "shuffle": "window",
    "memory": LoaderMemory(window_bytes=1),
    "seed": 2,
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(tmp_path_factory.mktemp("pool"))


@pytest.fixture(scope="module")
def pool(root: Path) -> Iterator[Pool]:
    with make_pool(root, data=1, parity=1, devices=2) as made:
        yield made


@pytest.fixture(scope="module")
def data(pool: Pool) -> Dataset:
    return write(pool, "a", FIELDS, COUNT)


def test_the_room_is_a_fraction_of_the_data(data: Dataset) -> None:
    """What the other tests rely on."""
    stripes = data.stripes()
    assert len(stripes) - 1 == 33
    assert stripes_kept(np.diff(stripes), 1, 3) < 10


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("batch", [2, 11, 200])
def test_ranks_share_epochs(data: Dataset, world: int, batch: int) -> None:
    """Batches over many windows; ranks far from each other, with many windows between."""
    loaders = ranks(data, world, batch_size=batch, tail="uneven", **WINDOW)
    alone = DataLoader(data, 7, **WINDOW)
    for _ in range(2):
        steps = [within(LIMIT, lambda: [labels(b) for b in one]) for one in loaders]  # noqa: B023
        joined = []
        for number in range(max(map(len, steps))):
            for own in steps:
                joined += own[number] if number < len(own) else []
        assert joined == within(LIMIT, lambda: flat(alone))
        assert sorted(joined) == list(range(COUNT))
    for one in (*loaders, alone):
        within(LIMIT, one.close)


@pytest.mark.parametrize("tail", ["pad", "drop", "drop_last"])
def test_ends_of_epochs_that_are_padded_or_left_out(data: Dataset, tail: str) -> None:
    """Rows of the epoch's begin, whose window has gone; windows that nobody reads any more."""
    options: dict[str, Any] = {"drop_last": True} if tail == "drop_last" else {"tail": tail}
    loaders = ranks(data, 4, batch_size=5, **options, **WINDOW)
    for _ in range(3):
        runs = [within(LIMIT, lambda: flat(one)) for one in loaders]  # noqa: B023
        assert len({len(run) for run in runs}) == 1
        found = [label for run in runs for label in run]
        assert len(found) == {"pad": 100, "drop": 96, "drop_last": 80}[tail]
        assert len(set(found)) == min(len(found), COUNT)
    for one in loaders:
        within(LIMIT, one.close)


def test_bytes_are_right_when_room_is_used_again(data: Dataset) -> None:
    """Many epochs with several threads: no batch has bytes of the page that took the place."""
    loader = DataLoader(data, 8, num_workers=3, prefetch_factor=3, **WINDOW)
    for _ in range(4):
        for batch in loader:
            check(batch, FIELDS)
    assert loader.stats()["records_read"] == 0  # all out of windows
    loader.close()


def test_a_slow_user_bounds_the_room(data: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slab never has more pages than it was made for, however far the filler could go."""
    most: list[tuple[int, int]] = []
    plain = PageMemory.reserve

    def reserve(slab: PageMemory, pages: Int64s, expire: int = NEVER) -> Places | None:
        found = plain(slab, pages, expire)
        most.append((len(slab._expiry), slab.capacity))
        return found

    monkeypatch.setattr(PageMemory, "reserve", reserve)
    loader = DataLoader(data, 2, prefetch_factor=1, num_workers=1, **WINDOW)
    assert len(flat(loader)) == COUNT
    assert all(pages <= capacity < 15 for pages, capacity in most)
    assert max(pages for pages, _ in most) > 3  # it does fill ahead
    loader.close()


def test_windows_of_very_uneven_records(pool: Pool) -> None:
    """Ragged columns: a stripe of the main stream may need many pages of another, or none."""
    fields = {
        "a": Field("uint8", (None,)),
        "b": Field("bytes"),
        "label": Field("int64"),
    }
    with DatasetWriter(
        pool, "uneven", fields, layout="columns", unit_bytes=64 * KIB, shard_bytes=400 * KIB
    ) as writer:
        for i in range(80):
            large = 60_000 if 30 <= i < 50 else 500
            writer.write({"a": np.full(i * 37, i, np.uint8), "b": bytes([i]) * large, "label": i})
    for batch_size in (3, 50):
        loader = DataLoader(Dataset(pool, "uneven"), batch_size, **WINDOW)
        for _ in range(2):
            found = []
            for batch in within(LIMIT, lambda: list(loader)):  # noqa: B023
                for row, label in enumerate(labels(batch)):
                    assert set(batch["b"][row].tolist()) == {label}
                    assert len(batch["b"][row]) == (60_000 if 30 <= label < 50 else 500)
                    assert batch["a"][row].tolist() == [label] * (label * 37)
                    found.append(label)
            assert sorted(found) == list(range(80))
        within(LIMIT, loader.close)


def test_runs_that_are_left_hold_up_nobody(data: Dataset) -> None:
    """Breaks, jumps, two iterators at once: each has pages of its own."""
    loader = DataLoader(data, 4, **WINDOW)
    for _ in range(4):
        next(iter(loader))
        within(LIMIT, lambda: flat(loader))
        loader.set_epoch(loader.state_dict()["epoch"] + 5)
    first, second = iter(loader), iter(loader)
    one = [label for batch in within(LIMIT, lambda: list(second)) for label in labels(batch)]
    two = [label for batch in within(LIMIT, lambda: list(first)) for label in labels(batch)]
    assert one == two
    within(LIMIT, loader.close)


EXITS = """
import sys, hpstore
from hpstore.loaders import DataLoader, Dataset, LoaderMemory
data = Dataset(hpstore.open(sys.argv[1]), "a")
loader = DataLoader(data, 4, num_workers=2, **eval(sys.argv[2]))
run = iter(loader)
next(run)
if sys.argv[3] == "error":
    raise SystemExit(7)
"""


@pytest.mark.parametrize(
    ("end", "mode"), some_of([(end, mode) for end in ("end", "error") for mode in MODES], 0, 4, 5)
)
def test_a_process_that_stops_in_mid_epoch_ends(
    data: Dataset, root: Path, mode: str, end: str
) -> None:
    """Threads that wait for pages to come do not hold up the interpreter."""
    toml = str(root / "pool.toml")
    options = {"shuffle": True, **{**MODES, "window": WINDOW}[mode]}
    child = subprocess.run(
        [sys.executable, "-c", EXITS, toml, repr(options), end],
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        timeout=LIMIT,
        capture_output=True,
        check=False,
    )
    assert child.returncode == (7 if end == "error" else 0), child.stderr.decode()
    assert child.stderr == b""


def test_bounds_of_pages() -> None:
    """Pure: pages of stripes; stripes that a batch may need."""
    low, high = page_bounds(np.array([0, 3, 6, 6, 9, 10]), np.array([0, 3, 7, 10]))
    assert (low.tolist(), high.tolist()) == ([0, 1, 3], [1, 4, 5])
    assert stripes_kept(np.array([5, 1, 1, 5]), 1, 1) == 1 + 3
    assert stripes_kept(np.array([5, 1, 1, 5]), 2, 7) == 3 + 6
    assert stripes_kept(np.array([5, 1, 1, 5]), 1, 1000) == 5 + 3


def test_windows_of_a_subset_are_read_by_pages_when_most_of_them_is_wanted(data: Dataset) -> None:
    """Nine of ten samples: all out of memory; one of ten: record by record. The same samples."""
    most, few = list(range(COUNT - 9)), list(range(0, COUNT, 10))
    for chosen, mode in ((most, "window"), (few, "records")):
        loader = DataLoader(torch.utils.data.Subset(data, chosen), 7, **WINDOW)
        for _ in range(2):
            found = within(LIMIT, lambda: list(loader))  # noqa: B023
            assert sorted(flat(found)) == chosen
            for batch in found:
                check(batch, FIELDS)
        stats = loader.stats()
        assert stats["mode"] == mode
        assert (stats["records_gathered"] > 0) == (mode == "window")
        assert (stats["records_read"] > 0) == (mode == "records")
        within(LIMIT, loader.close)


def test_a_subset_in_windows_resumes_anywhere(data: Dataset) -> None:
    """In any order of its indices; cut in mid-window, the rest of the epoch is the same."""
    chosen = list(reversed(range(5, COUNT)))
    options = {"batch_size": 7, **WINDOW}
    whole = flat(DataLoader(torch.utils.data.Subset(data, chosen), **options))
    first = DataLoader(torch.utils.data.Subset(data, chosen), **options)
    run = iter(first)
    found = labels(next(run)) + labels(next(run)) + labels(next(run))
    second = DataLoader(torch.utils.data.Subset(data, chosen), **options)
    second.load_state_dict(first.state_dict())
    assert found + within(LIMIT, lambda: flat(second)) == whole


def test_ranks_of_a_large_world_read_their_records_alone(data: Dataset) -> None:
    """Where a rank uses little of a page it does not read it: no more bytes than it needs."""
    for world, mode in ((2, "window"), (8, "records")):
        loaders = ranks(data, world, batch_size=4, tail="uneven", **WINDOW)
        found = [within(LIMIT, lambda: flat(loader)) for loader in loaders]  # noqa: B023
        assert sorted(label for part in found for label in part) == list(range(COUNT))
        for loader in loaders:
            assert loader.stats()["mode"] == mode
            within(LIMIT, loader.close)


def test_the_border_between_pages_and_records() -> None:
    """Large records are read alone unless nearly all of a page is wanted, small ones seldom."""
    assert worth_reading(12 * KIB) == pytest.approx(12 / 35)
    assert worth_reading(150 * KIB) > 0.85
    assert worth_reading(100) < 0.01
