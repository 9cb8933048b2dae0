"""What users give a loader, and what it must not do with it in silence."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, Subset, get_worker_info

import hpstore
from hpstore.errors import ConfigError
from hpstore.loaders import DataLoader, Dataset, DatasetWriter, Field, LoaderMemory, Mixture
from hpstore.loaders.batching.batch_queue import Pipeline
from hpstore.loaders.sampling.batch_plan import BatchPiece, pieces
from hpstore.loaders.sampling.rank_slices import Slices
from hpstore.loaders.sampling.window_shuffle import WindowOrder
from hpstore.units import KIB

COUNT = 100


@pytest.fixture
def data(pool: hpstore.Pool) -> Iterator[Dataset]:
    fields = {"x": Field("uint8", (8 * KIB,)), "i": Field("int64")}
    with DatasetWriter(pool, "d", fields, unit_bytes=64 * KIB) as out:
        out.write_batch({"x": np.zeros((COUNT, 8 * KIB), np.uint8), "i": np.arange(COUNT)})
    with Dataset(pool, "d") as opened:
        yield opened


class Foreign(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


@pytest.mark.parametrize(
    ("name", "value"),
    [("transform", abs), ("batch_transform", abs), ("device", "cpu"), ("on_error", "skip")],
)
def test_what_is_for_our_data_sets_is_refused_for_others(name: str, value: Any) -> None:
    """Not left out in silence."""
    with pytest.raises(ConfigError, match=f"{name}: for data sets of hpstore alone.*Foreign"):
        DataLoader(Foreign(), batch_size=3, **{name: value})
    assert len(list(DataLoader(Foreign(), batch_size=3))) == 2


class Uneven(IterableDataset[int]):
    """Two workers take five samples each: three batches of four would do, they make four."""

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is not None
        yield from range(info.id * 5, info.id * 5 + 5)


def test_a_resumed_iterable_loses_none_of_what_its_workers_had_left() -> None:
    """torch's len() counts the batches of one process."""

    def made() -> DataLoader:
        return DataLoader(Uneven(), batch_size=4, num_workers=2)

    loader = made()
    running = iter(loader)
    given = [next(running).tolist() for _ in range(3)]
    state = loader.state_dict()
    again = made()
    again.load_state_dict(state)
    rest = [batch.tolist() for batch in again]
    assert sorted(i for batch in [*given, *rest] for i in batch) == list(range(10))
    assert again.state_dict()["epoch"] == 1


@pytest.mark.parametrize("name", ["collate_fn", "batch_transform"])
def test_a_batch_that_is_none_is_a_batch(data: Dataset, name: str) -> None:
    numbers = iter(range(1000))
    given: dict[str, Any] = {name: lambda batch: None if next(numbers) % 2 else 1}
    found = list(DataLoader(data, 10, num_workers=1, **given))
    assert len(found) == 10
    assert found.count(None) == 5


@pytest.mark.parametrize("name", ["transform", "collate_fn", "batch_transform"])
def test_stop_iteration_of_a_function_ends_no_epoch(data: Dataset, name: str) -> None:
    left = iter(range(3))

    def function(value: Any) -> Any:
        next(left)
        return value

    given: dict[str, Any] = {name: function}
    with pytest.raises(RuntimeError, match="raised StopIteration"):
        list(DataLoader(data, 10, num_workers=1, **given))


def test_an_interrupt_in_the_order_ends_no_epoch() -> None:
    """Nor is the batch lost in whose taking it came."""
    whole = Slices(length=100, batch_size=10, drop_last=False)

    def todo() -> Iterator[BatchPiece]:
        for number, piece in enumerate(pieces(whole, 0, 0, single=False)):
            if number == 4:
                raise KeyboardInterrupt
            yield piece

    pipeline = Pipeline(todo(), lambda piece: piece.start, depth=3, threads=1)
    taken = []
    for _ in range(5):
        try:
            taken.append(pipeline.take()[1])
        except KeyboardInterrupt:
            taken.append(-1)
    assert sorted(taken) == [-1, 0, 10, 20, 30]
    assert pipeline.cut_short
    pipeline.close()


