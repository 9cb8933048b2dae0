"""An epoch of the loader has every sample once, with every byte, however it is stored and read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hpstore.errors import ConfigError
from hpstore.loaders import DataLoader, Dataset, Mixture
from hpstore.loaders.sampling.order import GlobalOrder
from hpstore.pool.pool import Pool
from tests.integration.data_sets import make_pool
from tests.integration.loader_cases import (
    COUNT,
    KINDS,
    MODES,
    PLAIN,
    check,
    flat,
    labels,
    ranks,
    write,
)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with make_pool(Path(tmp_path_factory.mktemp("pool"))) as made:
        yield made


@pytest.fixture(scope="module")
def stored(pool: Pool) -> dict[str, Dataset]:
    """One data set of every kind."""
    return {
        kind: write(pool, kind.replace(" ", "-"), fields, COUNT, **options)
        for kind, (fields, options) in KINDS.items()
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
def test_an_epoch_has_every_sample_once_with_every_byte(
    stored: dict[str, Dataset], kind: str, mode: str
) -> None:
    """Every kind of data set in every mode, two epochs: complete, unique, right, other orders."""
    data, fields = stored[kind], KINDS[kind][0]
    loader = DataLoader(data, 10, **{"shuffle": True, **MODES[mode]}, num_workers=2, seed=5)
    runs = []
    for _ in range(2):
        found = []
        for batch in loader:
            check(batch, fields)
            found += labels(batch)
        assert sorted(found) == list(range(COUNT))
        runs.append(found)
    assert runs[0] != runs[1]
    wanted = {"window": "window"}.get(mode, mode)
    if kind not in ("scalars only", "larger than a unit"):  # these have no pages to keep
        assert loader.stats()["mode"] == wanted
    loader.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("batch", [3, 200])
def test_ranks_share_an_epoch(
    stored: dict[str, Dataset], mode: str, world: int, batch: int
) -> None:
    """Batches far larger than windows too: together the ranks have every sample once, in order.

    A rank skips over what others read: what it does not need must not fill the room for windows.
    """
    options: dict[str, Any] = {"shuffle": True, "tail": "uneven", **MODES[mode]}
    loaders = ranks(stored["rows"], world, batch_size=batch, **options)
    steps = [[labels(b) for b in loader] for loader in loaders]
    assert [len(s) for s in steps] == [len(loader) for loader in loaders]
    joined = []
    for number in range(max(len(s) for s in steps)):
        for own in steps:
            joined += own[number] if number < len(own) else []
    assert sorted(joined) == list(range(COUNT))
    alone = DataLoader(stored["rows"], batch_size=7, **{"shuffle": True, **MODES[mode]})
    assert joined == flat(alone)
    assert all(loader.state_dict()["epoch"] == 1 for loader in loaders)
    assert all(loader.state_dict()["samples"] == 0 for loader in loaders)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tail", ["pad", "drop"])
def test_even_ranks_have_equally_many_rows_for_many_epochs(
    stored: dict[str, Dataset], mode: str, tail: Any
) -> None:
    """The last global batch is filled from the epoch's begin, whose windows have gone by then."""
    options: dict[str, Any] = {"shuffle": True, **MODES[mode]}
    loaders = ranks(stored["rows"], 2, batch_size=16, tail=tail, **options)
    for _ in range(3):
        runs = [[labels(batch) for batch in loader] for loader in loaders]
        assert [len(b) for b in runs[0]] == [len(b) for b in runs[1]]
        found = [label for run in runs for batch in run for label in batch]
        assert len(found) == (COUNT + 1 if tail == "pad" else COUNT - 1)
        assert len(set(found)) == min(len(found), COUNT)


