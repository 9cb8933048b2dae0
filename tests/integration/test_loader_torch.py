"""The loader behaves as torch's DataLoader where that says how: arguments, errors, workers."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.data
from torch.utils.data.distributed import DistributedSampler

from hpstore.errors import ConfigError
from hpstore.loaders import DataLoader, Dataset
from hpstore.pool.pool import Pool
from tests.fault.common import exit_status, forked, poll, within
from tests.integration.data_sets import FIELDS, make_pool
from tests.integration.loader_cases import COUNT, MODES, PLAIN, check, flat, labels, write

LIMIT = 60.0


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(tmp_path_factory.mktemp("pool"))


@pytest.fixture(scope="module")
def pool(root: Path) -> Iterator[Pool]:
    with make_pool(root) as made:
        yield made


@pytest.fixture(scope="module")
def data(pool: Pool) -> Dataset:
    return write(pool, "plain", PLAIN, COUNT)


@pytest.fixture(scope="module")
def ragged(pool: Pool) -> Dataset:
    return write(pool, "ragged", FIELDS, 40)


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """A foreign data set; sample 13 may be bad."""

    def __init__(self, bad: bool = False) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if self.bad and index == 13:
            raise ValueError("thirteen")
        worker = torch.utils.data.get_worker_info()
        seed = -1 if worker is None else worker.seed
        return {
            "label": torch.tensor(index),
            "seed": torch.tensor(seed),
            "marked": torch.tensor(int(os.environ.get("MARKED", "0"))),
        }


# --- samplers --------------------------------------------------------------------------------


@pytest.mark.parametrize("foreign", [False, True])
def test_samplers_and_batch_samplers_decide(data: Dataset, foreign: bool) -> None:
    """Also in a world of two: an explicit sampler is never sharded by us. Resumed by batches."""
    source: Any = Rows() if foreign else data
    chosen = [5, 3, 96, 3, 0]
    loader = DataLoader(source, 2, sampler=chosen, rank=0, world_size=2)
    assert [labels(batch) for batch in loader] == [[5, 3], [96, 3], [0]]
    assert len(loader) == 3
    listed = DataLoader(source, batch_sampler=[[1], [2, 9], [4]])
    assert [labels(batch) for batch in listed] == [[1], [2, 9], [4]]
    assert listed.state_dict()["epoch"] == 1
    run = iter(listed)
    next(run)
    again = DataLoader(source, batch_sampler=[[1], [2, 9], [4]])
    again.load_state_dict(listed.state_dict())
    assert [labels(batch) for batch in again] == [[2, 9], [4]]
    with pytest.raises(ConfigError, match="sampler decides"):
        DataLoader(source, sampler=chosen, shuffle=True)


@pytest.mark.parametrize("foreign", [False, True])
def test_a_distributed_sampler_follows_our_epoch_or_ours_follows_it(
    data: Dataset, foreign: bool
) -> None:
    """set_epoch() of either is enough, and a resumed run has the epoch's order."""
    source: Any = Rows() if foreign else data

    def theirs(epoch: int) -> list[int]:
        sampler: Any = DistributedSampler(source, 2, 1, shuffle=True, seed=9)
        sampler.set_epoch(epoch)
        return list(sampler)

    sampler: Any = DistributedSampler(source, 2, 1, shuffle=True, seed=9)
    loader = DataLoader(source, 10, sampler=sampler)
    assert [flat(loader) for _ in range(3)] == [theirs(0), theirs(1), theirs(2)]
    sampler.set_epoch(7)
    assert flat(loader) == theirs(7)
    loader.set_epoch(4)
    run = iter(loader)
    found = labels(next(run))
    again = DataLoader(source, 10, sampler=DistributedSampler(source, 2, 1, shuffle=True, seed=9))
    again.load_state_dict(loader.state_dict())
    assert found + flat(again) == theirs(4)


@pytest.mark.parametrize("foreign", [False, True])
def test_without_a_batch_size_samples_come_one_by_one(data: Dataset, foreign: bool) -> None:
    """In the order that shuffle asks for, sharded, resumable; lists from a sampler are batches."""
    source: Any = Rows() if foreign else data
    shuffled = DataLoader(source, None, shuffle=True, seed=3)
    found = [int(one["label"]) for one in shuffled]
    assert found == flat(DataLoader(source, 10, shuffle=True, seed=3))
    assert len(shuffled) == COUNT
    one = next(iter(DataLoader(source, None)))
    assert one["label"].shape == ()
    shares = [DataLoader(source, None, tail="uneven", rank=r, world_size=2) for r in range(2)]
    both = [[int(one["label"]) for one in share] for share in shares]
    assert both == [list(range(0, COUNT, 2)), list(range(1, COUNT, 2))]
    run = iter(shuffled)
    next(run)
    next(run)
    again = DataLoader(source, None, shuffle=True, seed=3)
    again.load_state_dict(shuffled.state_dict())
    assert len(list(again)) == COUNT - 2
    if not foreign:
        lists = DataLoader(source, None, sampler=[[1, 2], [3]])
        assert [labels(batch) for batch in lists] == [[1, 2], [3]]
        singles = DataLoader(source, None, sampler=[4, 2])
        assert [int(one["label"]) for one in singles] == [4, 2]
        tripled = DataLoader(source, None, collate_fn=lambda one: int(one["label"]) * 3)
        assert list(tripled) == [3 * i for i in range(COUNT)]


