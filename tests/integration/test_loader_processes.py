"""Worker processes for the user's functions: the same batches, errors, and no process left over."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hpstore
from hpstore.errors import AlreadyClosed, ConfigError
from hpstore.loaders import DataLoader, Dataset, LoaderMemory, Mixture, Ragged
from hpstore.loaders.batching.transforms import Task, UserTransforms
from hpstore.loaders.batching.worker_pool import Processes, Workers
from hpstore.testing.fake_gpu import FakeGpu
from tests.fault.common import poll
from tests.integration.data_sets import FIELDS
from tests.integration.loader_cases import COUNT, MODES, PLAIN, flat, labels, write
from tests.thorough import some_of

METHODS = ("fork", "spawn", "forkserver")
Sample = dict[str, Any]  # Any: a value of a field


def noisy(sample: Sample, rng: np.random.Generator) -> Sample:
    """The sample with a number of its own."""
    return {**sample, "noise": torch.tensor(rng.random()), "pid": os.getpid()}


def columns(samples: list[Sample]) -> Sample:
    """Lists, but for what has one size."""
    found: Sample = {name: [one[name] for one in samples] for name in samples[0]}
    found["label"] = torch.stack([torch.as_tensor(one) for one in found["label"]])
    return found


def shifted(batch: Sample, rng: np.random.Generator) -> Sample:
    """With one number for all of it."""
    return {**batch, "shift": float(rng.random()), "worker": os.getpid()}


def with_pid(batch: Sample) -> Sample:
    return {**batch, "worker": os.getpid()}


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, Ragged):
        return torch.equal(one.values, other.values) and torch.equal(one.offsets, other.offsets)
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    same: bool = one == other
    return same


@pytest.fixture
def data(pool: hpstore.Pool) -> Dataset:
    return write(pool, "plain", PLAIN, COUNT)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "given",
    [
        {"batch_transform": shifted},
        {"transform": noisy, "collate_fn": columns, "batch_transform": shifted},
    ],
    ids=["batch", "samples"],
)
def test_processes_make_the_same_batches_as_threads(
    pool: hpstore.Pool, method: str, given: dict[str, Any]
) -> None:
    """Bit for bit, with every kind of field, random numbers of transforms too."""
    data = write(pool, "mixed", FIELDS, COUNT)
    options: dict[str, Any] = {"batch_size": 10, "shuffle": True, "seed": 3, **given}
    plain = list(DataLoader(data, **options))
    loader = DataLoader(data, **options, num_workers=2, multiprocessing_context=method)
    made = list(loader)
    assert len(plain) == len(made) == len(loader)
    for one, other in zip(plain, made, strict=True):
        assert one.keys() == other.keys()
        for name in one.keys() - {"pid", "worker"}:
            assert equal(one[name], other[name]), name
    workers = {batch["worker"] for batch in made}
    assert os.getpid() not in workers
    assert 1 <= len(workers) <= 2
    assert loader.stats()["worker_processes"] == 2
    loader.close()


@pytest.mark.parametrize("mode", MODES)
def test_a_run_is_cut_and_resumed_with_other_workers(data: Dataset, mode: str) -> None:
    """The state counts what was handed out, whoever has made what comes next."""
    options = {"batch_size": 7, "shuffle": True, **MODES[mode], "batch_transform": with_pid}
    whole = flat(DataLoader(data, **options))
    loader = DataLoader(data, **options, num_workers=2, multiprocessing_context="fork")
    run, found = iter(loader), []
    for _ in range(5):
        found += labels(next(run))
    state = loader.state_dict()
    loader.close()
    other = DataLoader(data, **options, num_workers=1, multiprocessing_context="fork")
    other.load_state_dict(state)
    assert found + flat(other) == whole
    assert flat(other) != whole
    other.close()


class Odd(Exception):
    """One that cannot be copied."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def fails(sample: Sample) -> Sample:
    if int(sample["label"]) == 41:
        raise KeyError("forty-one")
    return sample


def fails_oddly(batch: Sample) -> Sample:
    raise Odd(4, 2)


def stops(sample: Sample) -> Sample:
    raise StopIteration


def cut_off(batch: Sample) -> Sample:
    raise ConnectionResetError("of a server of the user's")


