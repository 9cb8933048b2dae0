"""Data sets with a state in torch's workers: what each worker stood at is saved and put back.

Case data 6: it was read again, or lost. Names in the state are those of torchdata.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data

from hpstore.errors import ConfigError
from hpstore.loaders import DataLoader
from hpstore.loaders.batching.worker_states import WorkerStates
from hpstore.loaders.sampling.random_states import random_state, set_random_state
from tests.thorough import some_of

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
SIZES = (13, 4, 9)  # of the parts of the workers: the second ends with a whole batch, long before


def noise() -> list[float]:
    return [torch.rand(()).item(), np.random.rand(), random.random()]


class Parts(torch.utils.data.IterableDataset[Any]):
    """Each worker reads its part, with random numbers; where it is, is its own state."""

    def __init__(self) -> None:
        self.at = 0

    def part(self) -> tuple[int, int]:
        info = torch.utils.data.get_worker_info()
        if info is None:
            return 0, SIZES[0]
        assert info.dataset is self
        return info.id, SIZES[info.id]

    def __iter__(self) -> Iterator[Any]:
        worker, size = self.part()
        while self.at < size:
            self.at += 1
            yield torch.tensor([100 * worker + self.at, *noise()])
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Itself(Parts):
    """Its own iterator, as torchdata's tests have it."""

    def __iter__(self) -> Iterator[Any]:
        self.worker, self.size = self.part()
        return self

    def __next__(self) -> Any:
        if self.at >= self.size:
            raise StopIteration
        self.at += 1
        return torch.tensor([100 * self.worker + self.at, *noise()])


class Mapped(torch.utils.data.Dataset[Any]):
    """Counts in each worker what it was asked for."""

    def __init__(self) -> None:
        self.asked = 0

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> Any:
        self.asked += 1
        return torch.tensor([index, self.asked, *noise()])

    def state_dict(self) -> dict[str, int]:
        return {"asked": self.asked}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.asked = state["asked"]


def rows(batches: Any) -> list[Any]:
    return [batch.tolist() for batch in batches]


def cut(loader: Any, batches: int) -> tuple[list[Any], Any]:
    """The first ones of a loop that is left by `break`, and the state behind them."""
    found = []
    for batch in loader:
        found.append(batch.tolist())
        if len(found) == batches:
            break
    return found, json.loads(json.dumps(loader.state_dict()))


