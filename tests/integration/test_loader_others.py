"""Data sets of others, orders by weight, parts and samplers of a mixture, many writers."""

from __future__ import annotations

import logging
import multiprocessing
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from torch.utils.data import RandomSampler, Subset, random_split

import hpstore
from hpstore.errors import ConfigError
from hpstore.loaders import (
    DataLoader,
    Dataset,
    DatasetWriter,
    GpuTransfer,
    LoaderMemory,
    Mixture,
    WeightedOrder,
    publish_parts,
)
from hpstore.loaders.batching.page_memory import PageMemory
from hpstore.loaders.dataset.record_reader import StoredData
from hpstore.loaders.zarr_views.array_dataset import ZarrDataset
from tests.integration.loader_cases import (
    COUNT,
    PLAIN,
    check,
    flat,
    labels,
    ranks,
    values_of,
    write,
)


class Numbers(torch.utils.data.Dataset[dict[str, int]]):
    """Somebody else's; one of its samples cannot be read."""

    def __init__(self, *, bad: int = -1) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> dict[str, int]:
        if index == self.bad:
            raise ValueError("not a number")
        return {"label": index}


class Doubled(Dataset):
    """A subclass with samples of its own making: read by torch's workers."""

    def __getitems__(self, indices: Sequence[int]) -> Any:
        return [{"label": 2 * int(one["label"])} for one in super().__getitems__(indices)]


# --- what a state knows of data sets of others -------------------------------------------------


def zarr_set(path: Path, chunk: int) -> ZarrDataset:
    array = zarr.create_array(path, shape=(COUNT,), chunks=(chunk,), dtype="int64")
    array[:] = np.arange(COUNT)
    return ZarrDataset({"label": array})


def test_the_state_of_another_data_set_with_a_fingerprint_is_refused(
    pool: hpstore.Pool, tmp_path: Path
) -> None:
    """Of equal kind and size: the error shows both fingerprints, and nothing is loaded."""
    write(pool, "a", PLAIN, COUNT), write(pool, "b", {"label": PLAIN["label"]}, COUNT)
    pairs: list[tuple[Any, Any]] = [
        (Doubled(pool, "a"), Doubled(pool, "b")),
        (zarr_set(tmp_path / "a.zarr", 10), zarr_set(tmp_path / "b.zarr", 20)),
    ]
    for one, other in pairs:
        loader = DataLoader(one, 10, shuffle=True, seed=1)
        next(iter(loader))
        wrong = DataLoader(other, 10, shuffle=True, seed=1)
        with pytest.raises(ConfigError, match=f"{one.fingerprint}.*{other.fingerprint}"):
            wrong.load_state_dict(loader.state_dict())
        assert wrong.state_dict()["samples"] == 0
        again = DataLoader(one, 10, shuffle=True, seed=1)
        again.load_state_dict(loader.state_dict())
        assert again.state_dict() == loader.state_dict()


def test_another_part_of_a_data_set_of_others_is_another_data_set() -> None:
    halves = [Subset(Numbers(), range(first, 96, 2)) for first in (0, 1)]
    loader = DataLoader(Subset(halves[0], range(10)), 5)
    with pytest.raises(ConfigError, match="data set"):
        DataLoader(Subset(halves[1], range(10)), 5).load_state_dict(loader.state_dict())
    DataLoader(Subset(halves[0], range(10)), 5).load_state_dict(loader.state_dict())


@pytest.mark.parametrize("workers", [0, 2])
def test_arrays_of_others_are_read_in_our_order_on_ranks_and_from_a_state(
    tmp_path: Path, workers: int
) -> None:
    """Plain zarr: each sample once over two ranks; cut and resumed it is the same epoch."""
    data = zarr_set(tmp_path / "a.zarr", 10)
    options: dict[str, Any] = {"batch_size": 8, "shuffle": True, "num_workers": workers}
    shares = [flat(loader) for loader in ranks(data, 2, tail="uneven", **options)]
    assert sorted(shares[0] + shares[1]) == list(range(COUNT))
    whole = flat(DataLoader(data, **options))
    loader = DataLoader(data, **options)
    run = iter(loader)
    begun = [labels(next(run)) for _ in range(5)]
    again = DataLoader(data, **options)
    again.load_state_dict(loader.state_dict())
    assert [n for batch in begun for n in batch] + flat(again) == whole


