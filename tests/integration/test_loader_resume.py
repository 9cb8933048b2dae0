"""A run that is cut and resumed anywhere, any number of times, is the run that never stopped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpstore.errors import ConfigError, FormatTooNew
from hpstore.loaders import DataLoader, Dataset, LoaderMemory
from tests.integration.data_sets import make_pool
from tests.integration.loader_cases import COUNT, MODES, PLAIN, flat, labels, ranks, write


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """A foreign map-style data set."""

    def __init__(self, count: int = COUNT) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"label": torch.tensor(index)}


class Stream(torch.utils.data.IterableDataset[dict[str, torch.Tensor]]):
    """A foreign iterable data set; it does not tell its length."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return iter([{"label": torch.tensor(i)} for i in range(23)])


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dataset]:
    with make_pool(Path(tmp_path_factory.mktemp("pool"))) as pool:
        yield write(pool, "a", PLAIN, COUNT)


EPOCHS = 3
legs = st.lists(
    st.tuples(
        st.integers(0, 14),  # batches until the cut
        st.integers(1, 3),  # ranks
        st.integers(1, 9),  # batch size of a rank
        st.integers(1, 3),  # threads
        st.integers(1, 4),  # prefetch factor
    ),
    min_size=1,
    max_size=5,
)


def uninterrupted(data: Any, options: dict[str, Any]) -> list[int]:
    loader = DataLoader(data, 11, seed=4, **options)
    return [label for _ in range(EPOCHS) for label in flat(loader)]


def leg(
    data: Any, state: dict[str, Any] | None, count: int, world: int, options: dict[str, Any]
) -> tuple[list[int], dict[str, Any]]:
    """Labels of so many global batches from a state on, and the state after them."""
    loaders = ranks(data, world, seed=4, tail="uneven", **options)
    runs: list[Any] = []
    for loader in loaders:
        if state is not None:
            loader.load_state_dict(json.loads(json.dumps(state)))
    found: list[int] = []
    while count > 0 and loaders[0].state_dict()["epoch"] < EPOCHS:
        runs = [iter(loader) for loader in loaders]
        steps = len(loaders[0]) if not loaders[0].state_dict()["samples"] else 1 << 30
        taken = 0
        while count > 0 and taken < steps:
            batches = [next(run, None) for run in runs]
            if batches[0] is None:
                break
            count, taken = count - 1, taken + 1
            found += [label for b in batches if b is not None for label in labels(b)]
        if count > 0:  # over the border: all ranks see the end
            assert [next(run, None) for run in runs] == [None] * world
            assert len({str(loader.state_dict()) for loader in loaders}) == 1
    state = loaders[0].state_dict()
    for loader in loaders:
        loader.close()
    return found, state


def cut_and_joined(data: Any, plan: list[tuple[int, ...]], options: dict[str, Any]) -> list[int]:
    """All legs of a plan, then the rest on one rank."""
    found: list[int] = []
    state = None
    for count, world, batch, threads, prefetch in plan:
        own = {"batch_size": batch, "num_workers": threads, "prefetch_factor": prefetch}
        part, state = leg(data, state, count, world, {**options, **own})
        found += part
    rest, _ = leg(data, state, 1 << 30, 1, {**options, "batch_size": 13})
    return found + rest


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plan=legs)
def test_a_native_run_is_the_same_however_it_is_cut(
    data: Dataset, mode: str, plan: list[tuple[int, ...]]
) -> None:
    """Cut n times over threads, prefetch, world and batch sizes and the edges of epochs."""
    options = {"shuffle": True, **MODES[mode]}
    assert cut_and_joined(data, plan, options) == uninterrupted(data, options)


@settings(max_examples=20)
@given(plan=legs)
def test_a_foreign_run_is_the_same_however_it_is_cut(plan: list[tuple[int, ...]]) -> None:
    """The same for a data set of somebody else, without workers."""
    data, options = Rows(), {"shuffle": True}
    without = [(count, world, batch, 0, 0) for count, world, batch, _, _ in plan]
    found: list[int] = []
    state = None
    for count, world, batch, *_ in without:
        part, state = leg(data, state, count, world, {**options, "batch_size": batch})
        found += part
    rest, _ = leg(data, state, 1 << 30, 1, {**options, "batch_size": 13})
    assert found + rest == uninterrupted(data, options)


