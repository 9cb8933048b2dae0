"""Global batches and the slices of ranks; runs that are cut and go on with another world size."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler
from torch.utils.data.distributed import DistributedSampler

from hpstore.errors import ConfigError
from hpstore.loaders.sampling.loader_state import LoaderState, order_text
from hpstore.loaders.sampling.mixture_order import MixtureOrder
from hpstore.loaders.sampling.order import GlobalOrder, Order, SequentialOrder, SubsetOrder
from hpstore.loaders.sampling.rank_slices import Slices, Tail, wrapped
from hpstore.loaders.sampling.weighted import WeightedOrder
from hpstore.loaders.sampling.window_shuffle import WindowOrder

lengths = st.integers(0, 120)
worlds = st.integers(1, 9)
batches = st.integers(1, 12)
tails = st.sampled_from(["pad", "drop", "uneven"])

KINDS: dict[str, Callable[[int], Order]] = {
    "sequential": SequentialOrder,
    "global": lambda n: GlobalOrder(n, 3),
    "network": lambda n: GlobalOrder(n, 3, table_samples=0),
    "window": lambda n: WindowOrder(np.minimum(np.arange(0, n + 7, 7), n), 3, window_stripes=4),
    "weighted": lambda n: WeightedOrder(np.arange(1, n + 2), n, 3),
    "unique": lambda n: WeightedOrder(np.arange(1, n + 2), n, 3, replacement=False),
    "mixture": lambda n: MixtureOrder(
        [GlobalOrder(n + 1, 1), SequentialOrder(5)], [2, 1], 3, length=n + 3, block=8
    ),
    "subset": lambda n: SubsetOrder(GlobalOrder(n, 1), np.arange(n) * 2, samples=2 * n),
}


def world(
    length: int, batch: int, ranks: int, *, drop_last: bool = False, tail: Tail = "uneven"
) -> list[Slices]:
    """The slices of all ranks."""
    return [
        Slices(
            length=length,
            batch_size=batch,
            world_size=ranks,
            rank=rank,
            drop_last=drop_last,
            tail=tail,
        )
        for rank in range(ranks)
    ]


def state_of(order: Order, epoch: int, samples: int) -> dict[str, object]:
    """What a loader of this order saves."""
    return LoaderState(
        fingerprints=("f",), order=order_text(order), seed=3, epoch=epoch, samples=samples
    ).to_dict()


def positions(slices: Slices, position: int, number: int = 0) -> list[int]:
    """Positions of a rank's rows in a step."""
    step = slices.step(position, number)
    ranges = wrapped(step.start, step.stop, slices.length)
    return [at for low, high in ranges for at in range(low, high)]


@given(lengths, batches, worlds, st.integers(0, 120))
def test_steps_tile_the_rest_of_the_epoch(
    length: int, batch: int, ranks: int, position: int
) -> None:
    """In rank order, each step in full rows but the last, whose rows differ by one at most and
    never grow with the rank."""
    every = world(length, batch, ranks)
    at = position
    for number in range(every[0].steps(position)):
        rows = [positions(one, position, number) for one in every]
        assert list(chain(*rows)) == list(range(at, min(length, at + batch * ranks)))
        sizes = [len(row) for row in rows]
        assert sizes == sorted(sizes, reverse=True)
        assert max(sizes) - min(sizes) <= 1
        assert max(sizes) <= batch
        at = every[0].step(position, number).after
    assert at == max(length, position)
    assert [one.own_steps(position) for one in every] == [
        sum(1 for n in range(one.steps(position)) if positions(one, position, n)) for one in every
    ]