# --- torch's own machinery -------------------------------------------------------------------


def mark(worker: int) -> None:
    os.environ["MARKED"] = str(worker + 1)


@pytest.mark.parametrize("persistent", [False, True])
def test_foreign_workers_generator_and_worker_init_fn(persistent: bool) -> None:
    """As in torch: seeds of workers come from the generator, worker_init_fn runs in each."""

    def run() -> tuple[list[int], set[int], set[int]]:
        loader = DataLoader(
            Rows(),
            10,
            num_workers=2,
            worker_init_fn=mark,
            persistent_workers=persistent,
            generator=torch.Generator().manual_seed(8),
            multiprocessing_context="fork",
        )
        batches = list(loader) + list(loader)
        seeds = {seed for b in batches for seed in b["seed"].tolist()}
        return flat(batches), seeds, {m for b in batches for m in b["marked"].tolist()}

    found, seeds, marked = run()
    assert found == [*range(COUNT), *range(COUNT)]
    assert marked == {1, 2}
    assert run() == (found, seeds, marked)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_exception_in_a_foreign_data_set_comes_as_from_torch(workers: int) -> None:
    loader = DataLoader(Rows(bad=True), 10, num_workers=workers)
    run = iter(loader)
    assert labels(next(run)) == list(range(10))
    with pytest.raises(ValueError, match="thirteen"):
        next(run)
    assert loader.state_dict()["samples"] == 10


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")
@pytest.mark.parametrize("foreign", [False, True])
def test_pin_memory_without_cuda_changes_nothing(data: Dataset, foreign: bool) -> None:
    loader = DataLoader(Rows() if foreign else data, 10, pin_memory=True)
    assert flat(loader) == list(range(COUNT))


def test_unordered_workers_have_no_position() -> None:
    """in_order=False is torch's; a state would be of other samples than those handed out."""
    loader = DataLoader(Rows(), 10, num_workers=2, in_order=False)
    assert sorted(flat(loader)) == list(range(COUNT))
    with pytest.raises(ConfigError, match="in_order"):
        loader.state_dict()


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_a_native_data_set_in_torchs_own_workers(data: Dataset, context: Any) -> None:
    """PROTOCOL 22: plain torch, workers of its own, the parent reads as well."""
    plain: Any = torch.utils.data.DataLoader(
        data,
        batch_size=20,
        num_workers=2 if context == "fork" else 1,
        multiprocessing_context=context,
    )
    run = iter(plain)
    first = next(run)
    assert int(torch.as_tensor(data[3]["label"])) == 3
    assert labels(first) + flat(run) == list(range(COUNT))
    check(first, PLAIN)


def read_in_child(loader: DataLoader, wanted: list[int]) -> None:
    if within(LIMIT, lambda: flat(loader)) != wanted:
        raise AssertionError("other samples")


@pytest.mark.parametrize("mode", MODES)
def test_a_loader_is_used_in_a_forked_child_and_goes_on_in_the_parent(
    data: Dataset, mode: str
) -> None:
    """PROTOCOL 22: forked between epochs, when the next one is made ahead, and in mid-epoch."""
    options = {"shuffle": True, "seed": 6, **MODES[mode]}
    wanted = flat(DataLoader(data, 10, **options))
    order = DataLoader(data, 10, **options)
    order.set_epoch(1)
    second = flat(order)
    loader = DataLoader(data, 10, **options)
    assert flat(loader) == wanted
    with forked(lambda: read_in_child(loader, second)) as pid:
        assert exit_status(pid, LIMIT) == 0
    run = iter(loader)
    found = labels(next(run))

    def child() -> None:
        with pytest.raises(ConfigError, match="before a fork"):
            next(run)
        loader.set_epoch(0)
        read_in_child(loader, wanted)

    with forked(child) as pid:
        assert exit_status(pid, LIMIT) == 0
    assert found + [label for batch in run for label in labels(batch)] == second
    loader.close()


@pytest.mark.parametrize("foreign", [False, True])
def test_a_loader_pickles_with_its_position(data: Dataset, foreign: bool) -> None:
    """As what was asked for and where it stands: for spawn, and for trainers that copy."""
    loader = DataLoader(Rows() if foreign else data, 10, shuffle=True, transform=None)
    run = iter(loader)
    next(run)
    copy = pickle.loads(pickle.dumps(loader))
    assert copy.state_dict() == loader.state_dict()
    rest = [label for batch in run for label in labels(batch)]
    assert flat(copy) == rest
    assert flat(copy) == flat(loader)
    assert len(copy.sampler) == COUNT


