"""A batch: its fields as tensors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hpstore.loaders import DataLoader, Dataset, Ragged
from tests.integration.data_sets import FIELDS, make_pool
from tests.integration.loader_cases import same, write


@pytest.fixture
def ragged(tmp_path: Path) -> Iterator[Dataset]:
    with make_pool(tmp_path) as pool:
        yield write(pool, "ragged", FIELDS, 40)


def test_ragged_fields_of_a_batch(ragged: Dataset) -> None:
    """Rows, iteration, nested tensors and moving: the same values."""
    batch = next(iter(DataLoader(ragged, 8)))
    sound = batch["sound"]
    assert isinstance(sound, Ragged)
    assert len(sound) == 8
    for row, one in enumerate(sound):
        assert torch.equal(one, sound[row])
        assert same(one, ragged[row]["sound"])
    assert torch.equal(sound[-1], sound[7])
    with pytest.raises(IndexError):
        sound[8]
    assert same(list(sound.nested().unbind()), list(sound))
    assert sound.to(torch.float64).values.dtype is torch.float64
    assert batch["text"] == [ragged[i]["text"] for i in range(8)]