@pytest.mark.parametrize("persistent", [False, True])
def test_a_foreign_run_with_workers_is_the_same_when_cut(persistent: bool) -> None:
    """torch's workers ask far ahead; the state counts what was handed out."""
    options: dict[str, Any] = {
        "shuffle": True,
        "num_workers": 2,
        "prefetch_factor": 3,
        "persistent_workers": persistent,
        "batch_size": 9,
        "multiprocessing_context": "fork",
    }
    wanted = uninterrupted(Rows(), {"shuffle": True})
    first = DataLoader(Rows(), seed=4, **options)
    found = flat(first)
    run = iter(first)
    found += labels(next(run)) + labels(next(run))
    second = DataLoader(Rows(), seed=4, **options)
    second.load_state_dict(first.state_dict())
    found += flat(second) + flat(second)
    assert found == wanted


def test_an_iterable_is_resumed_by_reading_again() -> None:
    """What was handed out is skipped; the position after the last batch is the next epoch's."""
    loader = DataLoader(Stream(), 5)
    run = iter(loader)
    found = labels(next(run)) + labels(next(run))
    state = loader.state_dict()
    assert (state["epoch"], state["samples"]) == (0, 2)
    again = DataLoader(Stream(), 5)
    again.load_state_dict(state)
    assert found + flat(again) == list(range(23))
    assert again.skipped_batches_total == 2
    assert (again.state_dict()["epoch"], again.state_dict()["samples"]) == (1, 0)
    ended = iter(again)
    assert len(list(ended)) == 5
    assert next(ended, None) is None
    assert next(ended, None) is None
    assert again.state_dict()["epoch"] == 2


