"""A loop that is cut behind any of its batches, the last one of an epoch too, and resumed: sample
for sample what the loop that was not cut sees. (Case r3_end_of_epoch.)"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from hpstore.loaders import DataLoader, Dataset
from tests.integration.data_sets import make_pool
from tests.integration.loader_cases import PLAIN, labels, write
from tests.integration.test_loader_resume import Rows, Stream

COUNT, BATCH, EPOCHS = 23, 5, 3
STEPS = 5  # of an epoch, the last one short
Loop = Callable[[DataLoader, int], Iterator[tuple[int, Any]]]  # from an epoch on: epoch and batch


def plain(loader: DataLoader, start: int) -> Iterator[tuple[int, Any]]:
    for epoch in range(start, EPOCHS):
        for batch in loader:
            yield epoch, batch


def told(loader: DataLoader, start: int) -> Iterator[tuple[int, Any]]:
    for epoch in range(start, EPOCHS):
        loader.set_epoch(epoch)
        for batch in loader:
            yield epoch, batch


def sliced(loader: DataLoader, start: int) -> Iterator[tuple[int, Any]]:
    """Never asks for the end of an epoch that it reads whole."""
    for epoch in range(start, EPOCHS):
        for batch in islice(loader, STEPS):
            yield epoch, batch


def counted(loader: DataLoader, start: int) -> Iterator[tuple[int, Any]]:
    """Leaves the loop at the last batch."""
    for epoch in range(start, EPOCHS):
        for number, batch in enumerate(loader):
            yield epoch, batch
            if number + 1 == STEPS:
                break


def asked(loader: DataLoader, start: int) -> Iterator[tuple[int, Any]]:
    """An iterator made anew at each end, by steps."""
    run = iter(loader)
    for epoch in range(start, EPOCHS):
        while (batch := next(run, None)) is not None:
            yield epoch, batch
        run = iter(loader)


LOOPS: list[Loop] = [plain, told, sliced, counted, asked]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dataset]:
    with make_pool(Path(tmp_path_factory.mktemp("pool"))) as pool:
        yield write(pool, "a", PLAIN, COUNT)


def sampled(source: Any) -> DataLoader:
    return DataLoader(source, BATCH, sampler=list(reversed(range(COUNT))))


MAKERS: dict[str, Callable[[Dataset], DataLoader]] = {
    "native": lambda data: DataLoader(data, BATCH, shuffle=True, seed=3),
    "native, sampler": sampled,
    "foreign": lambda _: DataLoader(Rows(COUNT), BATCH, shuffle=True, seed=3),
    "foreign, sampler": lambda _: sampled(Rows(COUNT)),
    "foreign, workers": lambda _: DataLoader(Rows(COUNT), BATCH, shuffle=True, num_workers=1),
    "iterable": lambda _: DataLoader(Stream(), BATCH),
    "dropped": lambda data: DataLoader(data, 4, shuffle=True, drop_last=True),  # 5 a epoch, too
}


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
@pytest.mark.parametrize("kind", MAKERS)
def test_every_cut_of_every_loop_is_exact(data: Dataset, kind: str, loop: Loop) -> None:
    """The state and the epoch are saved in the loop, behind the batch."""
    make = MAKERS[kind]
    whole = [labels(batch) for _, batch in loop(make(data), 0)]
    assert len(whole) == EPOCHS * STEPS
    cuts = range(1, len(whole) + 1) if kind != "foreign, workers" else (4, 5, 6, 15)
    for cut in cuts:
        first = make(data)
        run = loop(first, 0)  # stays where it is, behind the batch
        taken = list(islice(run, cut))
        found, epoch = [labels(batch) for _, batch in taken], taken[-1][0]
        state = json.loads(json.dumps(first.state_dict()))
        assert (state["epoch"], "at_end" in state) in ((epoch, False), (epoch + 1, True))
        first.close()
        second = make(data)
        second.load_state_dict(state)
        found += [labels(batch) for _, batch in loop(second, epoch)]
        assert found == whole, cut
        second.close()


@pytest.mark.parametrize("kind", MAKERS)
def test_a_state_between_epochs_begins_the_next_one(data: Dataset, kind: str) -> None:
    """Saved behind the loop over an epoch: the next loop has all of the next one."""
    first = MAKERS[kind](data)
    whole = [[labels(batch) for batch in first] for _ in range(2)]
    state = first.state_dict()
    assert (state["epoch"], state["samples"]) == (2, 0)
    for again in (MAKERS[kind](data), copy.copy(first)):
        again.load_state_dict(state)
        assert [labels(batch) for batch in again] == [labels(batch) for batch in first]
        first.load_state_dict(state)
    assert len(whole[0]) == STEPS


def test_the_end_that_a_resumed_loop_finds_is_found_once(data: Dataset) -> None:
    """An iterator that is made and not asked; set_epoch on that epoch, on the next one, on another;
    a copy; a state that is saved again before anything is read."""

    def cut() -> DataLoader:
        first = DataLoader(data, BATCH, shuffle=True, seed=3)
        for _ in islice(first, STEPS):
            pass
        second = DataLoader(data, BATCH, shuffle=True, seed=3)
        second.load_state_dict(first.state_dict())
        assert second.state_dict() == first.state_dict()
        return second

    epochs = DataLoader(data, BATCH, shuffle=True, seed=3)
    wanted = [[labels(batch) for batch in epochs] for _ in range(3)]

    def read(loader: DataLoader) -> list[list[int]]:
        return [labels(batch) for batch in loader]

    loader = cut()
    assert (read(loader), read(loader), read(loader)) == ([], wanted[1], wanted[2])
    loader = cut()
    iter(loader)
    assert read(loader) == wanted[1]
    for epoch, found in ((0, []), (1, wanted[1]), (2, wanted[2])):
        loader = cut()
        loader.set_epoch(epoch)
        assert read(loader) == found
        assert read(loader) == wanted[1] if epoch == 0 else len(read(loader)) == STEPS
    loader = cut()
    twin = copy.copy(loader)
    assert (read(twin), read(twin)) == ([], wanted[1])
    assert (read(loader), read(loader)) == ([], wanted[1])


class Following(torch.utils.data.Sampler[int]):
    """As torch's DistributedSampler: its order follows the epoch that it was set to."""

    epoch = 0

    def __init__(self) -> None: ...

    def __iter__(self) -> Iterator[int]:
        return iter([(i + self.epoch) % COUNT for i in range(COUNT)])

    def __len__(self) -> int:
        return COUNT

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