# --- arguments -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cache", "1MiB"),
        ("memory", LoaderMemory(prefetch_bytes="1MiB")),
        ("memory", LoaderMemory(window_bytes="1MiB")),
        ("gpu", GpuTransfer(direct="off")),
        ("gpu", GpuTransfer(arena_bytes="1MiB")),
    ],
)
def test_memory_that_would_not_be_used_is_refused(name: str, value: Any) -> None:
    """Torch's workers read data sets of others: it would have no effect."""
    with pytest.raises(ConfigError, match=f"{name}: for data sets of hpstore alone.*leave"):
        DataLoader(Numbers(), 3, **{name: value})


def test_no_cache_may_be_asked_for_with_any_data_set() -> None:
    """Data sets of others have none."""
    for off in (None, 0):
        assert flat(DataLoader(Numbers(), 3, cache=off)) == flat(DataLoader(Numbers(), 3))


@pytest.mark.parametrize("foreign", [False, True])
def test_a_generator_that_decides_nothing_is_told(
    pool: hpstore.Pool, caplog: pytest.LogCaptureFixture, foreign: bool
) -> None:
    """torch's would shuffle by it; ours by the seed. Unshuffled there is nothing to say."""
    data: Any = Numbers() if foreign else write(pool, "d", PLAIN, COUNT)
    generator = torch.Generator().manual_seed(3)
    DataLoader(data, 10, generator=generator)
    DataLoader(data, 10, generator=generator, sampler=RandomSampler(data, generator=generator))
    assert "generator" not in caplog.text
    made = DataLoader(data, 10, shuffle=True, seed=5, generator=generator)
    assert caplog.text.count("seed=, not the generator, decides") == 1
    assert flat(made) == flat(DataLoader(data, 10, shuffle=True, seed=5))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_of_others_that_fails_names_its_samples(workers: int) -> None:
    """The exception is the user's own; a note says which samples it was about."""
    data = Numbers(bad=40)
    loader = DataLoader(data, 10, shuffle=True, seed=2, num_workers=workers)
    order = loader.order
    assert order is not None
    batches = [order.indices(0, at, min(COUNT, at + 10)).tolist() for at in range(0, COUNT, 10)]
    (samples,) = [batch for batch in batches if 40 in batch]
    run = iter(loader)
    for _ in range(batches.index(samples)):
        next(run)
    with pytest.raises(ValueError, match="not a number") as failed:
        next(run)
    assert failed.value.__notes__ == [f"hpstore: of samples {samples}"]


