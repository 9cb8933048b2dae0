"""Every `*_bytes` argument of hpstore.loaders takes a number or text; errors name it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpstore import loaders
from hpstore.errors import ConfigError
from hpstore.loaders import (
    Cache,
    DataLoader,
    DatasetWriter,
    GpuTransfer,
    LoaderMemory,
    Mixture,
    ingest,
    ingest_parts,
)
from hpstore.pool.pool import Pool
from hpstore.units import KIB, bytes_argument
from tests.integration.data_sets import make_pool
from tests.integration.loader_cases import PLAIN, write

# what they return, not what they take
REPORTS = {"DatasetInfo", "DatasetReport", "IngestProgress", "IngestReport"}
Use = Callable[[Pool, Path, dict[str, Any]], object]


def use_writer(pool: Pool, directory: Path, options: dict[str, Any]) -> None:
    DatasetWriter(pool, "made", PLAIN, **options).abandon()


def use_ingest(pool: Pool, directory: Path, options: dict[str, Any]) -> None:
    ingest(pool, "read", np.arange(9), overwrite=True, **options)


def use_parts(pool: Pool, directory: Path, options: dict[str, Any]) -> None:
    np.save(directory / "x.npy", np.arange(9))
    ingest_parts(pool, "read", [directory / "x.npy"], overwrite=True, **options)


def use_memory(pool: Pool, directory: Path, options: dict[str, Any]) -> None:
    memory = LoaderMemory(**options)
    data = write(pool, "loaded", PLAIN, 3, overwrite=True)
    loader = DataLoader(data, 2, shuffle="window", memory=memory)
    assert len(list(loader)) == 2
    loader.close()


def use_transfer(pool: Pool, directory: Path, options: dict[str, Any]) -> None:
    GpuTransfer(**options)


def use_cache(pool: Pool, directory: Path, options: dict[str, Any]) -> None:
    disk = {"disk_path": directory / "tier"} if "disk_bytes" in options else {}
    Cache(**{"memory_bytes": "1MiB", **disk, **options}).close()


def use_order(pool: Pool, directory: Path, options: dict[str, Any]) -> None:
    mixed = Mixture([write(pool, "loaded", PLAIN, 3, overwrite=True)], [1])
    assert mixed.order("window", 0, **options).samples == 3


def use_source_orders(pool: Pool, directory: Path, options: dict[str, Any]) -> None:
    mixed = Mixture([write(pool, "loaded", PLAIN, 3, overwrite=True)], [1])
    assert [order.samples for order in mixed.source_orders("window", 0, **options)] == [3]


USES: dict[str, Use] = {
    "Cache": use_cache,
    "DatasetWriter": use_writer,
    "GpuTransfer": use_transfer,
    "LoaderMemory": use_memory,
    "Mixture.order": use_order,
    "Mixture.source_orders": use_source_orders,
    "ingest": use_ingest,
    "ingest_parts": use_parts,
}


def public_arguments() -> list[tuple[str, str]]:
    """(callable, argument) for each `*_bytes` of the public signatures."""
    found = []
    for name in loaders.__all__:
        made = getattr(loaders, name)
        methods = inspect.getmembers(made, inspect.isfunction) if inspect.isclass(made) else []
        calls = {name: made, **{f"{name}.{m}": call for m, call in methods if m[0] != "_"}}
        for where, call in calls.items():
            if name in REPORTS or not callable(call):
                continue
            found += [
                (where, one) for one in inspect.signature(call).parameters if one.endswith("_bytes")
            ]
    return found


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with make_pool(tmp_path_factory.mktemp("pool")) as made:
        yield made


def test_the_arguments_are_found() -> None:
    """Guards the test below against finding nothing."""
    assert {where for where, _ in public_arguments()} == USES.keys()


@pytest.mark.parametrize(("where", "argument"), public_arguments())
def test_a_size_is_a_number_or_text(pool: Pool, tmp_path: Path, where: str, argument: str) -> None:
    """64 KiB in both ways; other text, other types and negative numbers are refused by name."""
    for right in ("64KiB", "0.0625 MiB", 64 * KIB, np.int64(64 * KIB)):
        USES[where](pool, tmp_path, {argument: right})
    for wrong in ("64 parsecs", "", -1, 1.5, True, [64]):
        with pytest.raises(ConfigError, match=argument):
            USES[where](pool, tmp_path, {argument: wrong})


def test_options_that_mean_the_same_are_equal() -> None:
    """However their sizes were given: a loader compares them with its defaults."""
    assert LoaderMemory(prefetch_bytes="256MiB") == LoaderMemory()
    assert GpuTransfer(ring_bytes="0", arena_bytes="0.25 GiB") == GpuTransfer()
    assert hash(LoaderMemory(window_bytes="1KiB")) == hash(LoaderMemory(window_bytes=1024))
    assert LoaderMemory(window_bytes="1KiB") != LoaderMemory()


def test_a_number_below_the_least_is_refused() -> None:
    assert bytes_argument("n_bytes", "0") == bytes_argument("n_bytes", 0) == 0
    with pytest.raises(ConfigError, match="n_bytes is 0, at least 1"):
        bytes_argument("n_bytes", "0", least=1)
