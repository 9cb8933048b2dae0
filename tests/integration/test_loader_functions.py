"""Functions of the user: samples, batches, their exceptions and their random numbers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data

from hpstore.loaders import DataLoader, Dataset
from hpstore.pool.pool import Pool
from tests.fault.common import within
from tests.integration.data_sets import FIELDS, check_sample, make_pool
from tests.integration.loader_cases import COUNT, MODES, PLAIN, flat, labels, write

LIMIT = 60.0


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with make_pool(Path(tmp_path_factory.mktemp("pool"))) as made:
        yield made


@pytest.fixture(scope="module")
def data(pool: Pool) -> Dataset:
    return write(pool, "plain", PLAIN, COUNT)


@pytest.fixture(scope="module")
def ragged(pool: Pool) -> Dataset:
    return write(pool, "ragged", FIELDS, 40)


@pytest.mark.parametrize("mode", MODES)
def test_samples_for_functions_are_those_of_getitem(ragged: Dataset, mode: str) -> None:
    """transform and collate_fn get what ragged[i] gives: bytes and str as objects."""
    options: dict[str, Any] = {"shuffle": True, **MODES[mode]}
    seen: list[dict[str, Any]] = []

    def keep(one: dict[str, Any]) -> dict[str, Any]:
        seen.append(one)
        return one

    loader = DataLoader(ragged, 7, transform=keep, collate_fn=list, num_workers=1, **options)
    found = [one for batch in loader for one in batch]
    assert sorted(int(one["label"]) for one in found) == list(range(40))
    for one in found:
        check_sample(one, int(one["label"]))
    assert len(seen) >= 40
    loader.close()


def bad(error: int) -> Any:
    def refuse(one: Any) -> Any:
        if error in np.atleast_1d(one["label"]):
            raise ValueError("not this one")
        return one

    return refuse


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("which", ["transform", "collate_fn", "batch_transform"])
def test_an_exception_of_the_users_is_raised_with_the_sample(
    data: Dataset, mode: str, which: str
) -> None:
    """Its own class, at its batch, with a note that names the sample; the state is before it."""
    function: Any = bad(13)
    if which == "collate_fn":

        def function(samples: list[Any]) -> Any:
            return torch.utils.data.default_collate([bad(13)(one) for one in samples])

    loader = DataLoader(data, 10, seed=2, **{"shuffle": True, **MODES[mode]}, **{which: function})
    whole = flat(DataLoader(data, 10, seed=2, **{"shuffle": True, **MODES[mode]}))
    run = iter(loader)
    found: list[int] = []
    with pytest.raises(ValueError, match="not this one") as caught:
        within(LIMIT, lambda: found.extend(label for batch in run for label in labels(batch)))
    (note,) = caught.value.__notes__
    assert "13" in note
    assert which in note
    if which == "transform":
        assert f"sample 13 (position {whole.index(13)} of epoch 0)" in note
    assert found == whole[: len(found)]
    assert len(found) == whole.index(13) // 10 * 10
    assert loader.state_dict()["samples"] == len(found)
    within(LIMIT, loader.close)


def noisy(one: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {"label": one["label"], "noise": torch.from_numpy(rng.random(3))}


def noisy_batch(batch: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**batch, "shared": torch.tensor(rng.random())}


@pytest.mark.parametrize("mode", MODES)
def test_random_numbers_depend_on_seed_epoch_and_position_alone(data: Dataset, mode: str) -> None:
    """Threads, prefetch, batch and world size do not matter; seed and epoch do; all differ."""

    def run(seed: int = 1, epoch: int = 0, **options: Any) -> dict[int, tuple[float, ...]]:
        loader = DataLoader(
            data, seed=seed, transform=noisy, **{"shuffle": True, **MODES[mode], **options}
        )
        loader.set_epoch(epoch)
        found = {
            label: tuple(noise)
            for batch in loader
            for label, noise in zip(labels(batch), batch["noise"].tolist(), strict=True)
        }
        loader.close()
        return found

    one = run(batch_size=10, num_workers=1)
    assert len(set(one.values())) == COUNT
    assert run(batch_size=7, num_workers=3, prefetch_factor=5) == one
    halves = [run(batch_size=5, rank=r, world_size=2, tail="uneven") for r in range(2)]
    assert halves[0] | halves[1] == one
    assert not set(run(batch_size=10, seed=2).values()) & set(one.values())
    assert not set(run(batch_size=10, epoch=1).values()) & set(one.values())


def test_random_numbers_differ_under_a_sampler_too(data: Dataset) -> None:
    """Positions count batches there; no two samples of an epoch share a generator."""
    batches = torch.utils.data.BatchSampler(range(COUNT), 4, False)
    loader = DataLoader(data, batch_sampler=batches, transform=noisy)
    noise = [tuple(row) for batch in loader for row in batch["noise"].tolist()]
    assert len(set(noise)) == COUNT


def test_random_numbers_of_batches(data: Dataset) -> None:
    """One generator a batch, by epoch and position; another one than that of its samples."""
    made = [
        DataLoader(data, 10, transform=noisy, batch_transform=noisy_batch, num_workers=n)
        for n in (1, 3)
    ]
    runs = [[(b["shared"].item(), b["noise"][0, 0].item()) for b in loader] for loader in made]
    assert runs[0] == runs[1]
    assert len({value for pair in runs[0] for value in pair}) == 20