@given(lengths, batches, worlds, tails, st.booleans(), st.integers(0, 120))
def test_padded_and_dropped_tails_give_ranks_equally_many_rows_in_every_step(
    length: int, batch: int, ranks: int, tail: Tail, drop_last: bool, position: int
) -> None:
    """pad: everything is read, and some first positions again. drop, drop_last: a few are not."""
    every = world(length, batch, ranks, drop_last=drop_last, tail=tail)
    read: list[int] = []
    for number in range(every[0].steps(position)):
        rows = [positions(one, position, number) for one in every]
        if tail != "uneven" or drop_last:
            assert len({len(row) for row in rows}) == 1
            assert rows[0]
        read += list(chain(*rows))
    rest = list(range(position, length))
    if drop_last:
        assert read == rest[: len(rest) // (batch * ranks) * batch * ranks]
    elif tail == "pad":
        assert read[: len(rest)] == rest
        extra = read[len(rest) :]
        assert len(extra) < ranks
        assert extra == [n % length for n in range(len(extra))]
    elif tail == "drop":
        assert read == rest[: len(read)]
        assert len(rest) - len(read) < ranks


@given(lengths, batches, worlds, st.booleans())
@example(3, 4, 9, False)
@example(0, 1, 2, False)
def test_ranks_have_as_many_rows_as_torchs_distributed_sampler_gives_them(
    length: int, batch: int, ranks: int, drop: bool
) -> None:
    """As DistributedSampler with "pad", as with its drop_last=True with "drop": each rank has as
    many rows in as many batches, and all ranks together have the same rows as often. In batches of
    one sample each rank has the very same rows in the same order."""
    tail: Tail = "drop" if drop else "pad"
    every = world(length, batch, ranks, tail=tail)
    rows: list[list[int]] = []
    theirs: list[list[int]] = []
    for one in every:
        samples: Any = range(length)
        sampler: Any = DistributedSampler(samples, ranks, one.rank, shuffle=False, drop_last=drop)
        theirs.append(list(sampler))
        sizes = [len(chunk) for chunk in BatchSampler(sampler, batch, drop_last=False)]
        steps = [positions(one, 0, number) for number in range(one.own_steps())]
        assert [len(step) for step in steps] == sizes
        rows.append(list(chain(*steps)))
    assert Counter(chain(*rows)) == Counter(chain(*theirs))
    if batch == 1:
        assert rows == theirs


@given(st.integers(1, 120), st.lists(st.tuples(batches, worlds, st.integers(0, 9)), max_size=8))
def test_a_cut_run_that_pads_reads_all_and_repeats_the_first_positions(
    length: int, runs: list[tuple[int, int, int]]
) -> None:
    """Whatever the worlds in between: each epoch in order, then fewer of its first positions than
    the world that ended it has ranks."""
    read: list[list[int]] = [[], []]
    ended_by = [0, 0]
    epoch = at = 0
    for batch, ranks, steps in [*runs, (4, 2, 10**6)]:
        every = world(length, batch, ranks, tail="pad")
        for _ in range(steps):
            if epoch == 2:
                break
            read[epoch] += chain(*(positions(one, at) for one in every))
            ended_by[epoch] = ranks
            epoch, at = every[0].advance(epoch, at)
    for rows, ranks in zip(read, ended_by, strict=True):
        assert rows[:length] == list(range(length))
        assert rows[length:] == [n % length for n in range(len(rows) - length)]
        assert len(rows) - length < ranks


@given(
    st.sampled_from(sorted(KINDS)),
    lengths,
    st.lists(st.tuples(batches, worlds, st.integers(0, 9)), min_size=1, max_size=8),
)
@example("global", 0, [(1, 1, 0)])
@example("network", 1, [(12, 9, 0)])
def test_a_run_that_is_cut_reads_what_an_uninterrupted_one_reads(
    kind: str, length: int, runs: list[tuple[int, int, int]]
) -> None:
    """Any number of cuts, each going on with another world and batch size from JSON, through the
    edges of epochs: laid end to end, the slices of all ranks are the order itself."""
    read: list[list[int]] = [[] for _ in range(4)]
    state = state_of(KINDS[kind](length), 0, 0)
    for batch, ranks, steps in [*runs, (5, 3, 10**6)]:
        order = KINDS[kind](length)  # another process
        saved = LoaderState.from_dict(json.loads(json.dumps(state)))
        saved.require_same_run(
            fingerprints=["f"], order=order_text(order), seed=3, length=order.length
        )
        epoch, at = saved.epoch, saved.samples
        every = world(order.length, batch, ranks)
        for _ in range(steps):
            if epoch == 3:
                break
            if every[0].steps(at):
                for one in every:
                    step = one.step(at)
                    read[epoch] += order.indices(epoch, step.start, step.stop).tolist()
                epoch, at = every[0].advance(epoch, at)
            else:
                epoch += 1  # an epoch without a batch
        state = state_of(order, epoch, at)
    whole = [KINDS[kind](length).indices(e, 0, order.length).tolist() for e in range(3)]
    assert read == [*whole, []]
    assert (state["epoch"], state["samples"]) == (3, 0)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_epochs_that_are_read_side_by_side_do_not_mix(kind: str) -> None:
    """What is kept of one epoch is not taken for another one's: reading ahead crosses epochs."""
    order, length = KINDS[kind](90), 90
    wholes = [KINDS[kind](90).indices(e, 0, length) for e in range(4)]
    for start in range(0, length, 10):
        for epoch in (0, 1, 3, 2, 0):
            found = order.indices(epoch, start, start + 10)
            assert np.array_equal(found, wholes[epoch][start : start + 10])


@given(st.integers(1, 120), st.lists(st.tuples(batches, worlds, st.integers(0, 9)), max_size=6))
def test_a_cut_run_that_drops_its_last_batch_loses_less_than_one(
    length: int, runs: list[tuple[int, int, int]]
) -> None:
    """What is read is the beginning of the epoch, whatever the worlds in between."""
    read: list[int] = []
    epoch = at = 0
    for batch, ranks, steps in [*runs, (4, 2, 10**6)]:
        every = world(length, batch, ranks, drop_last=True)
        for _ in range(min(steps, every[0].steps(at)) if not epoch else 0):
            read += chain(*(positions(one, at) for one in every))
            epoch, at = every[0].advance(epoch, at)
        last = batch * ranks
    assert read == list(range(len(read)))
    assert length - len(read) < max([batch * ranks for batch, ranks, _ in runs] + [last])


@given(lengths, batches, worlds, tails, st.booleans(), st.integers(0, 30))
def test_the_state_after_the_last_batch_is_the_next_epoch(
    length: int, batch: int, ranks: int, tail: Tail, drop_last: bool, number: int
) -> None:
    """(epoch + 1, 0) exactly then; a position that has batches left otherwise."""
    slices = world(length, batch, ranks, drop_last=drop_last, tail=tail)[0]
    steps = slices.steps()
    number = min(number, steps)
    epoch, at = slices.advance(4, 0, number)
    if number == steps:
        assert (epoch, at) == (5, 0)
    else:
        assert (epoch, at) == (4, number * batch * ranks)
        assert slices.steps(at) == steps - number
    with pytest.raises(IndexError, match=f"the epoch has {steps} more"):
        slices.advance(4, 0, steps + 1)


@given(st.integers(0, 60), st.integers(0, 60), st.integers(1, 20))
def test_wrapped_ranges_are_the_positions_modulo_the_length(
    start: int, count: int, length: int
) -> None:
    """Also several times round, when ranks outnumber the samples."""
    found = [n for low, high in wrapped(start, start + count, length) for n in range(low, high)]
    assert found == [n % length for n in range(start, start + count)]
    assert all(low < high for low, high in wrapped(start, start + count, length))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batch_size": 0}, "batches of 0"),
        ({"world_size": 0}, "0 ranks"),
        ({"rank": 2}, "rank 2 of 2"),
        ({"rank": -1}, "rank -1"),
        ({"tail": "odd"}, "pad, drop"),
        ({"length": -1}, "-1 pos"),
    ],
)
def test_slices_that_cannot_be_are_refused(options: dict[str, int], said: str) -> None:
    """By name and number."""
    with pytest.raises(ConfigError, match=said):
        Slices(**{"length": 5, "batch_size": 2, "world_size": 2, **options})  # type: ignore[arg-type]


def test_a_rank_without_rows_yields_nothing() -> None:
    """Five positions on four ranks of batch four: 2, 1, 1, 1 rows; three on four: one has none."""
    assert [len(positions(one, 0)) for one in world(5, 4, 4)] == [2, 1, 1, 1]
    three = world(3, 4, 4)
    assert [len(positions(one, 0)) for one in three] == [1, 1, 1, 0]
    assert [one.steps() for one in three] == [1, 1, 1, 1]
    assert [one.own_steps() for one in three] == [1, 1, 1, 0]