# --- ends ------------------------------------------------------------------------------------


def test_ctrl_c_while_waiting_loses_nothing(data: Dataset) -> None:
    """SIGINT in next(): KeyboardInterrupt; the next call gives the batch that was waited for."""
    reached, gate = threading.Event(), threading.Event()

    def slow(one: Any) -> Any:
        if 25 in one["label"].tolist():
            reached.set()
            gate.wait(LIMIT)
        return one

    loader = DataLoader(data, 10, batch_transform=slow, num_workers=1)
    run = iter(loader)
    found = labels(next(run)) + labels(next(run))

    def interrupt() -> None:
        reached.wait(LIMIT)
        waiting = run._run._pipeline
        poll(LIMIT, lambda: waiting.waiting)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in background jobs
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            next(run)
    finally:
        thread.join()
        signal.signal(signal.SIGINT, before)
    assert loader.state_dict()["samples"] == 20
    gate.set()
    assert found + [label for batch in run for label in labels(batch)] == list(range(COUNT))


@pytest.mark.parametrize("mode", MODES)
def test_jumping_about_never_waits_for_what_is_not_read(data: Dataset, mode: str) -> None:
    """Breaks, set_epoch, load_state_dict with an epoch made ahead: each goes on at once."""
    options: dict[str, Any] = {"shuffle": True, **MODES[mode]}
    loader = DataLoader(data, 10, seed=1, **options)
    whole = []
    for epoch in range(6):
        fresh = DataLoader(data, 10, seed=1, **options)
        fresh.set_epoch(epoch)
        whole.append(within(LIMIT, lambda: flat(fresh)))  # noqa: B023
    assert within(LIMIT, lambda: flat(loader)) == whole[0]
    loader.set_epoch(5)
    assert within(LIMIT, lambda: flat(loader)) == whole[5]
    old = iter(loader)
    next(old)
    state = loader.state_dict()
    assert labels(within(LIMIT, lambda: next(iter(loader)))) != []
    loader.set_epoch(2)
    assert within(LIMIT, lambda: flat(loader)) == whole[2]
    loader.load_state_dict(state)
    assert len(within(LIMIT, lambda: flat(loader))) == COUNT - 10
    within(LIMIT, loader.close)
    loader.set_epoch(3)
    assert within(LIMIT, lambda: flat(loader)) == whole[3]  # closed: starts again
    within(LIMIT, loader.close)


def test_a_timeout_of_next_is_as_torchs_and_loses_nothing(data: Dataset) -> None:
    """A transform that waits: RuntimeError; the next call gets the same batch."""
    go = threading.Event()

    def slow(batch: Any) -> Any:
        go.wait(LIMIT)
        return batch

    def patiently(run: Iterator[Any]) -> Iterator[Any]:
        while True:
            try:
                yield next(run)
            except StopIteration:
                return
            except RuntimeError as error:  # a machine that is busy for 0.05 s
                if "timed out" not in str(error):
                    raise

    whole = flat(DataLoader(data, 10))
    loader = DataLoader(data, 10, timeout=0.05, batch_transform=slow)
    run = iter(loader)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"timed out after 0\.05 seconds"):
            next(run)
    assert loader.state_dict()["samples"] == 0
    go.set()
    assert flat(patiently(run)) + flat(patiently(iter(loader))) == [*whole, *whole]
    loader.close()


def test_a_worker_init_fn_that_is_not_called_is_said_so(
    data: Dataset, caplog: pytest.LogCaptureFixture
) -> None:
    """Threads are no workers; torch's own data sets still have theirs."""
    with caplog.at_level(logging.WARNING):
        loader = DataLoader(data, 10, num_workers=2, worker_init_fn=print)
        assert loader.worker_init_fn is print
        assert len(flat(loader)) == COUNT
    assert [r.message for r in caplog.records if "worker_init_fn is not called" in r.message]
    loader.close()
    caplog.clear()
    DataLoader(Rows(), 10, num_workers=2, worker_init_fn=print)
    assert not caplog.records


def test_wrong_arguments_are_named(data: Dataset) -> None:
    for options, pattern in (
        ({"shuffle": "globel"}, "globel"),
        ({"on_error": "ignore"}, "ignore"),
        ({"tail": "odd"}, "odd"),
        ({"rank": 1}, "go together"),
        ({"rank": 2, "world_size": 2}, "rank 2 of 2"),
        ({"cache": True}, "cache True"),
    ):
        with pytest.raises(ConfigError, match=pattern):
            next(iter(DataLoader(data, 10, **options)))
    with pytest.raises(ConfigError, match="stripes"):
        DataLoader(Rows(), shuffle="window")
