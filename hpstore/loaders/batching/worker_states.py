"""States of a dataset in torch's workers: sent with batches, kept by the loader, put back.

torch's iterator is unchanged. In its workers a Watch replaces the iterable dataset, collate_fn
and worker_init_fn; it calls the user's own, which see their own dataset in get_worker_info().
Names in the saved state are torchdata's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch.utils.data
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from hpstore.errors import ConfigError
from hpstore.loaders.batching.served import Served
from hpstore.loaders.sampling.random_states import random_state, set_random_state

SAMPLER, DATASET, FETCHER = "sampler_random", "dataset_state", "fetcher_state"
SNAPSHOT, WORKERS, LAST = "_snapshot", "_worker_snapshots", "_last_yielded_worker_id"
BEGUN = "_begun"  # at which position the seeds of the workers were drawn
_ITERATOR, _ENDED, _SINCE = "dataset_iter_state", "fetcher_ended", "batches_since"
_DRAWN = "random_state"
_SENT = (DATASET, FETCHER, _DRAWN)


@runtime_checkable
class Stateful(Protocol):
    """torchdata's protocol, by its methods."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> Any: ...


# Any below: states and batches are the user's
@dataclass(frozen=True, slots=True)
class Handed:
    """A batch, and the state of its worker's dataset behind it. Made in the worker."""

    batch: Any
    state: dict[str, Any]

    def pin_memory(self) -> Handed:
        """For torch's thread that page-locks batches."""
        from torch.utils.data._utils.pin_memory import pin_memory as pinned

        return Handed(pinned(self.batch), self.state)  # type: ignore[no-untyped-call]  # torch's


class _Followed:
    """An iterator, and whether it has ended."""

    def __init__(self, found: Iterator[Any], *, ended: bool) -> None:
        self._found, self.ended = found, ended

    def __iter__(self) -> _Followed:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._found)
        except StopIteration:
            self.ended = True
            raise


class Watch:
    """In a worker: dataset, collate_fn and worker_init_fn in one.

    `states`: of each worker what it goes on from, or nothing. With every `every`-th of its batches
    a worker sends a state; `samples` are in one of its batches.
    """

    def __init__(
        self, loader: Served, states: Sequence[Mapping[str, Any] | None], every: int
    ) -> None:
        self.dataset: Any = loader.dataset
        self._iterable = isinstance(self.dataset, torch.utils.data.IterableDataset)
        self._collate: Callable[[Any], Any] = loader.collate_fn
        self._init, self._samples = loader.worker_init_fn, loader.batch_size or 1
        self._states, self._every, self._batches = states, every, 0
        self._from: Mapping[str, Any] | None = None
        self._iterator: Any = None
        self._followed: _Followed | None = None

    def begin(self, worker: int) -> None:
        """As worker_init_fn; before torch makes the iterator."""
        if self._iterable:
            info = torch.utils.data.get_worker_info()
            object.__setattr__(info, "dataset", self.dataset)  # frozen, and of this process alone
        if self._init is not None:
            self._init(worker)
        self._from = self._states[worker]
        if not self._iterable and self._from is not None:
            if self._from[DATASET] is not None:
                self.dataset.load_state_dict(self._from[DATASET])
            self._draw_on()

    def _draw_on(self) -> None:
        drawn = (self._from or {}).get(_DRAWN)
        if drawn is not None:
            set_random_state(drawn)

    def __iter__(self) -> Iterator[Any]:
        """Of an iterable dataset: its iterator, at the state that was loaded, once."""
        found = self._from or {}
        if found.get(DATASET) is not None:
            self.dataset.load_state_dict(found[DATASET])
        iterator: Iterator[Any] = iter(self.dataset)
        fetcher = found.get(FETCHER) or {}
        if fetcher.get(_ITERATOR) is not None:
            iterator.load_state_dict(fetcher[_ITERATOR])  # type: ignore[attr-defined]
        self._draw_on()
        self._from = None
        self._batches = found.get(_SINCE, 0)
        for _ in range(0 if fetcher.get(_ENDED) else self._batches * self._samples):
            if next(iterator, self) is self:
                break
        self._iterator, self._followed = iterator, None
        if not (isinstance(iterator, Stateful) or isinstance(self.dataset, Stateful)):
            return iterator
        ended = bool(fetcher.get(_ENDED))  # at its last batch: the next read starts another epoch
        self._followed = _Followed(iter(()) if ended else iterator, ended=ended)
        return self._followed

    def __call__(self, samples: Any) -> Any:
        """As collate_fn: the batch, with a state where one is due."""
        batch = self._collate(samples)
        if self._iterable and self._followed is None:
            return batch
        self._batches += 1
        return batch if self._batches % self._every else Handed(batch, self._state())

    def _state(self) -> dict[str, Any]:
        """A copy: it is sent while the worker goes on."""
        if self._followed is None:
            state = copy.deepcopy(self.dataset.state_dict())
            return {DATASET: state, FETCHER: None, _DRAWN: random_state()}
        own = dataset = None
        if isinstance(self._iterator, Stateful):
            own = copy.deepcopy(self._iterator.state_dict())
        if self._iterator is not self.dataset and isinstance(self.dataset, Stateful):
            dataset = copy.deepcopy(self.dataset.state_dict())
        fetcher = {_ITERATOR: own, _ENDED: self._followed.ended}
        return {DATASET: dataset, FETCHER: fetcher, _DRAWN: random_state()}


