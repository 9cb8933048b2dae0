"""What the tests of versions of datasets share."""

from __future__ import annotations

from typing import Any

from hpstore.loaders import Dataset, DatasetWriter, list_versions
from hpstore.pool.pool import Pool
from hpstore.units import KIB
from tests.integration.data_sets import FIELDS, check_sample, sample


def append(pool: Pool, numbers: range, **options: Any) -> None:
    with DatasetWriter(pool, "a", FIELDS, append=True, shard_bytes=200 * KIB, **options) as writer:
        for number in numbers:
            writer.write(sample(number))


def holds(data: Dataset, numbers: Any) -> bool:
    """Whether a dataset is the samples of these numbers."""
    assert len(data) == len(numbers)
    for found, number in zip(data.__getitems__(range(len(data))), numbers, strict=True):
        check_sample(found, number)
    return True


def names(pool: Pool) -> list[tuple[str, int, bool]]:
    return [(found.name, found.rows, found.current) for found in list_versions(pool, "a")]
