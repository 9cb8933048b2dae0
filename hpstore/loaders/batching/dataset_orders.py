"""Orders of a dataset, and of a part of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

import numpy as np

from hpstore.errors import ConfigError
from hpstore.loaders.dataset.dataset import Dataset, sample_numbers
from hpstore.loaders.sampling.label_mix import warn_of_sorted
from hpstore.loaders.sampling.order import (
    PERMUTATION_SAMPLES,
    GlobalOrder,
    Order,
    SequentialOrder,
    SubsetOrder,
)
from hpstore.loaders.sampling.random_draws import Indices
from hpstore.loaders.sampling.window_shuffle import WindowOrder, subset_stripes


def is_plain(dataset: Any) -> TypeGuard[Dataset]:
    """Whether this is a dataset of hpstore, and no subclass with samples of its own making."""
    kind = type(dataset)
    return isinstance(dataset, Dataset) and (
        (kind.__getitem__, kind.__getitems__) == (Dataset.__getitem__, Dataset.__getitems__)
    )


def subset_numbers(indices: object, count: int) -> Indices:
    """The samples that a Subset of `count` has, as sample_numbers has them. Raises ConfigError."""
    try:
        chosen = sample_numbers(indices, count).reshape(-1)
    except IndexError as error:
        raise ConfigError(f"a Subset: {error}") from error
    if len(chosen) and not 0 <= int(chosen.min()) <= int(chosen.max()) < count:
        raise ConfigError(
            f"a Subset with indices {chosen.min()} .. {chosen.max()} of {count} samples"
        )
    return chosen


def source_order(
    parts: Sequence[Dataset],
    mapping: Indices | None,
    name: str,
    seed: int,
    *,
    window_bytes: int,
    table_samples: int = PERMUTATION_SAMPLES,
) -> Order:
    """The order "global", "window" or "none" of datasets laid end to end, or of some samples.

    Raises ConfigError.
    """
    samples = sum(map(len, parts))
    if name == "window":
        if len(parts) != 1:
            raise ConfigError(
                'shuffle="window" follows the stripes of one data set; this is a ConcatDataset: '
                'use "global", or mix its data sets one by one'
            )
        return window_order(parts[0], mapping, seed, window_bytes)
    count = samples if mapping is None else len(mapping)
    made: Order = (
        GlobalOrder(count, seed, table_samples=table_samples)
        if name == "global"
        else SequentialOrder(count)
    )
    return made if mapping is None else SubsetOrder(made, mapping, samples=samples)


def window_order(data: Dataset, mapping: Indices | None, seed: int, window_bytes: int) -> Order:
    """Whole stripes permuted, then the samples of some of them. Warns where labels are sorted."""
    stripes = data.stripes()
    payload = sum(int(stream.payload_bytes.sum()) for stream in data.streams)
    stripe_bytes = max(1, payload // max(1, len(stripes) - 1))
    windows = max(1, window_bytes // stripe_bytes)
    mapping = None if mapping is None else np.sort(mapping)
    if mapping is not None:
        stripes = subset_stripes(stripes, mapping)
    warn_of_sorted(
        data,
        stripes,
        window_stripes=windows,
        stripe_bytes=stripe_bytes,
        rows_of=lambda places: places if mapping is None else mapping[places],
    )
    order = WindowOrder(stripes, seed, window_stripes=windows)
    if mapping is None:
        return order
    return SubsetOrder(order, mapping, samples=len(data))
