"""Loaders that read through a Cache: the same batches, and the cache knows what comes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, Sampler, Subset, WeightedRandomSampler

import hpstore
from hpstore.loaders import Cache, DataLoader, Dataset
from hpstore.loaders.batching.cached_reads import CachedRun
from hpstore.pool.pool import Pool
from hpstore.units import MIB
from tests.integration.loader_cases import COUNT, KINDS, flat, labels, ranks, write


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    root = tmp_path_factory.mktemp("pool")
    with hpstore.create(
        [root / f"d{i}" for i in range(4)], data=2, parity=1, config=root / "pool.toml"
    ) as made:
        for kind in ("rows", "ragged rows", "ragged columns", "compressed"):
            fields, options = KINDS[kind]
            write(made, kind.replace(" ", "-"), fields, COUNT, **options)
        yield made


@pytest.fixture
def data(pool: Pool) -> Dataset:
    return Dataset(pool, "rows")


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return bool(torch.equal(left, right))
    if isinstance(left, list):
        return bool(left == right)
    return bool(torch.equal(left.values, right.values) and torch.equal(left.offsets, right.offsets))


def equal(left: list[dict[str, Any]], right: list[dict[str, Any]]) -> bool:
    return len(left) == len(right) and all(
        a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)
        for a, b in zip(left, right, strict=True)
    )


@pytest.mark.parametrize("kind", ["rows", "ragged-rows", "ragged-columns", "compressed"])
@pytest.mark.parametrize("shuffle", ["global", "window", "none"])
def test_batches_are_the_same_with_a_cache(pool: Pool, kind: str, shuffle: str) -> None:
    """Three epochs, a cache that holds part of the data: bit for bit, and no order is left."""
    plain = DataLoader(Dataset(pool, kind), 8, shuffle=shuffle, seed=3, cache=0)
    with Cache(64 * MIB if kind == "ragged-columns" else 2 * MIB) as cache:
        cached = DataLoader(Dataset(pool, kind), 8, shuffle=shuffle, seed=3, cache=cache)
        for _ in range(3):
            assert equal(list(plain), list(cached))
        stats = cached.stats()
        assert stats["mode"] == "cached"
        assert stats["cache"]["memory_hit_total"] > 0
        assert stats["cache"].get("order_left_total", 0) == 0
        assert stats["cache"].get("turn_missed_total", 0) == 0
        cached.close()
    plain.close()


def test_a_cache_that_holds_all_reads_the_pool_once(data: Dataset) -> None:
    with Cache(64 * MIB) as cache:
        loader = DataLoader(data, 8, shuffle=True, cache=cache)
        for _ in range(4):
            assert sorted(flat(loader)) == list(range(COUNT))
        stats = cache.stats()
        plan = data.streams[0].fixed
        assert plan is not None
        assert stats["source_bytes"] == plan.length * COUNT
        assert stats["source_again_bytes"] == 0
        loader.close()


def test_breaks_jumps_and_resumes_are_told_anew(data: Dataset) -> None:
    """What was foretold before does not count against what comes after."""
    with Cache(1 * MIB) as cache:
        loader = DataLoader(data, 8, shuffle=True, seed=1, cache=cache)
        plain = DataLoader(data, 8, shuffle=True, seed=1, cache=0)
        for one in (loader, plain):
            batches = iter(one)
            next(batches), next(batches)
        state = loader.state_dict()
        rest = [labels(batch) for batch in loader]
        assert rest == [labels(batch) for batch in plain]
        loader.load_state_dict(state)
        plain.load_state_dict(state)
        assert [labels(batch) for batch in loader] == [labels(batch) for batch in plain]
        loader.set_epoch(7)
        plain.set_epoch(7)
        for _ in range(2):
            assert [labels(batch) for batch in loader] == [labels(batch) for batch in plain]
        assert cache.stats().get("order_left_total", 0) == 0
        loader.close()
        plain.close()


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("tail", ["pad", "uneven"])
def test_ranks_are_told_their_own_part(data: Dataset, world: int, tail: str) -> None:
    """With the samples that are repeated at its end, too."""
    with Cache(1 * MIB) as cache:
        options: dict[str, Any] = {"shuffle": True, "tail": tail, "cache": cache}
        loaders = ranks(data, world, batch_size=4, **options)
        for _ in range(2):
            found = [label for one in loaders for label in flat(one)]
            assert set(found) == set(range(COUNT))
            assert len(found) == (COUNT if tail == "uneven" else -(-COUNT // world) * world)
        assert cache.stats().get("order_left_total", 0) == 0
        for one in loaders:
            one.close()


def test_samplers_of_torch_are_foretold(data: Dataset) -> None:
    """With a generator of their own; a batch sampler over one too; draws that repeat samples."""
    weights = [float(i) for i in range(1, COUNT + 1)]
    cases: list[dict[str, Any]] = [
        {
            "sampler": RandomSampler(data, generator=torch.Generator().manual_seed(1)),
            "batch_size": 8,
        },
        {
            "batch_sampler": BatchSampler(
                WeightedRandomSampler(weights, COUNT, generator=torch.Generator().manual_seed(2)),
                7,
                drop_last=False,
            )
        },
    ]
    for made in cases:
        with Cache(1 * MIB) as cache:
            loader = DataLoader(data, cache=cache, **made)
            for _ in range(3):
                assert len(flat(loader)) == COUNT
            stats = cache.stats()
            assert stats.get("order_left_total", 0) == 0
            assert stats["memory_hit_total"] > 0
            loader.close()


def test_a_subset_is_foretold_by_the_numbers_of_its_samples(data: Dataset) -> None:
    chosen = list(range(1, COUNT, 3))
    with Cache(1 * MIB) as cache:
        loader = DataLoader(Subset(data, chosen), 4, shuffle=True, cache=cache)
        for _ in range(3):
            assert sorted(flat(loader)) == chosen
        assert cache.stats().get("order_left_total", 0) == 0
        loader.close()


def test_two_loaders_share_what_the_first_one_read(data: Dataset, pool: Pool) -> None:
    with Cache(64 * MIB) as cache:
        first = DataLoader(data, 8, shuffle=True, seed=1, cache=cache)
        second = DataLoader(Dataset(pool, "rows"), 8, shuffle=True, seed=2, cache=cache)
        flat(first)
        read = cache.stats()["source_bytes"]
        flat(second)
        assert cache.stats()["source_bytes"] == read
        first.close()
        second.close()


class Opaque(Sampler[int]):
    """Somebody's own sampler: draws with repeats, another order every pass, counts its draws."""

    def __init__(self, count: int, seed: int) -> None:
        self._count, self._rng, self.drawn = count, np.random.default_rng(seed), 0

    def __iter__(self) -> Iterator[int]:
        for index in (self._count * self._rng.random(self._count) ** 2).astype(int).tolist():
            self.drawn += 1
            yield index

    def __len__(self) -> int:
        return self._count