def test_an_error_comes_back_with_its_kind_and_the_sample(data: Dataset) -> None:
    """What a worker raised, and where it was raised there."""
    loader = DataLoader(data, 10, transform=fails, num_workers=2, multiprocessing_context="fork")
    with pytest.raises(KeyError, match="forty-one") as told:
        list(loader)
    notes = "".join(told.value.__notes__)
    assert "in transform, of sample 41 (position 41 of epoch 0)" in notes
    assert "in fails" in notes
    assert loader.state_dict()["samples"] == 40
    loader.close()
    odd = DataLoader(
        data, 10, batch_transform=fails_oddly, num_workers=1, multiprocessing_context="fork"
    )
    with pytest.raises(RuntimeError, match="Odd: 4 and 2") as told_oddly:
        next(iter(odd))
    assert f"of samples {list(range(10))}" in "".join(told_oddly.value.__notes__)
    odd.close()
    cut = DataLoader(
        data, 10, batch_transform=cut_off, num_workers=1, multiprocessing_context="fork"
    )
    with pytest.raises(ConnectionResetError, match="of a server"):  # no worker has ended
        next(iter(cut))
    cut.close()
    ended = DataLoader(data, 10, transform=stops, num_workers=1, multiprocessing_context="fork")
    with pytest.raises(RuntimeError, match="raised StopIteration"):
        next(iter(ended))
    ended.close()


def test_a_worker_that_is_killed_costs_no_sample(data: Dataset) -> None:
    """As the system does that runs out of memory: an error, and others when iterated anew."""
    options: dict[str, Any] = {"batch_size": 10, "batch_transform": with_pid}
    loader = DataLoader(data, **options, num_workers=2, multiprocessing_context="fork")
    run = iter(loader)
    found = labels(first := next(run))
    os.kill(first["worker"], signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r"ended unexpectedly \(exit code -9\)"):
        found.extend(itertools.chain.from_iterable(map(labels, run)))
    assert loader.state_dict()["samples"] == len(found) < COUNT
    loader.load_state_dict(loader.state_dict())
    assert found + flat(loader) == list(range(COUNT))
    loader.close()


def lasts(batch: Sample) -> Sample:
    """One of the first two kills its process; the other is still at work meanwhile."""
    if 0 in labels(batch):
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5)  # what it has to do
    return {**batch, "worker": os.getpid()}


def test_others_are_at_work_when_one_is_killed(data: Dataset) -> None:
    """They are let finish before new ones take their place, and nobody waits for them for ever."""
    loader = DataLoader(
        data,
        10,
        batch_transform=lasts,
        num_workers=2,
        multiprocessing_context="fork",
        prefetch_factor=2,
    )
    for _ in range(3):
        with pytest.raises(RuntimeError, match="ended unexpectedly"):
            next(iter(loader))
        loader.load_state_dict(loader.state_dict())
    loader.load_state_dict(loader.state_dict() | {"samples": 10})
    assert labels(next(iter(loader))) == list(range(10, 20))
    loader.close()  # joins all threads that have made batches for it


def test_processes_are_let_finish_when_they_are_ended(tmp_path: Path) -> None:
    """What is under way comes back whole; who asks afterwards is told."""

    def slow(batch: Sample) -> Sample:
        (tmp_path / "begun").touch()
        time.sleep(0.5)  # what it has to do
        return batch

    work = UserTransforms(
        collate_fn=None, transform=None, batch_transform=slow, seed=0, nested=False, skip=False
    )
    task = Task(
        batch={"label": torch.arange(50_000)},
        fields={},
        indices=np.arange(3),
        rows=range(3),
        epoch=0,
        start=0,
        listed=False,
        single=False,
    )
    workers = Workers(Processes(1, "fork", None), work, 0)
    workers.start()
    with ThreadPoolExecutor(1) as thread:
        made = thread.submit(workers.run, task)
        poll(20, (tmp_path / "begun").exists)
        workers.close()
        assert labels(made.result(20).batch) == list(range(50_000))
    for _ in range(2):
        with pytest.raises(AlreadyClosed):
            workers.run(task)


def note_number(number: int) -> None:
    global _number
    _number = number


_number = -1


def with_number(batch: Sample) -> Sample:
    time.sleep(0.02)  # so that each of them gets some
    drawn = (random.random(), float(np.random.random()), float(torch.rand(1)))
    return {**batch, "number": _number, "drawn": drawn, "threads": torch.get_num_threads()}


def no_start(number: int) -> None:
    raise OSError(f"no licence for {number}")


def test_worker_init_fn_is_called_in_each_of_them(
    data: Dataset, caplog: pytest.LogCaptureFixture
) -> None:
    """With its number; global random numbers differ from worker to worker; one thread each."""
    loader = DataLoader(
        data,
        5,
        batch_transform=with_number,
        num_workers=2,
        worker_init_fn=note_number,
        multiprocessing_context="fork",
    )
    made = list(loader)
    assert {batch["number"] for batch in made} == {0, 1}
    for part in zip(*(batch["drawn"] for batch in made), strict=True):
        assert len(set(part)) == len(made)
    assert {batch["threads"] for batch in made} == {1}
    assert not [r for r in caplog.records if "worker_init_fn" in r.message]
    loader.close()
    failing = DataLoader(
        data,
        5,
        batch_transform=with_pid,
        num_workers=2,
        worker_init_fn=no_start,
        multiprocessing_context="fork",
    )
    with pytest.raises(OSError, match="no licence for") as told:
        next(iter(failing))
    assert "in worker_init_fn" in "".join(told.value.__notes__)
    failing.close()


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not asked for its status does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except FileNotFoundError:
        return False