class Sampler(torch.utils.data.Sampler[list[int]]):
    """Batches of ten in order; asked for the sixth, it interrupts."""

    def __init__(self, *, interrupts: bool) -> None:
        self._interrupts = interrupts

    def __iter__(self) -> Iterator[list[int]]:
        for first in range(0, COUNT, 10):
            if first == 50 and self._interrupts:
                signal.raise_signal(signal.SIGINT)
            yield list(range(first, first + 10))

    def __len__(self) -> int:
        return 10


def until_it_fails(loader: DataLoader, seen: list[int]) -> None:
    """By a user who catches interrupts and goes on."""
    running = iter(loader)
    while True:
        try:
            seen += next(running)["i"].tolist()
        except KeyboardInterrupt:
            continue


def test_a_loader_that_was_interrupted_in_the_order_says_so(data: Dataset) -> None:
    """The epoch does not seem to be over, and its state goes on after what was handed out."""
    loader = DataLoader(
        data, batch_sampler=Sampler(interrupts=True), memory=LoaderMemory(prefetch_bytes="1KiB")
    )
    seen: list[int] = []
    with pytest.raises(RuntimeError, match="the epoch is not over"):
        until_it_fails(loader, seen)
    loader.close()
    again = DataLoader(data, batch_sampler=Sampler(interrupts=False))
    again.load_state_dict(loader.state_dict())
    assert seen + [i for batch in again for i in batch["i"].tolist()] == list(range(COUNT))
    assert 0 < len(seen) < COUNT


@pytest.mark.parametrize("subset", [False, True])
@pytest.mark.parametrize("stripes", [np.array([0, 50, 100]), np.arange(0, 101, 5)])
def test_windows_over_other_stripes_are_read_record_by_record(
    data: Dataset, stripes: Any, subset: bool
) -> None:
    """An order of one's own: nobody would load the pages that it waits for."""
    over: Any = Subset(data, range(COUNT)) if subset else data
    order = WindowOrder(stripes, 0, window_stripes=1)
    loader = DataLoader(over, 10, shuffle=order, cache=0, timeout=20)
    seen = [i for batch in loader for i in batch["i"].tolist()]
    assert sorted(seen) == list(range(COUNT))
    assert loader.stats()["mode"] == "records"
    own = DataLoader(
        over, 10, shuffle="window", memory=LoaderMemory(window_bytes=1), cache=0, timeout=20
    )
    assert sorted(i for batch in own for i in batch["i"].tolist()) == list(range(COUNT))
    assert own.stats()["mode"] == "window"


class Backwards:
    """A batch sampler that does not say how many samples it takes, and counts from the end."""

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return COUNT // self._rows

    def __iter__(self) -> Iterator[list[int]]:
        for first in range(0, COUNT, self._rows):
            yield list(range(-1 - first, -1 - first - self._rows, -1))


@pytest.mark.parametrize("part", [False, True])
def test_negative_indices_of_a_sampler_count_from_the_end(data: Dataset, part: bool) -> None:
    """As torch's loader hands them to a map-style data set, to a Subset too."""
    source: Any = Subset(data, range(COUNT)) if part else data
    ours = [batch["i"].tolist() for batch in DataLoader(source, batch_sampler=Backwards(10))]
    theirs = torch.utils.data.DataLoader(source, batch_sampler=Backwards(10))
    assert ours == [batch["i"].tolist() for batch in theirs]
    assert ours[0][:2] == [99, 98]


def test_indices_of_a_subset_are_those_of_a_list(data: Dataset) -> None:
    """Negative ones count from the end, of what it is a part of; mixed, too. What is no whole
    number is refused: 1.5 was sample 1. Another data set's keys are its own matter."""
    part: Any = Subset(Subset(data, [5, -1, 7]), [-1, 1, 0])
    wanted = [7, COUNT - 1, 5]
    for source in (part, Mixture([part], [1])):
        assert [int(n) for b in DataLoader(source, 2) for n in b["i"]] == wanted
    bad: Any
    for bad in ([1.5], [True], ["a"], [COUNT], [-COUNT - 1], [2**64]):
        for make in (lambda data: DataLoader(data, 2), lambda data: Mixture([data], [1])):
            with pytest.raises(ConfigError, match=r"whole number|a Subset"):
                make(Subset(data, bad))
    with pytest.raises(ConfigError, match="whole number"):
        list(DataLoader(data, batch_sampler=[[0.5, 1]]))
    keyed: Any = Subset({"a": 1, "b": 2}, ["b", "a"])  # type: ignore[arg-type,list-item]
    assert list(DataLoader(keyed, None)) == [2, 1]


