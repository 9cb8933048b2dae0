"""What is foretold of torch's samplers is what they then yield, and what nobody kept is noticed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from hpstore.loaders.policy import CachePolicy
from hpstore.loaders.sampling.order import GlobalOrder
from hpstore.loaders.sampling.random_draws import Indices
from hpstore.loaders.sampling.rank_slices import Slices
from hpstore.loaders.sampling.sampler_replay import WatchedSampler, foretell, foretell_own

DATA: Any = list(range(103))
WEIGHTS = [1 + n % 7 for n in DATA]


def seeded() -> torch.Generator:
    """A generator of the test's own."""
    return torch.Generator().manual_seed(5)


# Any: torch's samplers
SAMPLERS: dict[str, Callable[[], Any]] = {
    "sequential": lambda: SequentialSampler(DATA),
    "random": lambda: RandomSampler(DATA, generator=seeded()),
    "random, several rounds": lambda: RandomSampler(DATA, num_samples=250, generator=seeded()),
    "random, few": lambda: RandomSampler(DATA, num_samples=10, generator=seeded()),
    "random, replaced": lambda: RandomSampler(
        DATA, replacement=True, num_samples=70, generator=seeded()
    ),
    "random, default generator": lambda: RandomSampler(DATA),
    "random, replaced, default generator": lambda: RandomSampler(DATA, replacement=True),
    "weighted": lambda: WeightedRandomSampler(WEIGHTS, 90, generator=seeded()),
    "weighted, unique": lambda: WeightedRandomSampler(WEIGHTS, 50, replacement=False),
    "subset": lambda: SubsetRandomSampler(DATA[3::2], generator=seeded()),
    "rank": lambda: DistributedSampler(DATA, num_replicas=4, rank=3, seed=9),
    "rank, cut": lambda: DistributedSampler(DATA, num_replicas=4, rank=1, drop_last=True),
    "rank, in order": lambda: DistributedSampler(DATA, num_replicas=8, rank=7, shuffle=False),
    "rank of more than there are samples": lambda: DistributedSampler(
        DATA[:3], num_replicas=8, rank=7
    ),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_torchs_samplers_yield_what_was_foretold_of_them(name: str) -> None:
    """One pass, also in batches with and without the last one; the sampler is not disturbed."""
    torch.manual_seed(1)
    sampler = SAMPLERS[name]()
    for _ in range(3):
        (order,) = foretell(sampler) or []
        assert list(sampler) == order.tolist()
    for drop_last in (False, True):
        batches = BatchSampler(sampler, 8, drop_last)
        (order,) = foretell(batches) or []
        assert [n for batch in batches for n in batch] == order.tolist()


@pytest.mark.parametrize("name", [n for n in SAMPLERS if "default" not in n and "unique" not in n])
def test_several_passes_are_foretold_where_the_generator_is_the_samplers_own(name: str) -> None:
    """Three passes at once, with set_epoch() between them where there is one."""
    sampler = SAMPLERS[name]()
    orders = foretell(sampler, 3)
    assert orders is not None
    for epoch, order in enumerate(orders):
        if isinstance(sampler, DistributedSampler):
            sampler.set_epoch(epoch)
        assert list(sampler) == order.tolist()
    assert len(orders) == 3


def test_of_torchs_default_generator_one_pass_is_known() -> None:
    """Anybody draws from it between two passes."""
    assert len(foretell(RandomSampler(DATA), 5) or []) == 1
    assert len(foretell(WeightedRandomSampler(WEIGHTS, 5), 5) or []) == 1


def test_nothing_is_foretold_of_subclasses_and_strangers() -> None:
    """They may yield anything."""

    class Odd(RandomSampler):
        def __iter__(self) -> Any:
            return iter([1, 2, 3])

    class Strange(Sampler[int]):
        def __iter__(self) -> Any:
            return iter([1])

    assert foretell(Odd(DATA)) is None
    assert foretell(Strange()) is None
    assert foretell(BatchSampler(Strange(), 2, False)) is None


@pytest.mark.parametrize("own", [True, False])
def test_a_watched_sampler_foretells_each_pass_of_torchs_loader(own: bool) -> None:
    """The loader draws seeds from the same generator; two passes ahead are right with that."""
    torch.manual_seed(3)
    told: list[list[Indices] | None] = []
    generator = seeded() if own else None
    sampler = RandomSampler(DATA, generator=generator)
    watched = WatchedSampler(sampler, told.append, 2, draws_between=1)
    loader = DataLoader(DATA, batch_size=10, sampler=watched, generator=generator)
    passes = [torch.cat(list(loader)).tolist() for _ in range(3)]
    for number, orders in enumerate(told):
        assert orders is not None
        assert len(orders) == (2 if own else 1)
        for order, served in zip(orders, passes[number:], strict=False):
            assert order.tolist() == served
    assert len(told) == len(passes)
    assert len(watched) == len(DATA)


@pytest.mark.parametrize("rank", range(3))
def test_our_own_order_is_foretold_from_any_position(rank: int) -> None:
    """This rank's share of what is left of an epoch, batch by batch."""
    order = GlobalOrder(50, seed=4)
    slices = Slices(length=50, batch_size=4, world_size=3, rank=rank, tail="uneven")
    whole = foretell_own(order, slices, 2)
    rest = foretell_own(order, slices, 2, 24)
    assert whole[-len(rest) :].tolist() == rest.tolist()
    everybody = [foretell_own(order, replace(slices, rank=r), 2) for r in range(3)]
    assert sorted(np.concatenate(everybody).tolist()) == list(range(50))


def test_a_sampler_that_breaks_its_word_is_unknown_from_then_on_and_counted() -> None:
    """Somebody draws from the generator in between; the next pass may be foretold anew."""
    policy = CachePolicy(1, len(DATA), 10)
    generator = seeded()
    sampler = RandomSampler(DATA, generator=generator)
    (order,) = foretell(sampler) or []
    policy.expect(0, order)
    torch.rand(1, generator=generator)
    served = np.array(list(sampler))
    policy.access(0, served[:20])
    assert policy.mismatched(0)
    assert policy.expected(0) == 0
    assert policy.counters["mismatches"] == 1
    policy.expect(0, order)  # not believed any more
    assert policy.expected(0) == 0
    policy.expect(0, None)
    (order,) = foretell(sampler) or []
    policy.expect(0, order)
    assert policy.expected(0) == len(DATA)
    policy.access(0, np.array(list(sampler)))
    assert (policy.expected(0), policy.mismatched(0)) == (0, False)