def test_the_share_that_torch_implies_is_logged_once(
    pool: hpstore.Pool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    data = write(pool, "d", PLAIN, COUNT)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    with caplog.at_level(logging.INFO, logger="hpstore"):
        loader = DataLoader(data, 10)
        for _ in range(2):
            assert len(list(loader)) == len(loader)
    assert caplog.text.count("rank 1 of 3 reads its share") == 1


# --- by weight -------------------------------------------------------------------------------


def test_samples_are_drawn_by_weight_and_resumed_on_other_ranks(pool: hpstore.Pool) -> None:
    """Native data too: what has no weight never comes; two ranks go on where one stood."""
    data = write(pool, "d", PLAIN, COUNT)
    weights = np.where(np.arange(COUNT) % 2, 0.0, np.arange(COUNT) + 1.0)
    order = WeightedOrder(weights, 2 * COUNT, seed=4)
    loader = DataLoader(data, 10, shuffle=order)
    whole = flat(loader)
    assert whole == order.indices(0, 0, 2 * COUNT).tolist()
    assert not any(number % 2 for number in whole)
    loader = DataLoader(data, 10, shuffle=order)
    run = iter(loader)
    begun = labels(next(run)) + labels(next(run))
    rest = Counter[int]()
    for rank in range(2):
        again = DataLoader(data, 10, shuffle=order, rank=rank, world_size=2)
        again.load_state_dict(loader.state_dict())
        rest.update(flat(again))
    assert Counter(whole) - Counter(begun) == rest
    for batch in DataLoader(data, 10, shuffle=order):
        check(batch, PLAIN)


# --- mixtures --------------------------------------------------------------------------------


@pytest.fixture
def mixed(pool: hpstore.Pool) -> Any:
    """Labels of the second data set are those of the first one again."""
    return Mixture(
        [write(pool, "a", PLAIN, 60), write(pool, "b", PLAIN, 37)],
        [1, 0],
        source_field="from",
        length=50,
    )


def places(batch: Any) -> list[int]:
    """Indices of samples laid end to end."""
    return [60 * a + b for a, b in zip(batch["from"].tolist(), labels(batch), strict=True)]


def test_a_sampler_chooses_from_all_of_a_mixture(mixed: Any) -> None:
    """Whatever the weights and the length; from the end as well."""
    chosen = [[3, 96, 60], [0, -1, -97], [59]]
    loader = DataLoader(mixed, batch_sampler=chosen)
    assert [places(batch) for batch in loader] == [[3, 96, 60], [0, 96, 0], [59]]
    single = DataLoader(mixed, 4, sampler=[96, 1, 61, 2, 5])
    run = iter(single)
    begun = places(next(run))
    again = DataLoader(mixed, 4, sampler=[96, 1, 61, 2, 5])
    again.load_state_dict(single.state_dict())
    assert begun + [n for batch in again for n in places(batch)] == [96, 1, 61, 2, 5]
    with pytest.raises(IndexError, match="sample 97 of a mixture of 97"):
        list(DataLoader(mixed, 4, sampler=[0, 97]))


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_subset_of_a_mixture_is_those_samples_each_once(mixed: Any, shuffle: bool) -> None:
    chosen = [0, 5, 59, 60, 61, 96, 10]
    loader = DataLoader(Subset(mixed, chosen), 3, shuffle=shuffle, seed=1)
    for _ in range(2):
        found = [n for batch in loader for n in places(batch)]
        assert sorted(found) == sorted(chosen)
        assert (found == chosen) is not shuffle
    assert loader.stats()["mode"] == "mixture"
    with pytest.raises(ConfigError, match="window"):
        DataLoader(Subset(mixed, chosen), 3, shuffle="window")


def test_a_split_of_a_mixture_stays_native(pool: hpstore.Pool) -> None:
    parts = [write(pool, "a", PLAIN, 60), write(pool, "b", PLAIN, 37)]
    whole: Any = Mixture(parts, [1, 1], source_field="from")
    found = list[int]()
    for part in random_split(whole, [0.5, 0.5], torch.Generator().manual_seed(1)):
        loader = DataLoader(part, 10, shuffle=True)
        found += [n for batch in loader for n in places(batch)]
        assert loader.stats()["mode"] == "mixture"
    assert sorted(found) == list(range(97))


# --- reading and writing ---------------------------------------------------------------------


@pytest.mark.parametrize("cache", [0, 1 << 30])
def test_loading_a_state_reads_nothing_and_nothing_before_it_is_read_first(
    pool: hpstore.Pool, monkeypatch: pytest.MonkeyPatch, cache: int
) -> None:
    """The first records that are read are those of the first batch behind the position."""
    data = write(pool, "d", PLAIN, COUNT)
    loader = DataLoader(data, 10, shuffle=True, seed=1, cache=cache)
    run = iter(loader)
    for _ in range(8):
        next(run)
    state = loader.state_dict()
    loader.close()
    asked, plain = list[Any](), StoredData.read_rows
    pages = PageMemory.read

    def read_rows(self: StoredData, stream: Any, indices: Any, *args: Any, **kwargs: Any) -> bool:
        asked.append(indices.tolist())
        return plain(self, stream, indices, *args, **kwargs)

    def read(self: PageMemory, places: Any) -> None:
        asked.append("pages")
        pages(self, places)

    monkeypatch.setattr(StoredData, "read_rows", read_rows)
    monkeypatch.setattr(PageMemory, "read", read)
    again = DataLoader(data, 10, shuffle=True, seed=1, cache=cache)
    again.load_state_dict(state)
    assert asked == []
    assert again.order is not None
    batch = labels(next(iter(again)))
    assert batch == again.order.indices(0, 80, 90).tolist() == asked[0]
    again.close()


def write_part(config: Path, number: int, parts: int) -> None:
    """In a process of its own."""
    with (
        hpstore.open(config) as pool,
        DatasetWriter(pool, "many", PLAIN, part=(number, parts)) as writer,
    ):
        for sample in range(number * 20, number * 20 + 20):
            writer.write(values_of(PLAIN, sample))


def test_processes_write_parts_of_one_data_set_at_the_same_time(
    pool: hpstore.Pool, tmp_path: Path
) -> None:
    """Published at once they are what one writer would have written."""
    spawn = multiprocessing.get_context("spawn")
    writers = [
        spawn.Process(target=write_part, args=(tmp_path / "pool.toml", n, 3)) for n in range(3)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(120)
        assert writer.exitcode == 0
    info = publish_parts(pool, "many")
    one = write(pool, "one", PLAIN, 60)
    assert (info.rows, info.parts, info.fingerprint) == (60, 3, one.fingerprint)
    loader = DataLoader(Dataset(pool, "many"), 10)
    assert flat(loader) == list(range(60))
    for batch in loader:
        check(batch, PLAIN)