@pytest.mark.parametrize("kind", ["native", "foreign", "mixture"])
def test_ranks_take_equally_many_steps_unless_told_otherwise(pool: Pool, kind: str) -> None:
    """Three samples on up to eleven ranks: the epoch's first samples come round, several times;
    with "drop" nothing is left, with "uneven" each sample comes once."""
    few: Any = write(pool, f"few-{kind}", PLAIN, 3)
    if kind == "foreign":
        few = [{"label": number} for number in range(3)]
    elif kind == "mixture":
        few = Mixture([few], [1])
    for world in (2, 5, 11):
        padded = ranks(few, world, batch_size=4)
        for _ in range(2):
            found = [flat(loader) for loader in padded]
            assert {len(rows) for rows in found} == {-(-3 // world)}
            joined = [label for rows in found for label in rows]
            assert joined == [number % 3 for number in range(len(joined))]
        assert {len(loader) for loader in padded} == {1}
        assert padded[-1].state_dict() == padded[0].state_dict()
        dropped = ranks(few, world, batch_size=4, tail="drop")
        assert {len(flat(loader)) for loader in dropped} == {3 // world}
        uneven = ranks(few, world, batch_size=4, tail="uneven")
        assert sorted(label for loader in uneven for label in flat(loader)) == [0, 1, 2]
        for loader in (*padded, *dropped, *uneven):
            loader.close()


def test_no_shuffle_is_the_order_of_writing(stored: dict[str, Dataset]) -> None:
    assert flat(DataLoader(stored["rows"], 10)) == list(range(COUNT))
    assert flat(DataLoader(stored["rows"], 10, shuffle="none")) == list(range(COUNT))


def test_drop_last_and_len(stored: dict[str, Dataset]) -> None:
    """len() is what iterating gives, with and without drop_last, for each rank."""
    for drop, tail in ((False, "pad"), (False, "uneven"), (True, "pad")):
        options: dict[str, Any] = {"batch_size": 8, "drop_last": drop, "tail": tail}
        for world in (1, 2, 4):
            for loader in ranks(stored["rows"], world, **options):
                sizes = [len(labels(batch)) for batch in loader]
                assert len(sizes) == len(loader)
                assert not drop or set(sizes) == {8}


def test_a_data_set_of_nothing_has_no_batches(pool: Pool) -> None:
    """len 0, in every mode, epoch after epoch."""
    empty = write(pool, "empty", PLAIN, 0)
    for options in MODES.values():
        for loader in (
            DataLoader(empty, 4, **{"shuffle": True, **options}),
            *ranks(empty, 2, batch_size=4, **{"shuffle": True, **options}),
        ):
            assert len(loader) == 0
            assert [list(loader), list(loader)] == [[], []]


def test_a_batch_larger_than_the_data_set_is_all_of_it(stored: dict[str, Dataset]) -> None:
    for options in MODES.values():
        (batch,) = DataLoader(stored["rows"], 1000, **{"shuffle": True, **options})
        assert sorted(labels(batch)) == list(range(COUNT))
        dropped = DataLoader(stored["rows"], 1000, drop_last=True, **{"shuffle": True, **options})
        assert list(dropped) == []


def test_subsets_stay_native_and_subclasses_of_ones_own_do_not(
    stored: dict[str, Dataset],
) -> None:
    """random_split, a Subset of a Subset: dicts of tensors; an overridden __getitem__ is called."""
    data = stored["rows"]
    for options in MODES.values():
        settings = {"shuffle": True, **options}
        parts = torch.utils.data.random_split(data, [60, 37])
        found = [flat(DataLoader(part, 8, **settings)) for part in parts]
        assert [len(f) for f in found] == [60, 37]
        assert sorted(found[0] + found[1]) == list(range(COUNT))
        inner = torch.utils.data.Subset(torch.utils.data.Subset(data, [5, 9, 50, 3]), [3, 1])
        assert sorted(flat(DataLoader(inner, 8, **settings))) == [3, 9]

    class Own(torch.utils.data.Subset[Any]):
        def __getitem__(self, index: Any) -> Any:
            return {"label": torch.tensor(-1)}

        def __getitems__(self, indices: list[int]) -> Any:
            return [self[i] for i in indices]

    assert flat(DataLoader(Own(data, [1, 2, 3]), 2)) == [-1, -1, -1]

    class Augmented(Dataset):
        def __getitems__(self, indices: Any) -> Any:
            found: Any = super().__getitems__(indices)
            return [{"label": one["label"] + 1000} for one in found]

    own = Augmented(data.pool, data.name)
    assert flat(DataLoader(own, 50)) == list(range(1000, 1000 + COUNT))


def test_one_field_of_several_is_read(stored: dict[str, Dataset]) -> None:
    """Dataset(fields=...): the others are not in the batch."""
    data = Dataset(stored["ragged rows"].pool, "ragged-rows", fields=["sound", "label"])
    for options in MODES.values():
        for batch in DataLoader(data, 20, **{"shuffle": True, **options}):
            assert list(batch) == ["sound", "label"]


def test_an_order_of_ones_own_is_followed(stored: dict[str, Dataset]) -> None:
    order = GlobalOrder(50, 3)
    found = flat(DataLoader(stored["rows"], 7, shuffle=order))
    assert found == order.indices(0, 0, 50).tolist()
    with pytest.raises(ConfigError, match="chooses from 98"):
        DataLoader(stored["rows"], shuffle=GlobalOrder(98, 3))