class Shared(Stream):
    """As Stream, dealt out to torch's workers: each has every other sample."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        worker = torch.utils.data.get_worker_info()
        number, count = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return iter([{"label": torch.tensor(i)} for i in range(number, 23, count)])


def test_an_iterable_with_workers_is_resumed_by_reading_again() -> None:
    """Two workers read ahead; the state counts what was handed out; no sample twice or never."""
    options: dict[str, Any] = {"batch_size": 3, "num_workers": 2, "prefetch_factor": 2}
    whole = flat(DataLoader(Shared(), **options))
    assert sorted(whole) == list(range(23))
    for cut in (1, 5):
        first = DataLoader(Shared(), **options)
        run = iter(first)
        found = [label for _ in range(cut) for label in labels(next(run))]
        state = json.loads(json.dumps(first.state_dict()))
        assert (state["epoch"], state["samples"]) == (0, cut)
        second = DataLoader(Shared(), **options)
        second.load_state_dict(state)
        assert found + flat(second) == whole
        assert second.skipped_batches_total == cut
        assert position(second) == (1, 0)


def position(loader: DataLoader) -> tuple[int, int]:
    state = loader.state_dict()
    return state["epoch"], state["samples"]


@pytest.mark.parametrize("native", [True, False])
def test_states_of_a_run(data: Dataset, native: bool) -> None:
    """Break, iter() again, set_epoch, the last batch: what API.md says of each."""
    loader = DataLoader(data if native else Rows(), 10, shuffle=True, seed=1)
    whole = [flat(loader) for _ in range(4)]
    assert position(loader) == (4, 0)
    loader.set_epoch(0)
    for _ in zip(range(3), loader, strict=False):
        pass  # zip takes one batch more than it gives
    assert position(loader)[0] == 0
    assert flat(loader) == whole[1]  # iter() again: the next epoch
    assert position(loader) == (2, 0)
    run = iter(loader)
    next(run)
    assert position(loader) == (2, 10)
    loader.set_epoch(2)  # the epoch it is in: the position stays, and is gone on from
    assert position(loader) == (2, 10)
    assert flat(loader) == whole[2][10:]
    loader.set_epoch(1)
    assert flat(loader) == whole[1]
    run = iter(loader)
    for _ in range(len(loader)):
        next(run)
    assert position(loader) == (3, 0)  # before StopIteration was seen
    assert next(run, None) is None
    assert next(run, None) is None
    assert position(loader) == (3, 0)
    iter(loader)
    iter(loader)  # nothing was taken: it is still epoch 3
    assert flat(loader) == whole[3]
    with pytest.raises(ConfigError, match="epoch is -1"):
        loader.set_epoch(-1)


@pytest.mark.parametrize("native", [True, False])
def test_consumed_counts_what_a_wrapper_has_used(data: Dataset, native: bool) -> None:
    """A wrapper reads all ahead and uses little; the state is at what it used, over the edge."""
    source = data if native else Rows()
    loader = DataLoader(source, 30, shuffle=True, seed=1)
    loader.consumed(0)
    ahead = [labels(batch) for batch in loader] + [labels(batch) for batch in loader]
    assert position(loader) == (0, 0)
    for used, wanted in ((1, (0, 30)), (2, (0, 90)), (1, (1, 0)), (1, (1, 30))):
        loader.consumed(used)
        assert position(loader) == wanted
    again = DataLoader(source, 30, shuffle=True, seed=1)
    again.load_state_dict(loader.state_dict())
    assert flat(again) == [label for batch in ahead[5:] for label in batch]
    with pytest.raises(ConfigError, match="4 batches consumed, 3 were handed out"):
        loader.consumed(4)


def test_a_wrapper_may_read_far_ahead() -> None:
    """More batches than are remembered before the first consumed() call."""
    loader = DataLoader(Rows(5000), 1)
    loader.consumed(0)
    list(loader)
    loader.consumed(3000)
    assert position(loader) == (0, 3000)
    late = DataLoader(Rows(5000), 1)
    list(late)
    late.consumed(24)
    assert position(late) == (0, 5000 - 1024 + 24)


def test_a_state_of_another_run_is_refused_and_both_are_shown(data: Dataset) -> None:
    """Data set, seed, shuffle: nothing is loaded, the loader stands where it stood."""
    loader = DataLoader(data, 10, shuffle=True, seed=1)
    next(iter(loader))
    other = write(data.pool, "b", PLAIN, 5)
    for made, pattern in (
        (DataLoader(other, 10, shuffle=True, seed=1), data.fingerprint),
        (DataLoader(other, 10, shuffle=True, seed=1), other.fingerprint),
        (DataLoader(data, 10, shuffle=True, seed=2), "seed 1 was saved, 2 is set"),
        (DataLoader(data, 10, seed=1), "order global was saved, sequential is set"),
    ):
        with pytest.raises(ConfigError, match=pattern):
            made.load_state_dict(loader.state_dict())
        assert position(made) == (0, 0)
    with pytest.raises(ConfigError, match=r"Rows\[97\].*Rows\[96\]"):
        DataLoader(Rows(96)).load_state_dict(DataLoader(Rows()).state_dict())
    with pytest.raises(FormatTooNew):
        loader.load_state_dict({**loader.state_dict(), "version": 99})


def test_other_sizes_are_no_other_run(data: Dataset) -> None:
    """Batch size, threads, prefetch, memory and mode are no part of a state."""
    loader = DataLoader(data, 10, shuffle=True, seed=1, num_workers=1, cache=0)
    next(iter(loader))
    again = DataLoader(
        data, 4, shuffle=True, seed=1, num_workers=3, memory=LoaderMemory(prefetch_bytes="1MiB")
    )
    again.load_state_dict(loader.state_dict())
    assert position(again) == (0, 10)


def test_states_are_json_and_shared_with_nobody(data: Dataset) -> None:
    loader = DataLoader(data, 10)
    state = loader.state_dict()
    state["fingerprints"].clear()
    assert loader.state_dict()["fingerprints"] == [data.fingerprint]
    assert json.loads(json.dumps(loader.state_dict())) == loader.state_dict()


KILLED = """
import sys, hpstore
from hpstore.loaders import DataLoader, Dataset
pool = hpstore.open(sys.argv[1])
loader = DataLoader(Dataset(pool, "a"), 8, shuffle=True, num_workers=2, cache=0)
run = iter(loader)
print(len(next(run)), flush=True)
sys.stdin.read()
"""


def test_a_killed_loader_leaves_nothing_in_shared_memory(data: Dataset) -> None:
    """It never had any: no map and no descriptor of it leads there when SIGKILL comes."""
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(data.pool.config.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert child.stdout is not None
    assert child.stdin is not None
    assert child.stdout.readline().strip()
    process = Path(f"/proc/{child.pid}")
    maps = (process / "maps").read_text()
    files = [os.readlink(path) for path in (process / "fd").iterdir()]
    child.kill()
    child.wait(30)
    child.stdin.close()
    child.stdout.close()
    own = tempfile.gettempdir()  # may itself be in memory
    used = [*(line.split(maxsplit=5)[-1] for line in maps.splitlines()), *files]
    assert not [name for name in used if name.startswith("/dev/shm") and not name.startswith(own)]
