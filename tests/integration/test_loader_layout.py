"""layout=torch.jagged: ragged fields as nested tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

import hpstore
from hpstore.errors import ConfigError
from hpstore.loaders import (
    DataLoader,
    Dataset,
    DatasetWriter,
    Field,
    GpuTransfer,
    LoaderMemory,
    Ragged,
)
from hpstore.testing.fake_gpu import FakeGpu, FakeMark
from tests.integration.loader_cases import MODES

COUNT = 40
FIELDS = {
    "t": Field("float32", (None, 3)),
    "b": Field("bytes"),
    "s": Field("str"),
    "x": Field("uint8", (5,)),
    "n": Field("int64"),
}


@pytest.fixture
def data(pool: hpstore.Pool) -> Dataset:
    """Sample n has n % 6 rows: some have none."""
    with DatasetWriter(pool, "d", FIELDS, unit_bytes=16 * 1024) as writer:
        for n in range(COUNT):
            writer.write(
                {
                    "t": torch.full((n % 6, 3), float(n)),
                    "b": b"b" * (n % 4),
                    "s": f"sample {n}",
                    "x": torch.full((5,), n, dtype=torch.uint8),
                    "n": n,
                }
            )
    return Dataset(pool, "d")


class Parts(FakeGpu):
    """Is sent values and offsets alone: copies of nested tensors are torch's own business."""

    def __init__(self) -> None:
        super().__init__()
        self.ordered = 0

    def mark(self, started: object = None) -> FakeMark:
        mark = super().mark(started)
        plain = mark.order

        def order(tensors: Iterable[torch.Tensor]) -> None:
            listed = list(tensors)
            assert not any(one.is_nested for one in listed)
            self.ordered += len(listed)
            plain(listed)

        mark.order = order  # type: ignore[method-assign]
        return mark

    def upload(self, tensor: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        assert not tensor.is_nested
        return super().upload(tensor, into)


def check(batch: dict[str, Any], plain: dict[str, Any]) -> None:
    """The same samples as without a layout, in torch's own form."""
    for name in ("t", "b"):
        assert batch[name].is_nested
        assert batch[name].layout == torch.jagged
        assert isinstance(plain[name], Ragged)
        rows = batch[name].unbind()
        assert len(rows) == len(plain[name])
        assert all(torch.equal(a, b) for a, b in zip(rows, plain[name], strict=True))
    assert batch["s"] == plain["s"]
    assert torch.equal(batch["x"], plain["x"])
    assert torch.equal(batch["n"], plain["n"])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("gpu", [False, True])
def test_ragged_fields_are_nested_tensors(data: Dataset, mode: str, gpu: bool) -> None:
    """In every mode of reading, on the way to a GPU too; nothing else changes."""
    options: dict[str, Any] = {"batch_size": 7, "shuffle": True, **MODES[mode]}
    plain = list(DataLoader(data, **options))
    device = Parts() if gpu else None
    loader = DataLoader(
        data, layout=torch.jagged, device=device, gpu=GpuTransfer(direct="off"), **options
    )
    for _ in range(2):
        found = list(loader)
        assert len(found) == len(plain)
        if loader.state_dict()["epoch"] == 1:
            for batch, expected in zip(found, plain, strict=True):
                check(batch, expected)
    if device is not None:  # two of each nested field, x and n
        assert device.ordered == 2 * len(plain) * 6


def test_a_batch_keeps_its_memory_while_others_are_made(data: Dataset) -> None:
    """Nested tensors are over the memory of batches, which is used again only without them."""
    kept = list(
        DataLoader(data, 4, layout=torch.jagged, memory=LoaderMemory(prefetch_bytes="1MiB"))
    )
    for batch in kept:
        for n, rows in zip(batch["n"].tolist(), batch["t"].unbind(), strict=True):
            assert rows.tolist() == [[float(n)] * 3] * (n % 6)


def test_a_batch_transform_gets_what_the_user_will_see(data: Dataset) -> None:
    def longest(batch: dict[str, Any]) -> torch.Tensor:
        padded: torch.Tensor = batch["t"].to_padded_tensor(0.0)
        return padded

    found = next(iter(DataLoader(data, 6, layout=torch.jagged, batch_transform=longest)))
    assert found.shape == (6, 5, 3)


def test_what_is_no_layout_of_batches_is_refused(data: Dataset) -> None:
    with pytest.raises(ConfigError, match=r"torch\.strided: torch\.jagged, or None"):
        DataLoader(data, 4, layout=torch.strided)
    with pytest.raises(ConfigError, match="pin_memory"):
        DataLoader(data, 4, layout=torch.jagged, pin_memory=True)
    others: Any = torch.utils.data.TensorDataset(torch.arange(4))
    with pytest.raises(ConfigError, match="layout: for data sets of hpstore alone"):
        DataLoader(others, 2, layout=torch.jagged)