def test_an_index_beyond_either_end_is_refused(data: Dataset) -> None:
    for bad in (COUNT, -COUNT - 1):
        with pytest.raises(IndexError):
            list(DataLoader(data, batch_sampler=[[0, bad]]))


def test_batches_of_a_batch_sampler_keep_the_memory_for_batches(pool: hpstore.Pool) -> None:
    """It need not say how large they are: the first one does. 16 of the largest took 112 MiB."""
    with DatasetWriter(pool, "large", {"x": Field("uint8", (110 * KIB,))}) as out:
        out.write_batch({"x": np.zeros((COUNT, 110 * KIB), np.uint8)})
    with Dataset(pool, "large") as data:
        ahead = []
        # slots of 1, 2 and 6 MiB; half of the memory, and room for four, is the user's
        for rows, memory in ((1, "48MiB"), (10, "48MiB"), (50, "48MiB"), (50, "40MiB")):
            loader = DataLoader(
                data, batch_sampler=Backwards(rows), memory=LoaderMemory(prefetch_bytes=memory)
            )
            with contextlib.closing(loader):
                run = iter(loader)
                assert len(next(run)["x"]) == rows
                ahead.append(next(iter(loader._runs))._pipeline._depth)
                assert sum(len(batch["x"]) for batch in run) == COUNT - rows
    assert ahead == [16, 12, 4, 2]


@pytest.mark.parametrize("native", [True, False])
def test_an_epoch_that_is_asked_for_in_the_midst_of_another_is_the_next(
    data: Dataset, native: bool
) -> None:
    """As with torch's samplers: the one under way ends as it is, the next iter() is of that one."""
    source: Any = data if native else Foreign()
    wanted = DataLoader(source, 2, shuffle=True, seed=1)
    wanted.set_epoch(7)
    loader = DataLoader(source, 2, shuffle=True, seed=1)
    for number, _ in enumerate(loader):
        if number == 1:
            loader.set_epoch(7)
    assert str(list(loader)) == str(list(wanted))
    assert loader.state_dict()["epoch"] == 8
    for number, _ in enumerate(loader):
        if number == 1:
            loader.set_epoch(7)
            break
    assert loader.state_dict()["epoch"] == 7
    assert len(list(loader)) == len(loader)
    assert loader.state_dict()["epoch"] == 8


def test_a_mixture_of_something_else_is_refused_by_name(data: Dataset) -> None:
    with pytest.raises(ConfigError, match="this is a list"):
        Mixture([data, [1, 2]], [1.0, 1.0])


def test_a_loop_within_a_loop_has_whole_epochs(data: Dataset) -> None:
    """The outer loop went on after the inner one had ended: the next inner one began where the
    outer one stood, and lacked what is before."""
    for dataset in (data, Foreign()):
        loader = DataLoader(dataset, batch_size=max(1, len(dataset) // 3))
        inner = [len(list(loader)) for _ in loader]
        assert set(inner) == {len(loader)}
        loader.close()


def test_an_index_that_is_no_whole_number_names_no_sample(data: Dataset) -> None:
    """1.5 was sample 1, and of [3, 4] the second was left out."""
    bad: Any
    for bad in (1.5, "1", None, [3, 4], slice(0, 3), np.array([1, 2])):
        with pytest.raises(ConfigError, match="whole number"):
            data[bad]
    for bad in ([1.5], ["1"], [True, False], [1, None], [Decimal("1.5"), 2]):
        with pytest.raises(ConfigError, match="whole numbers"):
            data.__getitems__(bad)
    for bad in ([2**63, -1], np.array([2**64 - 1], np.uint64), [COUNT]):
        with pytest.raises(IndexError):
            data.__getitems__(bad)
    for number in (10**20, -(10**20), COUNT, -COUNT - 1):
        with pytest.raises(IndexError):
            data[number]
    good: tuple[Any, ...] = (torch.tensor(3), np.int8(3), -1)
    assert [data[index]["i"] for index in good] == [3, 3, 99]
