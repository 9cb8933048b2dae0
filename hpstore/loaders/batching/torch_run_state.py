"""What a run on somebody else's dataset has beside its position: seeds, states of random samplers
and of datasets that have one.

A dataset is Stateful as torchdata has it: state_dict() and load_state_dict(), its own or its
iterator's. Read in this process it goes on from its state; in worker processes, each of which has a
copy, all is read again with the same seeds.
"""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.utils.data

from hpstore.errors import ConfigError
from hpstore.loaders.batching.served import Served
from hpstore.loaders.batching.worker_states import (
    DATASET,
    FETCHER,
    SAMPLER,
    SNAPSHOT,
    WORKERS,
    Stateful,
    WatchedIterator,
    WorkerStates,
    is_watched,
    require_as_many,
    required,
)
from hpstore.loaders.sampling.random_draws import derive_seed

_log = logging.getLogger(__name__)
RANDOM = (
    torch.utils.data.RandomSampler,
    torch.utils.data.SubsetRandomSampler,
    torch.utils.data.WeightedRandomSampler,
)


def worker_seed(seed: int, rank: int, epoch: int, position: int) -> torch.Generator:
    """What seeds of workers are drawn from: the same in every run and after every resume, another
    one for each rank, epoch and position that workers begin at.
    """
    found = derive_seed(seed, rank)
    for number in (epoch, position):
        found = derive_seed(found, number)
    return torch.Generator().manual_seed(found & (1 << 63) - 1)


class Companions:
    """Of one loader. What was loaded is put back when the next loop begins."""

    def __init__(self) -> None:
        self._loaded: dict[str, Any] = {}
        self._epoch = -1  # of the loop under way
        self._random: list[dict[str, Any]] = []  # of its random samplers, as they began
        self._lent: list[tuple[Any, torch.Generator]] = []  # to samplers that had none
        self._workers: WorkerStates | None = None  # of torch's iterator of the last loop
        self.in_workers: Mapping[str, Any] | None = None  # what its workers go on from

    def load(self, loader: Served, state: Mapping[str, Any]) -> None:
        """Take from a saved state what is not the position. Raises ConfigError for nonsense."""
        if SNAPSHOT in state:
            require_as_many(loader, required(state[SNAPSHOT]))
        self._loaded = {n: state[n] for n in (SAMPLER, DATASET, FETCHER, SNAPSHOT) if n in state}
        saved, samplers = self._loaded.get(SAMPLER, []), self._samplers(loader)
        if not isinstance(saved, list) or not all(isinstance(one, dict) for one in saved):
            raise ConfigError("the saved state of a random sampler is none: nothing was loaded")
        self._epoch = -1
        if not saved and samplers and state.get("samples"):
            _log.warning(
                "the saved state knows nothing of its random %s: what was read before is drawn "
                "again, and samples are lost or repeated unless it is seeded as it was",
                type(samplers[0]).__name__,
            )

    def begin(self, loader: Served, epoch: int, position: int) -> dict[str, Any]:
        """A loop begins; before torch's. Returns the states of the dataset to go on from."""
        loaded, self._loaded = self._loaded, {}
        saved = loaded.pop(SAMPLER, [])
        lent: list[tuple[Any, torch.Generator]] = []
        self._epoch, self._random = epoch, []
        self.in_workers = loaded.get(SNAPSHOT)
        if self.in_workers is not None and not (
            is_watched(loader) and len(self.in_workers[WORKERS]) == loader.num_workers
        ):
            del loaded[SNAPSHOT]  # of other workers: what they had is read again
            self.in_workers = None
        for number, sampler in enumerate(self._samplers(loader)):
            before = saved[number] if number < len(saved) else {}
            if sampler.generator is None or any(sampler is one for one, _ in lent):
                drawn = before.get("seed")
                if type(drawn) is not int:  # as torch draws it, from its global generator
                    drawn = int(torch.empty((), dtype=torch.int64).random_().item())
                sampler.generator = torch.Generator().manual_seed(drawn)
                lent.append((sampler, sampler.generator))
                self._random.append({"seed": drawn})
            else:
                if isinstance(before.get("generator"), str):
                    sampler.generator.set_state(_tensor(before["generator"]))
                self._random.append({"generator": _text(sampler.generator)})
        self._lent = lent
        return loaded

    def _samplers(self, loader: Served) -> list[Any]:
        """The user's samplers that draw at random; generators that were lent are taken back."""
        for sampler, generator in self._lent:
            if sampler.generator is generator:
                sampler.generator = None
        self._lent = []
        if loader.order is not None:
            return []
        batches = loader.batch_sampler
        found = [loader.sampler, getattr(batches, "sampler", None), batches]
        return [
            one
            for number, one in enumerate(found)
            if isinstance(one, RANDOM) and not any(one is other for other in found[:number])
        ]

    def saved(self, loader: Served, epoch: int, position: int, found: Any) -> dict[str, Any]:
        """For state_dict(): empty for most. `found`: torch's iterator of the loop under way."""
        state = dict(self._loaded)
        if self._epoch < 0:
            return state
        random = self._random
        if epoch != self._epoch:  # at the border: the next loop draws on from here
            random = [
                {"generator": _text(sampler.generator)} if "generator" in one else {}
                for one, sampler in zip(random, self._kept(loader), strict=False)
            ]
        if any(random):
            state[SAMPLER] = copy.deepcopy(random)
        if loader.num_workers == 0:
            state |= _dataset_state(loader.dataset, found if epoch == self._epoch else None)
        elif self._workers is not None and epoch == self._epoch:
            ahead = (epoch, position) != loader.standing()  # a wrapper has read ahead of its user
            workers = None if ahead else self._workers.saved()
            state |= {} if workers is None else {SNAPSHOT: workers}
        return state

    def iterator(self, loader: Served) -> Any:
        """torch's, with the states of its workers; None where there are none to be had."""
        self._workers = None
        if not is_watched(loader):
            return None
        self._workers = WorkerStates(loader.num_workers, self.in_workers, loader.to_skip)
        return WatchedIterator(loader, self._workers)

    def _kept(self, loader: Served) -> list[Any]:
        lent, self._lent = self._lent, []
        try:
            return self._samplers(loader)
        finally:
            self._lent = lent


