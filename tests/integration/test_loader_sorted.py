"""A window shuffle of data that are sorted by their label says so, and which window would do."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import Subset

from hpstore.errors import DeviceError
from hpstore.loaders import DataLoader, Dataset, DatasetWriter, Field, LoaderMemory
from hpstore.loaders.dataset.record_reader import StoredData
from hpstore.loaders.sampling.label_mix import entropy, measure
from hpstore.pool.pool import Pool
from hpstore.units import KIB
from tests.integration.data_sets import make_pool

COUNT, CLASSES = 4000, 10
FIELDS = {"x": Field("uint8", (1000,)), "label": Field("int64"), "number": Field("int64")}


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with make_pool(Path(tmp_path_factory.mktemp("pool"))) as made:
        yield made


def write(pool: Pool, name: str, labels: Any, **options: Any) -> Dataset:
    with DatasetWriter(
        pool, name, FIELDS, unit_bytes=16 * KIB, shard_bytes=400 * KIB, **options
    ) as writer:
        writer.write_batch(
            {
                "x": np.zeros((COUNT, 1000), np.uint8),
                "label": np.asarray(labels),
                "number": np.arange(COUNT),
            }
        )
    return Dataset(pool, name)


SORTED = np.arange(COUNT) * CLASSES // COUNT


def said(caplog: pytest.LogCaptureFixture, data: Any, window: str) -> str:
    caplog.clear()
    memory = LoaderMemory(window_bytes=window)
    with caplog.at_level(logging.WARNING, logger="hpstore"):
        DataLoader(data, 32, shuffle="window", cache=0, memory=memory).close()
    return caplog.text


def test_sorted_data_are_said_with_their_entropy_and_the_window_that_would_do(
    pool: Pool, caplog: pytest.LogCaptureFixture
) -> None:
    """Point 7: ten classes, small windows. The window that is named is silent, and mixes."""
    data = write(pool, "sorted", SORTED)
    text = said(caplog, data, "100KiB")
    found = re.search(r"sorted by 'label'.* have ([\d.]+) bits of it, of ([\d.]+) in", text)
    assert found is not None
    assert float(found[1]) < 0.8 * float(found[2]) < 3.33
    (wanted,) = re.findall(r'LoaderMemory\(window_bytes="(\w+)"\) would have', text)
    assert said(caplog, data, wanted) == ""
    windowed = DataLoader(
        data, COUNT // 4, shuffle="window", memory=LoaderMemory(window_bytes="100KiB"), cache=0
    )
    assert windowed.order is not None
    labels = data.scalars("label", windowed.order.indices(0, 500, 600))
    assert abs(entropy(labels) - float(found[1])) < 1.2  # what it measured is what one gets
    windowed.close()
    assert "sorted by" in said(caplog, Subset(data, range(0, COUNT, 2)), "100KiB")


def test_samples_without_a_label_are_a_class_of_their_own(
    pool: Pool, caplog: pytest.LogCaptureFixture
) -> None:
    """Not class 0, whose number stands in their place: half of the data have none, half class 0."""
    fields = FIELDS | {"label": Field("int64", optional=True)}
    with DatasetWriter(pool, "half", fields, unit_bytes=16 * KIB, shard_bytes=400 * KIB) as writer:
        for number in range(COUNT):
            label = None if number < COUNT // 2 else 0
            writer.write({"x": np.zeros(1000, np.uint8), "label": label, "number": number})
    with Dataset(pool, "half") as data:
        assert "sorted by 'label'" in said(caplog, data, "100KiB")


@pytest.mark.parametrize("how", ["on write", "before", "one class", "one window"])
def test_mixed_data_are_not_warned_of(
    pool: Pool, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """Nor is a field that is another one in every sample: a number is not a label."""
    labels = np.random.default_rng(1).permutation(SORTED) if how == "before" else SORTED
    labels = labels * 0 if how == "one class" else labels
    data = write(pool, how.replace(" ", "-"), labels, shuffle=how == "on write")
    window = "100MiB" if how == "one window" else "100KiB"
    assert said(caplog, data, window) == ""


def test_labels_that_cannot_be_read_do_not_keep_a_run_from_training(
    pool: Pool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write(pool, "unreadable", SORTED)

    def scalars(*_: object) -> Any:
        raise DeviceError("gone")

    monkeypatch.setattr(StoredData, "scalars", scalars)
    with caplog.at_level(logging.INFO, logger="hpstore"):
        loader = DataLoader(data, 32, shuffle="window", memory=LoaderMemory(window_bytes="100KiB"))
    assert "was not measured: gone" in caplog.text
    loader.close()


def test_few_samples_of_many_classes_are_compared_with_as_few() -> None:
    """500 classes, windows of 40 samples: 5 bits are all that there can be."""
    labels = np.random.default_rng(2).integers(0, 500, (64, 20))
    found = measure("y", list(labels), window_stripes=2, stripes=64)
    assert not found.poor
    assert found.random_bits < 5.5
    by_stripe = measure("y", [np.full(20, n) for n in range(64)], window_stripes=2, stripes=64)
    assert by_stripe.poor
    assert by_stripe.enough_stripes in (0, 64) or by_stripe.enough_bits > 5
