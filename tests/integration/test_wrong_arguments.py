"""Wrong arguments of the data side are a ConfigError, a ValueError, that names them, at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from hpstore.errors import ConfigError
from hpstore.loaders import (
    Cache,
    DataLoader,
    Dataset,
    DatasetWriter,
    Field,
    delete_dataset,
    ingest,
    list_datasets,
    publish_parts,
    remove_orphans,
    unfinished_ingests,
    verify_dataset,
    written_parts,
)
from hpstore.pool.pool import Pool
from tests.integration.data_sets import make_pool
from tests.integration.loader_cases import PLAIN, write

X = {"x": Field("int64")}
NO_POOL: Any = None
NO_NAME: Any = 5


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with make_pool(tmp_path_factory.mktemp("pool")) as made:
        write(made, "there", PLAIN, 10)
        yield made


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"shuffle": 3}, "shuffle 3"),
        ({"shuffle": [1]}, r"shuffle \[1\]"),
        ({"seed": "x"}, "seed is 'x'"),
        ({"seed": None}, "seed"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 1.5}, "seed is 1.5"),
        ({"device": "nonsense"}, "device 'nonsense'"),
        ({"device": 1.5}, "device 1.5"),
        ({"transform": 5}, "transform is a int"),
        ({"batch_transform": "f"}, "batch_transform is a str"),
        ({"collate_fn": 4}, "collate_fn is a int"),
        ({"mesh": 3}, "mesh is a int"),
        ({"rank": "1", "world_size": 2}, "rank is '1'"),
        ({"shard": "no"}, "shard is 'no'"),
        ({"rank": 0, "world_size": 1.5}, "world_size is 1.5"),
        ({"tail": "odd", "sampler": [0, 1]}, "tail='odd'"),
        ({"cache": -5}, "cache is -5"),
        ({"cache": "much"}, "cache: 'much'"),
        ({"cache": [1]}, r"cache \[1\]"),
        ({"snapshot_every_n_steps": "all"}, "snapshot_every_n_steps is 'all'"),
        ({"snapshot_every_n_steps": -1}, "snapshot_every_n_steps is -1"),
        ({"memory": "8GiB"}, r"memory is a str: give a LoaderMemory\(...\)"),
        ({"gpu": "off"}, r"gpu is a str: give a GpuTransfer\(...\)"),
    ],
)
def test_wrong_arguments_of_a_loader_are_refused_when_it_is_made(
    pool: Pool, native: bool, options: dict[str, Any], said: str
) -> None:
    """For data sets of others, too: not in the first batch, nor never."""
    data: Any = Dataset(pool, "there") if native else [1, 2, 3]
    with pytest.raises(ConfigError, match=said):
        DataLoader(data, 2, **options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_workers": "x"}, "num_workers is 'x'"),
        ({"prefetch_factor": 0}, "prefetch_factor is 0"),
        ({"num_workers": -1}, "num_workers option should be non-negative"),
    ],
)
def test_numbers_that_torch_does_not_see_are_checked(
    pool: Pool, options: dict[str, Any], said: str
) -> None:
    """Of threads, where ours read; torch refuses them for data sets of others."""
    with pytest.raises(ConfigError, match=said):
        DataLoader(Dataset(pool, "there"), 2, **options)


def test_positions_that_are_none_are_refused(pool: Pool) -> None:
    loader = DataLoader(Dataset(pool, "there"), 2)
    wrong: Any
    for wrong in (None, [], {}):
        with pytest.raises(ConfigError, match="not the state of a hpstore loader"):
            loader.load_state_dict(wrong)
    for wrong in (-1, 1.5, "x"):
        with pytest.raises(ConfigError, match="epoch is"):
            loader.set_epoch(wrong)
        with pytest.raises(ConfigError, match="batches is"):
            loader.consumed(wrong)
    loader.close()


USES: list[tuple[Callable[[Pool], object], str]] = [
    (lambda pool: Dataset(NO_POOL, "there"), "takes an open pool"),
    (lambda pool: list_datasets(NO_POOL), "takes an open pool"),
    (lambda pool: delete_dataset(NO_POOL, "there"), "takes an open pool"),
    (lambda pool: publish_parts(NO_POOL, "there"), "takes an open pool"),
    (lambda pool: written_parts(NO_POOL, "there"), "takes an open pool"),
    (lambda pool: remove_orphans(NO_POOL, "there"), "takes an open pool"),
    (lambda pool: verify_dataset(NO_POOL, "there"), "takes an open pool"),
    (lambda pool: unfinished_ingests(NO_POOL), "takes an open pool"),
    (lambda pool: Dataset(pool, NO_NAME), "is a str, not a int"),
    (lambda pool: delete_dataset(pool, NO_NAME), "is a str, not a int"),
    (lambda pool: publish_parts(pool, NO_NAME), "is a str, not a int"),
    (lambda pool: DatasetWriter(pool, NO_NAME, X), "is a str, not a int"),
    (lambda pool: ingest(pool, NO_NAME, np.arange(3)), "is a str, not a int"),
]


@pytest.mark.parametrize(("use", "said"), USES)
def test_what_is_no_pool_or_no_name_is_refused(
    pool: Pool, use: Callable[[Pool], object], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        use(pool)
    assert [found.name for found in list_datasets(pool)] == ["there"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"fields": 5}, "fields are a int"),
        ({"fields": [("x", X["x"])]}, "fields are a list"),
        ({"seed": "x", "shuffle": True}, "seed is 'x'"),
        ({"shuffle": "window"}, "shuffle 'window'"),
        ({"part": 5}, "part 5"),
        ({"part": ("a", 2)}, "part is 'a'"),
        ({"part": (2, 2)}, "i < n"),
    ],
)
def test_wrong_arguments_of_a_writer_are_refused(
    pool: Pool, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        DatasetWriter(pool, "made", **{"fields": X, **options})


def test_a_sample_that_is_no_dict_is_refused(pool: Pool) -> None:
    """The writer goes on."""
    with DatasetWriter(pool, "samples", X) as writer:
        wrong: Any
        for wrong in (5, None, [1]):
            with pytest.raises(ConfigError, match=r"sample 0 is a \w+, not a dict of its fields"):
                writer.write(wrong)
            with pytest.raises(ConfigError, match="not a dict of its fields"):
                writer.write_batch(wrong)
        writer.write({"x": 1})
    assert len(Dataset(pool, "samples")) == 1
    delete_dataset(pool, "samples")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"format": "x"}, "format 'x'"),
        ({"names": "ab"}, "names are 'ab'"),
        ({"fields": "data"}, "fields are 'data': give a list of names"),
        ({"names": [5]}, "names are"),
        ({"workers": "x"}, "workers is 'x'"),
        ({"workers": 0}, "workers is 0"),
        ({"max_skipped": -1}, "max_skipped is -1"),
        ({"shuffle": "none"}, "shuffle 'none'"),
        ({"seed": "x"}, "seed is 'x'"),
    ],
)
def test_wrong_arguments_of_ingest_are_refused(
    pool: Pool, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        ingest(pool, "read", np.arange(9), **options)
    assert unfinished_ingests(pool) == {}


def test_fields_of_a_dataset_are_a_list(pool: Pool) -> None:
    """The letters of a text were names: "i" was a field, "label" none."""
    with pytest.raises(ConfigError, match="fields are 'label': give a list of names"):
        Dataset(pool, "there", fields="label")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"share": 5}, "share is 5"),
        ({"share": ""}, "share is ''"),
        ({"prefetch_threads": -1}, "prefetch_threads is -1"),
    ],
)
def test_wrong_arguments_of_a_cache_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Cache("1MiB", **options)