KINDS: dict[str, Callable[..., Any]] = {
    "iterable": lambda **more: DataLoader(Parts(), 2, **more),
    "itself": lambda **more: DataLoader(Itself(), 2, **more),
    "mapped": lambda **more: DataLoader(Mapped(), 2, shuffle=True, **more),
    "sampler": lambda **more: DataLoader(
        Mapped(), 2, sampler=torch.utils.data.SequentialSampler(range(23)), **more
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_workers_go_on_where_each_of_them_stood(kind: str) -> None:
    """Sample for sample and random number for random number, nothing read again, at cuts before
    and behind the end of a worker's part; a second cut goes on from the first one."""
    options: dict[str, Any] = {"num_workers": 3}
    whole = rows(KINDS[kind](**options))
    for first, more in ((1, 1), (4, 6), (len(whole) - 2, 1)):
        begun, state = cut(KINDS[kind](**options), first)
        again = KINDS[kind](**options)
        again.load_state_dict(state)
        then, state = cut(again, more)
        last = KINDS[kind](**options)
        last.load_state_dict(state)
        assert begun + then + rows(last) == whole
        assert again.skipped_batches_total == last.skipped_batches_total == 0


@pytest.mark.parametrize(
    ("every", "kind"), some_of([(e, k) for e in (3, 7) for k in ("iterable", "itself")], 0, 3)
)
def test_states_are_sent_every_few_steps(kind: str, every: int) -> None:
    """snapshot_every_n_steps: a worker reads what lies behind its last state again, by itself."""
    options: dict[str, Any] = {"num_workers": 3, "snapshot_every_n_steps": every}
    whole = [[row[0] for row in batch] for batch in rows(KINDS[kind](**options))]
    for at in (2, 6, 8, len(whole) - 1):
        begun, state = cut(KINDS[kind](**options), at)
        again = KINDS[kind](**options)
        again.load_state_dict(state)
        assert [[row[0] for row in batch] for batch in begun + rows(again)] == whole


def test_persistent_workers_in_a_later_epoch() -> None:
    """What they have kept from the epoch before is in their states."""
    loader = DataLoader(Mapped(), 2, num_workers=2, persistent_workers=True)
    rows(loader)
    begun, state = cut(loader, 5)
    assert begun[0][0][1] == 13  # asked for twelve in the first epoch
    again = DataLoader(Mapped(), 2, num_workers=2, persistent_workers=True)
    again.load_state_dict(state)
    assert rows(again)[0][0][1] == 11 + 4 + 1  # of worker 1, which had two of the five batches


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_sampler_goes_on_behind_what_was_read(workers: int) -> None:
    """Of a plain data set: with workers it began again, since torch's iterator asks it twice."""

    def made() -> DataLoader[Any]:
        sampler = torch.utils.data.SequentialSampler(range(23))
        return DataLoader(list(range(23)), 2, sampler=sampler, num_workers=workers)

    begun, state = cut(made(), 3)
    again = made()
    again.load_state_dict(state)
    assert begun + rows(again) == rows(made())


def test_a_data_set_of_this_process_keeps_its_iterator_beyond_a_break() -> None:
    """Its state was saved without the iterator's, and samples were lost when it was resumed."""
    whole = [row[0] for batch in rows(DataLoader(Parts(), 2)) for row in batch]
    begun, state = cut(DataLoader(Parts(), 2), 3)
    again = DataLoader(Parts(), 2)
    again.load_state_dict(state)
    assert [row[0] for batch in begun + rows(again) for row in batch] == whole


def test_the_state_has_torchdatas_names() -> None:
    """Where other programs look for them; none without workers' states."""
    _, state = cut(KINDS["itself"](num_workers=2), 3)
    workers = state["_snapshot"]["_worker_snapshots"]
    assert list(workers) == ["worker_0", "worker_1"]
    assert workers["worker_0"]["fetcher_state"]["dataset_iter_state"] == {"at": 4}
    assert workers["worker_1"]["dataset_state"] is None
    assert workers["worker_1"]["fetcher_state"]["fetcher_ended"] is False
    for options in ({"num_workers": 0}, {"num_workers": 2, "snapshot_every_n_steps": None}):
        assert "_snapshot" not in cut(KINDS["iterable"](**options), 3)[1]
    plain = DataLoader(list(range(8)), num_workers=2)
    assert "_snapshot" not in cut(plain, 3)[1]


def test_another_number_of_workers_is_refused_where_they_divide_the_data_set() -> None:
    """A data set that is read by number is read again: who has read what is no part of it."""
    _, state = cut(KINDS["iterable"](num_workers=3), 4)
    with pytest.raises(ConfigError, match=r"of 3 worker processes.*num_workers=2"):
        KINDS["iterable"](num_workers=2).load_state_dict(state)
    _, state = cut(KINDS["mapped"](num_workers=3), 4)
    again = KINDS["mapped"](num_workers=2)
    again.load_state_dict(state)
    assert len(rows(again)) == 8
    assert again.skipped_batches_total == 4


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.update(_worker_snapshots=[]),
        lambda s: s.update(_last_yielded_worker_id=9),
        lambda s: s["_worker_snapshots"].pop("worker_0"),
        lambda s: s.pop("_begun"),
        lambda s: s["_worker_snapshots"]["worker_1"].update(batches_since=-1),
        lambda s: s["_worker_snapshots"]["worker_1"].update(fetcher_state=3),
    ],
)
def test_a_state_that_is_none_is_refused(change: Callable[[Any], object]) -> None:
    """Before anything is loaded."""
    loader = KINDS["iterable"](num_workers=2)
    _, state = cut(loader, 3)
    change(state["_snapshot"])
    with pytest.raises(ConfigError, match="state of worker processes is none"):
        loader.load_state_dict(state)
    assert loader.standing() == (0, 3)


def test_workers_that_were_not_seen_in_a_later_epoch_have_no_state() -> None:
    """What they kept is not known, so that the loader reads again."""
    states = WorkerStates(2, None, 0)
    assert states.saved() is None
    states.restart()
    states._states[0] = {"dataset_state": 1, "fetcher_state": None, "random_state": {}}
    assert states.saved() is None
    states._states[1] = states._states[0]
    assert states.saved() is not None


def test_random_numbers_go_on_and_nonsense_changes_nothing() -> None:
    """Of torch, numpy and random, through JSON."""
    kept = random_state()
    try:
        np.random.randn(), random.gauss(0, 1)  # half of a pair is kept in the state
        state = json.loads(json.dumps(random_state()))
        first = [*noise(), np.random.randn(), random.gauss(0, 1)]
        set_random_state(state)
        assert [*noise(), np.random.randn(), random.gauss(0, 1)] == first
        for name, value in (("torch", "00"), ("numpy", [1]), ("python", [3, "00" * 8, None])):
            before, wrong = random_state(), copy.deepcopy(state)
            wrong[name] = value
            with pytest.raises(ConfigError, match="random numbers"):
                set_random_state(wrong)
            assert random_state() == before
    finally:
        set_random_state(kept)
