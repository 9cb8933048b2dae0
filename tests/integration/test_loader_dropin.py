"""In the place of torch's DataLoader and torchdata's: what their suites and r7_dropin ask for."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.utils.data
from torch.utils.data import BatchSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from hpstore.errors import ConfigError
from hpstore.loaders import DataLoader
from hpstore.loaders.batching.worker_states import SAMPLER

COUNT = 20


def drawn(batches: Any) -> list[int]:
    return [int(value) for batch in batches for value in batch]


def saved(loader: DataLoader) -> Any:
    """As a checkpoint has it."""
    return json.loads(json.dumps(loader.state_dict()))


# --- arguments -------------------------------------------------------------------------------


def test_it_is_generic_as_torchs() -> None:
    """test_typing: in annotations, and called."""
    made = DataLoader[int]([1, 2, 3])
    assert drawn(made) == [1, 2, 3]
    assert DataLoader[list[torch.Tensor]] is not None


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_set_that_grows_has_longer_epochs(shuffle: bool, workers: int) -> None:
    """test_growing_dataset, r7: after construction, and between epochs; on ranks, too."""
    data = list(range(4))
    loader = DataLoader(data, shuffle=shuffle, num_workers=workers)
    data += [4, 5]
    sampler: Any = loader.sampler
    assert len(loader) == len(sampler) == 6
    assert sorted(drawn(loader)) == [0, 1, 2, 3, 4, 5]
    data.append(6)
    assert sorted(drawn(loader)) == list(range(7))
    again = DataLoader(data, shuffle=shuffle)
    again.load_state_dict(saved(loader))
    data.append(7)
    shares = [DataLoader(data, rank=rank, world_size=2) for rank in range(2)]
    data += [8, 9]
    assert sorted(drawn(shares[0]) + drawn(shares[1])) == list(range(10))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sampler": [0], "shuffle": True}, "sampler option is mutually exclusive with shuffle"),
        ({"batch_sampler": [[0]], "shuffle": True}, "batch_sampler option is mutually exclusive"),
        ({"batch_sampler": [[0]], "batch_size": 3}, "batch_sampler option is mutually exclusive"),
        ({"batch_sampler": [[0]], "drop_last": 3}, "batch_sampler option is mutually exclusive"),
        ({"batch_size": None, "drop_last": True}, "batch_size=None option disables"),
        ({"num_workers": -1}, "num_workers option should be non-negative"),
        ({"timeout": -1}, "timeout option should be non-negative"),
    ],
)
def test_errors_have_torchs_words(options: dict[str, Any], said: str) -> None:
    """test_invalid_ctor_args_combinations."""
    with pytest.raises(ValueError, match=said):
        DataLoader([1, 2], **options)


class Numbers(torch.utils.data.IterableDataset[int]):
    """Stateful as torchdata's tests have it: by itself, and with an epoch."""

    def __init__(self) -> None:
        self.at = self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < COUNT:
            self.at += 1
            yield 100 * self.epoch + self.at - 1
        self.at, self.epoch = 0, self.epoch + 1

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at, self.epoch = state["at"], state["epoch"]


@pytest.mark.parametrize("name", ["shuffle", "sampler", "batch_sampler"])
def test_an_iterable_decides_its_own_order(name: str) -> None:
    """shuffle=True had no effect and was not refused."""
    with pytest.raises(ConfigError, match=f"IterableDataset: expected unspecified {name} option"):
        DataLoader(Numbers(), **dict[str, Any]({name: 3}))


def test_an_iterator_has_what_torchs_has() -> None:
    """test_partial_workers looks at the processes, which end with it."""
    run = iter(DataLoader([1, 2, 3, 4], num_workers=2))
    workers = run._workers
    next(run)
    del run
    for worker in workers:
        worker.join(60)
        assert not worker.is_alive()
    with pytest.raises(AttributeError, match="no_such"):
        _ = iter(DataLoader([1])).no_such


# --- samplers that draw at random --------------------------------------------------------------

RANDOM: dict[str, Any] = {
    "random": lambda data, g: {"sampler": RandomSampler(data, generator=g)},
    "with replacement": lambda data, g: {"sampler": RandomSampler(data, True, 15, generator=g)},
    "subset": lambda data, g: {"sampler": SubsetRandomSampler(range(3, 18), generator=g)},
    "weighted": lambda data, g: {"sampler": WeightedRandomSampler([1.0] * COUNT, 14, generator=g)},
    "in a batch sampler": lambda data, g: {
        "batch_sampler": BatchSampler(RandomSampler(data, generator=g), 3, False),
        "batch_size": 1,
    },
}


@pytest.mark.parametrize("seeded", [False, True])
@pytest.mark.parametrize("name", RANDOM)
def test_a_random_sampler_is_resumed_sample_for_sample(name: str, seeded: bool) -> None:
    """r7, 23 of 100 samples were lost or repeated. Cut in the second epoch, and at its border."""

    def make() -> DataLoader:
        data = list(range(COUNT))
        generator = torch.Generator().manual_seed(5) if seeded else None
        options = {"batch_size": 3, **RANDOM[name](data, generator)}
        return DataLoader(data, **options)

    for cut in range(5):
        loader = make()
        first = drawn(loader)
        run = iter(loader)
        for _ in range(cut):
            next(run)
        state = saved(loader)
        rest = drawn(run)
        again = make()
        again.load_state_dict(state)
        assert drawn(again) == rest
        assert first != rest
        if seeded:  # the epochs that follow go on, too
            assert drawn(again) == drawn(loader)
    at_border = saved(loader)
    again = make()
    again.load_state_dict(at_border)
    if seeded:
        assert drawn(again) == drawn(loader)