def test_processes_end_with_the_loader(data: Dataset) -> None:
    """Closed or dropped."""
    for drop in (False, True):
        loader = DataLoader(
            data, 10, batch_transform=with_pid, num_workers=2, multiprocessing_context="fork"
        )
        run = iter(loader)
        workers = {batch["worker"] for batch in run}
        assert all(map(alive, workers))
        if drop:
            del loader, run
        else:
            loader.close()
            assert not any(map(alive, workers))
        poll(20, lambda: not any(map(alive, workers)))  # noqa: B023


SCRIPT = """
import sys, time
import hpstore
from hpstore.loaders import DataLoader, Dataset
from tests.integration.test_loader_processes import with_pid

if __name__ == "__main__":
    with hpstore.open(sys.argv[1]) as pool:
        loader = DataLoader(
            Dataset(pool, "plain"), 10, batch_transform=with_pid, num_workers=2,
            multiprocessing_context=sys.argv[2],
        )
        workers, kept = set(), []
        while True:
            for batch in loader:
                kept.append(batch)
                workers.add(batch["worker"])
            if len(workers) == 2:
                print(*workers, flush=True)
                time.sleep(600)
"""


@pytest.mark.parametrize("method", some_of(METHODS, 0, 1))
def test_nothing_is_left_when_the_parent_is_killed(
    pool: hpstore.Pool, data: Dataset, method: str, tmp_path: Path
) -> None:
    """No process, and no shared memory: the batches that it held never were in any."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    parent = subprocess.Popen(
        [sys.executable, str(script), str(pool.config.path), method],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert parent.stdout is not None
    workers = [int(word) for word in parent.stdout.readline().split()]
    assert len(workers) == 2
    assert all(map(alive, workers))
    for pid in (parent.pid, *workers):
        assert "/dev/shm" not in Path(f"/proc/{pid}/maps").read_text()
    parent.kill()
    parent.wait()
    parent.stdout.close()
    poll(20, lambda: not any(map(alive, workers)))


def test_functions_that_cannot_be_sent_are_named(data: Dataset) -> None:
    """A lambda does where processes are forked, and not where they are started anew."""
    made = DataLoader(
        data,
        10,
        batch_transform=lambda batch: batch,
        num_workers=1,
        multiprocessing_context="fork",
    )
    assert flat(made) == list(range(COUNT))
    made.close()
    refused = DataLoader(
        data,
        10,
        batch_transform=lambda batch: batch,
        num_workers=1,
        multiprocessing_context="spawn",
    )
    with pytest.raises(ConfigError, match=r"batch_transform cannot be sent .* 'spawn'"):
        iter(refused)
    refused.close()


def test_what_does_not_go_with_processes_is_refused(data: Dataset) -> None:
    """And what is given reads back, as wrappers rebuild a loader from it."""
    loader = DataLoader(data, 10, num_workers=2, multiprocessing_context="spawn")
    context: Any = loader.multiprocessing_context
    assert context.get_start_method() == "spawn"
    assert flat(loader) == list(range(COUNT))  # no function: no process
    assert loader.stats()["worker_processes"] == 0
    again = DataLoader(data, 10, num_workers=2, multiprocessing_context=context)
    assert again.multiprocessing_context is context
    loader.close()
    for options, pattern in (
        ({"multiprocessing_context": "fork"}, "num_workers=0"),
        ({"multiprocessing_context": "spoon", "num_workers": 1}, "spoon"),
        (
            {
                "multiprocessing_context": "fork",
                "num_workers": 1,
                "layout": torch.jagged,
                "batch_transform": with_pid,
            },
            "layout",
        ),
    ):
        with pytest.raises(ConfigError, match=pattern):
            DataLoader(data, 10, **options)


def test_batches_of_processes_are_kept_and_sent_to_a_gpu(data: Dataset) -> None:
    """A replay buffer of them costs no memory of the loader's own; mixtures too."""
    options: dict[str, Any] = {"batch_size": 4, "num_workers": 2, "multiprocessing_context": "fork"}
    loader = DataLoader(
        data, **options, batch_transform=with_pid, memory=LoaderMemory(prefetch_bytes=4 << 20)
    )
    kept = [batch for _ in range(8) for batch in loader]
    assert flat(kept) == 8 * list(range(COUNT))
    assert loader.stats()["batches_in_ordinary_memory"] == 0
    loader.close()
    away = DataLoader(data, **options, batch_transform=with_pid, device=FakeGpu())
    assert flat(away) == list(range(COUNT))
    away.close()
    mixed = DataLoader(Mixture([data, data], [1, 1]), **options, batch_transform=with_pid)
    plain = DataLoader(Mixture([data, data], [1, 1]), 4)
    assert flat(mixed) == flat(plain)
    mixed.close()