class WorkerStates:
    """In the process of the loader: what each worker of a loop stood at, batch by batch.

    `fresh`: a worker without a state is one that has just begun. Persistent workers have not, from
    the second epoch on: what they kept is known with their first states.
    """

    def __init__(self, workers: int, loaded: Mapping[str, Any] | None, begun: int) -> None:
        self._states: list[Any] = [None] * workers
        self._begun = begun if loaded is None else loaded[BEGUN]
        self._since, self._fresh = [0] * workers, True
        self.last = workers - 1  # whose batch was handed out last
        if loaded is not None:
            self.last = loaded[LAST]
            for number, found in enumerate(loaded[WORKERS].values()):
                self._since[number] = found[_SINCE]
                if found.get(_DRAWN) is not None:  # it had sent one
                    self._states[number] = {name: found[name] for name in _SENT}

    def restart(self) -> None:
        """Another epoch of the same workers."""
        self._states, self._fresh = [None] * len(self._states), False
        self._since, self.last = [0] * len(self._states), len(self._states) - 1

    def handed(self, worker: int, found: Any) -> Any:
        """The batch of what a worker has sent."""
        self.last = worker
        if not isinstance(found, Handed):
            self._since[worker] += 1
            return found
        self._states[worker], self._since[worker] = found.state, 0
        return found.batch

    def of_each(self) -> list[dict[str, Any] | None]:
        """For Watch."""
        pairs = zip(self._states, self._since, strict=True)
        return [
            None
            if state is None and not since
            else {**dict.fromkeys(_SENT), **(state or {}), _SINCE: since}
            for state, since in pairs
        ]

    def saved(self) -> dict[str, Any] | None:
        """For the loader's state; None where workers cannot go on from it."""
        if not any(self._states) or not (self._fresh or all(self._states)):
            return None
        workers = {}
        for number, (state, since) in enumerate(zip(self._states, self._since, strict=True)):
            found = copy.deepcopy(state) or dict.fromkeys(_SENT)
            workers[f"worker_{number}"] = {"worker_id": number, **found, _SINCE: since}
        return {LAST: self.last, WORKERS: workers, BEGUN: self._begun}


class WatchedIterator(_MultiProcessingDataLoaderIter):
    """torch's iterator whose workers send states, and that begins behind a worker."""

    def __init__(self, loader: Served, states: WorkerStates) -> None:
        self._kept, self._ahead = states, states.last + 1
        interval = loader.snapshot_every_n_steps or 1
        iterable = isinstance(loader.dataset, torch.utils.data.IterableDataset)
        every = max(1, interval // loader.num_workers) if iterable else 1
        watch = Watch(loader, states.of_each(), every)
        changed = {"collate_fn": watch, "worker_init_fn": watch.begin}
        super().__init__(_Instead(loader, changed | ({"dataset": watch} if iterable else {})))

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        if not first_iter:
            self._kept.restart()
        super()._reset(loader, first_iter)

    def _try_put_index(self) -> None:
        for _ in range(self._ahead % self._num_workers):  # once: workers take turns from here
            next(self._worker_queue_idx_cycle)
        self._ahead = 0
        super()._try_put_index()

    def _process_data(self, data: Any, worker_idx: int) -> Any:
        found = super()._process_data(data, worker_idx)  # type: ignore[no-untyped-call]  # torch's
        return self._kept.handed(worker_idx, found)


class _Instead:
    """A loader with some attributes replaced, as torch's iterator reads it when it is made."""

    def __init__(self, loader: Served, changed: Mapping[str, Any]) -> None:
        self.__dict__.update(changed)
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def is_watched(loader: Served) -> bool:
    """Whether states of its workers are asked for: where they can be of use."""
    data = loader.dataset
    if not (loader.num_workers and loader.in_order and loader.snapshot_every_n_steps):
        return False
    pipes = torch.utils.data.IterDataPipe, torch.utils.data.MapDataPipe
    iterable = isinstance(data, torch.utils.data.IterableDataset)
    return (iterable or isinstance(data, Stateful)) and not isinstance(data, pipes)


def required(found: Any) -> dict[str, Any]:
    """A saved state of workers. Raises ConfigError where it is none."""
    workers = found.get(WORKERS) if isinstance(found, Mapping) else None
    good = isinstance(workers, Mapping) and list(workers) == [
        f"worker_{number}" for number in range(len(workers))
    ]
    if good:
        assert isinstance(workers, Mapping)
        last = found.get(LAST)
        good = type(last) is int and 0 <= last < len(workers) and type(found.get(BEGUN)) is int
        for one in workers.values():
            fetcher = one.get(FETCHER, 0) if isinstance(one, Mapping) else 0
            good &= (fetcher is None or isinstance(fetcher, Mapping)) and DATASET in one
            since = one.get(_SINCE) if good else None
            good &= type(since) is int and since >= 0
    if not good:
        raise ConfigError("the saved state of worker processes is none: nothing was loaded")
    return dict(found)


def require_as_many(loader: Served, found: Mapping[str, Any]) -> None:
    """Raise ConfigError where an iterable dataset would be divided among other workers."""
    iterable = isinstance(loader.dataset, torch.utils.data.IterableDataset)
    if iterable and len(found[WORKERS]) != loader.num_workers:
        raise ConfigError(
            f"the saved state is of {len(found[WORKERS])} worker processes, each with its part of "
            f"the data set; this loader has num_workers={loader.num_workers}. Nothing was loaded. "
            f"Give num_workers={len(found[WORKERS])}, or begin the epoch again without the state."
        )