def reads_again(loader: Served) -> bool:
    """Whether what comes before a position must be read again: its state is not to be had."""
    if isinstance(loader.dataset, torch.utils.data.IterableDataset):
        return True
    return loader.num_workers > 0 and isinstance(loader.dataset, Stateful)


def put_back(dataset: Any, states: Mapping[str, Any]) -> None:
    """A dataset's state, before its iterator is made."""
    if states.get(DATASET) is not None and isinstance(dataset, Stateful):
        dataset.load_state_dict(copy.deepcopy(states[DATASET]))


def put_back_iterator(found: Any, states: Mapping[str, Any]) -> bool:
    """An iterator's state, in torch's new iterator; whether it or its dataset goes on by it."""
    fetcher = getattr(found, "_dataset_fetcher", None)
    saved, iterator = states.get(FETCHER), getattr(fetcher, "dataset_iter", None)
    if fetcher is None or iterator is None or not isinstance(saved, Mapping):
        return False
    if saved.get("dataset_iter_state") is not None and isinstance(iterator, Stateful):
        iterator.load_state_dict(copy.deepcopy(saved["dataset_iter_state"]))
    elif not (states.get(DATASET) is not None and isinstance(fetcher.dataset, Stateful)):
        return False
    fetcher.ended = bool(saved.get("fetcher_ended"))
    return True


def has_state(found: Any) -> bool:
    """Whether what torch's iterator reads, in this process, has a state of its own."""
    fetcher = getattr(found, "_dataset_fetcher", None)
    iterator = getattr(fetcher, "dataset_iter", None)
    dataset = getattr(fetcher, "dataset", None)
    return iterator is not None and any(isinstance(one, Stateful) for one in (iterator, dataset))


def _dataset_state(dataset: Any, found: Any) -> dict[str, Any]:
    """The names are torchdata's."""
    fetcher = getattr(found, "_dataset_fetcher", None)
    iterator = getattr(fetcher, "dataset_iter", None)
    state: dict[str, Any] = {}
    if isinstance(dataset, Stateful) and iterator is not dataset:
        state[DATASET] = copy.deepcopy(dataset.state_dict())
    if fetcher is not None and iterator is not None and (isinstance(iterator, Stateful) or state):
        own = copy.deepcopy(iterator.state_dict()) if isinstance(iterator, Stateful) else None
        state.setdefault(DATASET, None)
        state[FETCHER] = {"dataset_iter_state": own, "fetcher_ended": fetcher.ended}
    return state


class Skipping:
    """Batches of a user's sampler, without the first ones of a loop that was resumed."""

    def __init__(self, batches: Any, loader: Served) -> None:
        self._batches, self._loader = batches, loader

    def __iter__(self) -> Iterator[Any]:
        count = self._loader.to_skip  # torch's iterator with workers asks twice as it begins
        return itertools.islice(self._batches, count, None) if count else iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)


def _text(generator: torch.Generator) -> str:
    return bytes(generator.get_state().numpy()).hex()


def _tensor(text: str) -> torch.Tensor:
    try:
        return torch.from_numpy(np.frombuffer(bytes.fromhex(text), np.uint8).copy())
    except ValueError as error:
        raise ConfigError("the saved state of a generator is none") from error
