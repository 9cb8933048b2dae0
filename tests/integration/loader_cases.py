"""What the tests of the loader share: data sets of every kind, runs as lists of labels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from hpstore.loaders import DataLoader, Dataset, DatasetWriter, Field, LoaderMemory, Ragged
from hpstore.pool.pool import Pool
from hpstore.units import KIB
from tests.integration.data_sets import FIELDS, sample

PLAIN = {"image": Field("uint8", (3, 40, 40)), "label": Field("int64")}
COUNT = 97  # shares no factor with batch and world sizes
# what makes each mode of reading be chosen; windows of a stripe or two
MODES: dict[str, dict[str, Any]] = {
    "resident": {"cache": 1 << 30},
    "records": {"cache": 0},
    "window": {"cache": 0, "shuffle": "window", "memory": LoaderMemory(window_bytes=400 * KIB)},
}
KINDS: dict[str, tuple[dict[str, Field], dict[str, Any]]] = {
    "rows": (PLAIN, {}),
    "columns": (
        {"a": Field("float32", (30, 30)), "b": Field("bfloat16", (500,)), "label": Field("int64")},
        {"layout": "columns"},
    ),
    "ragged rows": (FIELDS, {"layout": "rows"}),
    "ragged columns": (FIELDS, {"layout": "columns"}),
    "compressed": (PLAIN, {"compression": "lz4"}),
    "ragged compressed": (FIELDS, {"compression": "zstd"}),
    "larger than a unit": ({"image": Field("uint8", (3, 170, 170)), "label": Field("int64")}, {}),
    "scalars only": ({"label": Field("int64"), "box": Field("float32", (4,))}, {}),
    "text only": ({"text": Field("str"), "label": Field("int64")}, {}),
}


def value_of(field: Field, number: int) -> Any:
    """A value of a fixed field, by the sample's number."""
    rng = np.random.default_rng(number)
    shape = [size for size in field.shape if size is not None]
    if field.dtype == "bfloat16":
        return torch.from_numpy(rng.random(shape, np.float32)).to(torch.bfloat16)
    if field.dtype == "float32":
        return rng.random(shape, np.float32)
    return rng.integers(0, 256, shape, np.uint8)


def values_of(fields: dict[str, Field], number: int) -> dict[str, Any]:
    """The sample of a number."""
    known = sample(number)
    return {
        name: known[name]
        if name == "label" or FIELDS.get(name) == field
        else value_of(field, number)
        for name, field in fields.items()
    }


def write(pool: Pool, name: str, fields: dict[str, Field], count: int, **options: Any) -> Dataset:
    """A data set of so many samples in several shards; label i is sample i."""
    settings = {"shard_bytes": 400 * KIB, "unit_bytes": 64 * KIB, **options}
    with DatasetWriter(pool, name, fields, **settings) as writer:
        for number in range(count):
            writer.write(values_of(fields, number))
    return Dataset(pool, name)


def labels(batch: Any) -> list[int]:
    found: list[int] = batch["label"].tolist()
    return found


def flat(batches: Iterable[Any]) -> list[int]:
    """Labels of a run."""
    return [label for batch in batches for label in labels(batch)]


def check(batch: dict[str, Any], fields: dict[str, Field]) -> None:
    """Every value of a batch is what was written."""
    assert list(batch) == list(fields)
    for row, number in enumerate(labels(batch)):
        for name, wanted in values_of(fields, number).items():
            got = batch[name][row]
            if isinstance(wanted, bytes):
                got = got.numpy().tobytes()
            elif isinstance(wanted, np.ndarray):
                got, wanted = got.numpy(), np.asarray(wanted)
                assert got.dtype == wanted.dtype
                assert np.array_equal(got, wanted), f"sample {number}: {name}"
                continue
            elif isinstance(wanted, torch.Tensor):
                assert torch.equal(got, wanted), f"sample {number}: {name}"
                continue
            assert got == wanted, f"sample {number}: {name}"


def same(one: Any, two: Any) -> bool:
    """Equal batches, bit by bit."""
    if isinstance(one, Ragged):
        return torch.equal(one.values, two.values) and torch.equal(one.offsets, two.offsets)
    if isinstance(one, torch.Tensor):
        return one.dtype == two.dtype and torch.equal(one, two)
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[k], two[k]) for k in one)
    if isinstance(one, Sequence) and not isinstance(one, str):
        return len(one) == len(two) and all(same(a, b) for a, b in zip(one, two, strict=True))
    return bool(one == two)


def ranks(data: Any, world: int, **options: Any) -> list[DataLoader]:
    """The loaders of all ranks of a world."""
    return [DataLoader(data, rank=rank, world_size=world, **options) for rank in range(world)]