@pytest.mark.parametrize("saved", [0, 1], ids=["the epoch of the loop", "the next epoch"])
@pytest.mark.parametrize("foreign", [False, True])
def test_a_sampler_that_the_user_sets_says_which_epoch_it_is(
    data: Dataset, foreign: bool, saved: int
) -> None:
    """Behind the last batch some save the epoch, some (Lightning) the one to go on with."""

    def loop(state: dict[str, Any] | None, start: int) -> Iterator[tuple[DataLoader, list[int]]]:
        sampler = Following()
        loader = DataLoader(Rows(COUNT) if foreign else data, BATCH, sampler=sampler)
        if state is not None:
            loader.load_state_dict(state)
        for epoch in range(start, EPOCHS):
            sampler.set_epoch(epoch)
            for batch in loader:
                yield loader, labels(batch)

    whole = [batch for _, batch in loop(None, 0)]
    for epoch in range(EPOCHS - 1):
        run = loop(None, 0)
        taken = list(islice(run, (epoch + 1) * STEPS))
        found = [batch for _, batch in taken]
        found += [batch for _, batch in loop(taken[-1][0].state_dict(), epoch + saved)]
        assert found == whole


def test_an_epoch_that_was_read_whole_can_be_read_again(data: Dataset) -> None:
    """In the same process nothing was resumed: set_epoch begins the epoch anew."""
    loader = DataLoader(data, BATCH, shuffle=True, seed=3)
    first = [labels(batch) for batch in islice(loader, STEPS)]
    loader.set_epoch(0)
    assert [labels(batch) for batch in loader] == first


def test_states_of_before_are_read(data: Dataset) -> None:
    """They say that the next epoch begins, behind the last batch too."""
    loader = DataLoader(data, BATCH, shuffle=True, seed=3)
    state = loader.state_dict() | {"epoch": 1, "samples": 0}
    assert "at_end" not in state
    loader.load_state_dict(state)
    assert len(list(loader)) == STEPS
    assert torch.is_tensor(next(iter(loader))["label"])