def told(cache: Cache) -> int:
    """Requests that the cache knows to come."""
    assert cache._owned is not None
    (stock,) = cache._owned.core.stocks.values()
    with cache._owned.core.lock:
        return sum(stock.policy.expected(job.number) for job in stock.jobs.values())


@pytest.mark.parametrize("batch_size", [8, None])
def test_what_a_sampler_of_unknown_order_has_drawn_is_told(
    data: Dataset, batch_size: int | None
) -> None:
    """The same batches, no draw more than without a cache; up to the last one all are known."""
    chosen = list(range(0, COUNT, 2))
    for source in (data, Subset(data, chosen)):
        plain, ours = Opaque(len(source), 1), Opaque(len(source), 1)
        without = DataLoader(source, batch_size, sampler=plain, cache=0)
        with Cache(1 * MIB) as cache:
            loader = DataLoader(source, batch_size, sampler=ours, cache=cache)
            for _ in range(3):
                for batch, wanted in zip(loader, without, strict=True):
                    assert equal([batch], [wanted])
                    assert ours.drawn == plain.drawn
                assert told(cache) == 0
            assert cache.stats().get("order_left_total", 0) == 0
            assert cache.stats().get("turn_missed_total", 0) == 0
            loader.close()
        without.close()


def test_drawn_batches_are_known_before_they_are_made(
    data: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the first request of a run as many batches as the loader makes ahead."""
    seen: list[int] = []
    read = CachedRun.read

    def watched(self: CachedRun, *args: Any) -> bool:
        seen.append(told(cache))
        return read(self, *args)

    monkeypatch.setattr(CachedRun, "read", watched)
    with Cache(1 * MIB) as cache:
        loader = DataLoader(data, 4, sampler=Opaque(COUNT, 2), cache=cache, prefetch_factor=2)
        next(iter(loader))
        assert seen[0] >= 4 * 2 * 4
        loader.close()


def test_a_pass_that_is_broken_off_takes_what_it_drew_with_it(data: Dataset) -> None:
    """The next pass draws anew; nothing of the one before counts as an order that was left."""
    with Cache(1 * MIB) as cache:
        loader = DataLoader(data, 4, sampler=Opaque(COUNT, 3), cache=cache)
        plain = DataLoader(data, 4, sampler=Opaque(COUNT, 3), cache=0)
        for stop in (1, 3, COUNT):
            for one in (loader, plain):
                one.set_epoch(stop)
            pairs = zip(loader, plain, strict=False)
            for number, (batch, wanted) in enumerate(pairs):
                assert equal([batch], [wanted])
                if number == stop:
                    break
            del pairs
        assert cache.stats().get("order_left_total", 0) == 0
        loader.close()
        plain.close()


def test_what_was_drawn_reaches_the_owner_of_a_shared_cache_before_its_requests(
    data: Dataset, pool: Pool
) -> None:
    """By another connection than the requests, and all the same in time."""
    name = f"test-{os.getpid()}-drawn"
    with Cache(1 * MIB, share=name) as owner, Cache(1 * MIB, share=name) as cache:
        loader = DataLoader(Dataset(pool, "rows"), 4, sampler=Opaque(COUNT, 4), cache=cache)
        plain = DataLoader(data, 4, sampler=Opaque(COUNT, 4), cache=0)
        for _ in range(3):
            assert equal(list(loader), list(plain))
        assert owner.stats().get("order_left_total", 0) == 0
        assert owner.stats().get("turn_missed_total", 0) == 0
        loader.close()
        plain.close()
