"""`hpstore memory`: which datasets a node keeps, and freeing them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from hpstore.loaders import DataLoader, Dataset, DatasetWriter, Field
from hpstore.node_memory.keeper import Keeper
from hpstore.node_memory.meeting_place import keeper_directory
from hpstore.pool.pool import Pool
from hpstore.units import KIB
from tests.fault.common import poll
from tests.integration.cli_cases import Cli
from tests.integration.node_keepers import keeping, pages_there, whole


@pytest.fixture
def cli(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(tmp_path, capsys)


@pytest.fixture
def keeper(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> Iterator[Keeper]:
    """A keeper, and a dataset to keep."""
    monkeypatch.setenv("HPSTORE_NODE_MEMORY", "on")
    with DatasetWriter(pool, "train", {"x": Field("uint8", (16 * KIB,))}) as out:
        out.write_batch({"x": np.zeros((300, 16 * KIB), np.uint8)})
    with keeping(keeper_directory(pool.config.settings)) as made:
        yield made


def test_what_is_kept_is_listed_and_freed(pool: Pool, keeper: Keeper, cli: Cli) -> None:
    place = ("--pool", cli.pool)
    with Dataset(pool, "train") as data, closing(DataLoader(data, 8)) as loader:
        whole(loader)
        poll(20.0, lambda: all(there == of for there, of in pages_there(keeper)))
        shown = cli("memory", "list", *place)
        assert "train" in shown
        assert "in use" in shown
        (row,) = cli.json("memory", "list", *place)["datasets"]
        assert row["bytes"] >= 300 * 16 * KIB
        assert (row["filled"], len(row["processes"]), row["unused_seconds"]) == (1.0, 1, 0)
        assert "hpstore memory list" in cli("status", cli.pool)
        assert cli.json("status", cli.pool)["node_memory"]["bytes"] == row["bytes"]
        assert cli.json("memory", "free", "another", *place)["later_bytes"] == 0
        assert "are in use" in cli("memory", "free", "train", *place)
        assert "with its processes" in cli("memory", "list", *place)
        assert len(list(loader)) == 38
    poll(20.0, lambda: keeper.empty)
    assert "nothing is kept" in cli("memory", "list", *place)
    with Dataset(pool, "train") as data, closing(DataLoader(data, 8)) as loader:
        whole(loader)
    poll(20.0, lambda: not keeper.listing()[0]["processes"])
    assert cli.json("memory", "free", "--all", *place)["freed_bytes"] > 0
    assert keeper.empty
    assert "memory list" not in cli("status", cli.pool)


def test_without_a_keeper_there_is_nothing(pool: Pool, cli: Cli) -> None:
    place = ("--pool", cli.pool)
    assert cli.json("memory", "list", *place) == {"process": 0, "bytes": 0, "datasets": []}
    assert cli.json("memory", "free", "--all", *place) == {"freed_bytes": 0, "later_bytes": 0}


@pytest.mark.parametrize("words", [(), ("train", "--all")])
def test_one_dataset_is_named_or_all(cli: Cli, words: tuple[str, ...]) -> None:
    assert "name the dataset" in cli("memory", "free", *words, code=2)
