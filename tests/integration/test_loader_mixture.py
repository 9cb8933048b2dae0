"""Mixtures of data sets in a DataLoader."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

import hpstore
from hpstore import Pool
from hpstore.errors import ConfigError
from hpstore.loaders import DataLoader, Dataset, DatasetWriter, Field, Mixture, Ragged

FIELDS = {
    "x": Field("float32", (40,)),
    "t": Field("float32", (None,)),
    "s": Field("str"),
    "n": Field("int64"),
}


def write(pool: Pool, name: str, count: int, base: int) -> Dataset:
    """Samples whose every field tells their number."""
    with DatasetWriter(pool, name, FIELDS) as writer:
        for n in range(base, base + count):
            writer.write(
                {
                    "x": np.full(40, n, np.float32),
                    "t": np.full(n % 7, n, np.float32),
                    "s": f"sample {n}",
                    "n": n,
                }
            )
    return Dataset(pool, name)


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[list[Dataset]]:
    paths = [tmp_path / f"d{i}" for i in range(4)]
    with hpstore.create(paths, data=2, parity=1, config=tmp_path / "pool.toml") as pool:
        yield [write(pool, "a", 3000, 0), write(pool, "b", 700, 10_000)]


def check(batch: dict[str, Any]) -> list[int]:
    """All fields of a row are of the same sample; the numbers."""
    numbers, x, t, texts = (batch[name] for name in ("n", "x", "t", "s"))
    assert isinstance(numbers, torch.Tensor)
    assert isinstance(x, torch.Tensor)
    assert isinstance(t, Ragged)
    assert isinstance(texts, list)
    for row, n in enumerate(numbers.tolist()):
        assert (x[row] == n).all()
        assert t[row].tolist() == [n] * (n % 7)
        assert texts[row] == f"sample {n}"
    return [int(n) for n in numbers]


def test_shares_are_exact_and_rows_belong_together(parts: list[Dataset]) -> None:
    """3 to 1: every mix block has 768 of one and 256 of the other; the small one is repeated."""
    loader = DataLoader(
        Mixture(parts, [3, 1], source_field="from", length=4096), batch_size=64, shuffle=True
    )
    numbers, sources = [], []
    for batch in loader:
        numbers += check(batch)
        sources += batch["from"].tolist()
    loader.close()
    assert [int(n >= 10_000) for n in numbers] == sources
    for block in range(0, 4096, 1024):
        assert Counter(sources[block : block + 1024]) == {0: 768, 1: 256}
    small = Counter(n for n in numbers if n >= 10_000)
    assert set(small.values()) == {1, 2}, "a source is not gone through in turn"


def test_a_mixture_resumes_anywhere_on_any_number_of_ranks(parts: list[Dataset]) -> None:
    """Cut after each of several batches; the rest is read by two ranks."""
    mixture = Mixture(parts, [1, 1], length=1000)

    def loader(batch_size: int, **where: Any) -> DataLoader:
        return DataLoader(mixture, batch_size=batch_size, shuffle=True, seed=5, **where)

    whole = loader(32)
    expected = [check(batch) for batch in whole]
    whole.close()
    for cut in (1, 7, 30):
        first = loader(32)
        batches = iter(first)
        for _ in range(cut):
            next(batches)
        state = first.state_dict()
        first.close()
        ranks = [loader(16, rank=rank, world_size=2) for rank in range(2)]
        for rank in ranks:
            rank.load_state_dict(state)
        halves = [[check(batch) for batch in rank] for rank in ranks]
        joined = [a + b for a, b in zip(*halves, strict=True)]
        assert joined == expected[cut:]
        for rank in ranks:
            rank.close()


def test_what_does_not_mix_is_refused(parts: list[Dataset]) -> None:
    a, b = parts
    with pytest.raises(ConfigError, match="different fields"):
        Mixture([a, Dataset(b.pool, "b", fields=["x"])], [1, 1])
    with pytest.raises(ConfigError, match="2 data sets, 1 weights"):
        Mixture(parts, [1])
    mixed: Any = Mixture(parts, [1, 1])
    with pytest.raises(ConfigError, match="of a part of a mixture"):
        DataLoader(Subset(mixed, range(5)), shuffle="window")
    with pytest.raises(ConfigError, match="this is a TensorDataset"):
        Mixture([a, TensorDataset(torch.zeros(3))], [1, 1])
    with pytest.raises(ConfigError, match=r"indices 0 \.\. 9000 of 3000"):
        Mixture([Subset(a, [0, 9000])], [1])
    with pytest.raises(ConfigError, match="ConcatDataset: use"):
        DataLoader(Mixture([ConcatDataset([a, b])], [1]), shuffle="window")
    with pytest.raises(ConfigError, match="length and stop of a mixture"):
        Mixture(parts, [1, 1], length=5, stop="first")
    with pytest.raises(ConfigError, match="neither"):
        Mixture(parts, [1, 1], stop="last")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="those of sequences"):
        DataLoader(Mixture(parts, [1, 1], tokens=500))
    one = DataLoader(Mixture(parts, [1, 1]), shuffle=True)
    other = DataLoader(Mixture([b, a], [1, 1]), shuffle=True)
    with pytest.raises(ConfigError, match="data set"):
        other.load_state_dict(one.state_dict())
