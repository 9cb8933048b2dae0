"""Devices that are away are no damage: on_error="skip" does not pass an epoch by."""

from __future__ import annotations

import contextlib
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from hpstore.errors import TooManyErasures
from hpstore.loaders import DataLoader, Dataset
from hpstore.testing.memory_pool import Harness
from tests.integration.data_sets import write_samples

COUNT = 40


def loader_of(data: Dataset, cache: Any) -> DataLoader:
    return DataLoader(data, 4, shuffle=True, cache=cache, on_error="skip", prefetch_factor=1)


@pytest.mark.parametrize("cache", [0, "64MiB", None])
def test_an_outage_is_an_error_and_the_loader_goes_on_behind_it(tmp_path: Path, cache: Any) -> None:
    """m + 1 devices are away for a while: nothing is skipped, and each sample comes once."""
    harness = Harness(tmp_path, data=2, parity=1, devices=4)
    with harness.open(threads=True) as pool:
        data = write_samples(pool, "train", range(COUNT))
        data.close()
        with closing(loader_of(Dataset(pool, "train"), cache)) as loader:
            run = iter(loader)
            seen = next(run)["label"].tolist()
            harness.lose(harness.urls[:3])
            with contextlib.suppress(TooManyErasures):  # not where all was read before
                for batch in run:
                    seen += batch["label"].tolist()
            assert loader.stats()["skipped_samples"] == 0
            state = loader.state_dict()
        harness.bring_back()
        if len(seen) < COUNT:
            with closing(loader_of(Dataset(pool, "train"), cache)) as loader:
                loader.load_state_dict(state)
                for batch in loader:
                    seen += batch["label"].tolist()
        assert sorted(seen) == list(range(COUNT))