def test_a_sampler_without_a_generator_gets_it_back() -> None:
    """It stays unseeded: torch.manual_seed decides, as in torch, and another epoch is another."""
    data = list(range(COUNT))
    sampler = RandomSampler(data)
    loader = DataLoader(data, 5, sampler=sampler)
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(drawn(loader))
    assert runs[0] == runs[1] != runs[2]
    other = DataLoader(data, 5, sampler=sampler)
    assert drawn(other) != drawn(other)


def test_an_older_state_of_a_random_sampler_is_said(caplog: pytest.LogCaptureFixture) -> None:
    data = list(range(COUNT))
    loader = DataLoader(data, 5, sampler=RandomSampler(data))
    next(iter(loader))
    state = saved(loader)
    del state[SAMPLER]
    with caplog.at_level(logging.WARNING, logger="hpstore"):
        DataLoader(data, 5, sampler=RandomSampler(data)).load_state_dict(state)
    assert "knows nothing of its random RandomSampler" in caplog.text


class Counted(torch.utils.data.Dataset[int]):
    """Counts what is read of it."""

    def __init__(self) -> None:
        self.read = 0

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> int:
        self.read += 1
        return index


def test_samples_before_the_position_of_a_sampler_are_not_read() -> None:
    """Its indices are drawn again, the data are not read again."""
    loader = DataLoader(Counted(), 3, sampler=range(COUNT))
    run = iter(loader)
    next(run), next(run)
    data = Counted()
    again = DataLoader(data, 3, sampler=range(COUNT))
    again.load_state_dict(saved(loader))
    assert drawn(again) == list(range(6, COUNT))
    assert data.read == COUNT - 6


# --- states of data sets -----------------------------------------------------------------------


@pytest.mark.parametrize("cut", [0, 1, 4, 10])
def test_a_stateful_data_set_goes_on_by_its_state(cut: int) -> None:
    """In the second epoch, which its state alone knows of; nothing is read again."""
    loader = DataLoader(Numbers(), 2)
    assert drawn(loader) == list(range(COUNT))
    run = iter(loader)
    for _ in range(cut):
        next(run)
    state = saved(loader)
    rest = drawn(run)
    again = DataLoader(Numbers(), 2)
    again.load_state_dict(state)
    assert drawn(again) == rest
    assert drawn(again) == drawn(loader)
    assert again.skipped_batches_total == 0


class Own:
    """An iterator that has the state."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Own:
        return self

    def __next__(self) -> int:
        if self.at >= COUNT:
            raise StopIteration
        self.at += 1
        return self.at - 1

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Iterated(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Any:
        return Own()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_iterator_goes_on_by_its_state(workers: int) -> None:
    """Its own, or each worker's; nothing is read again."""
    loader = DataLoader(Iterated(), 3, num_workers=workers)
    run = iter(loader)
    next(run), next(run), next(run)
    state = saved(loader)
    rest = drawn(run)
    again = DataLoader(Iterated(), 3, num_workers=workers)
    again.load_state_dict(state)
    assert drawn(again) == rest
    assert again.skipped_batches_total == 0


# --- random numbers of workers -----------------------------------------------------------------


class Noisy(torch.utils.data.Dataset[Any]):
    """Of torch, numpy and random, as an augmentation draws them."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        import random

        import numpy as np

        return torch.tensor([torch.rand(()).item(), np.random.rand(), random.random()])


def noise(loader: Any) -> list[list[float]]:
    return [row.tolist() for batch in loader for row in batch]


def test_seeds_of_workers_are_repeatable() -> None:
    """Of all three kinds, whatever was drawn before; others for another epoch, rank or seed. The
    global generator of the trainer is not drawn from."""
    torch.manual_seed(1)
    loader = DataLoader(Noisy(), 5, num_workers=2)
    first, second = noise(loader), noise(loader)
    assert torch.initial_seed() == 1
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(1)))
    assert noise(DataLoader(Noisy(), 5, num_workers=2)) == first
    later = DataLoader(Noisy(), 5, num_workers=2)
    later.set_epoch(1)
    assert noise(later) == second
    others = [
        second,
        noise(DataLoader(Noisy(), 5, num_workers=2, seed=1)),
        noise(DataLoader(Noisy(), 5, num_workers=2, shard=True, rank=1, world_size=2)),
    ]
    for other in others:
        assert not {value for row in other for value in row} & {v for row in first for v in row}


def test_persistent_workers_begin_again_where_a_state_is_loaded() -> None:
    """TestSnapshotZero: they went on with the random numbers, and the data sets, that they had."""
    loader = DataLoader(Noisy(), 4, num_workers=2, persistent_workers=True)
    state = saved(loader)
    first = noise(loader)
    loader.load_state_dict(state)
    assert noise(loader) == first
