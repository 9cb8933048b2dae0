"""The order of a loader that packs documents into sequences."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hpstore.errors import ConfigError
from hpstore.loaders.batching.dataset_orders import source_order
from hpstore.loaders.batching.mixture import Mixture
from hpstore.loaders.batching.packing import Packing
from hpstore.loaders.dataset.dataset import Dataset
from hpstore.loaders.dataset.ragged_lengths import Lengths, ragged_lengths
from hpstore.loaders.sampling.mixture_order import MixtureOrder
from hpstore.loaders.sampling.order import PERMUTATION_SAMPLES, Order, SequentialOrder, SubsetOrder
from hpstore.loaders.sampling.packed_order import PackedMixture, PackedOrder, SequenceOrder
from hpstore.loaders.sampling.random_draws import Indices, check_seed, derive_seed
from hpstore.loaders.sampling.whole_documents import WholeOrder


def packed_order(
    data: Dataset | Mixture,
    mapping: Indices | None,
    packing: Packing,
    shuffle: str,
    seed: int,
    window_bytes: int,
) -> SequenceOrder:
    """Sequences of a dataset's documents, or of some; of a mixture, whose sources are packed each
    by itself. Reads the tables of lengths. Raises ConfigError.
    """
    if not packing.split and shuffle == "window":
        raise ConfigError(
            'packing with split=False and shuffle="window": use "global" or "none". Documents of a '
            "sequence lie close together already"
        )
    if not isinstance(data, Mixture):
        packing.fields(data.fields)
        lengths = token_lengths((data,), packing)
        if not packing.split:
            return _whole((data,), mapping, lengths, packing, shuffle, seed)
        order = source_order((data,), mapping, shuffle, seed, window_bytes=window_bytes)
        return _packed(order, lengths, packing)
    if mapping is not None:
        raise ConfigError("packing a part of a mixture: mix Subsets of its data sets instead")
    if shuffle == "window":
        raise ConfigError('packing a mixture with shuffle="window": use "global" or "none"')
    own = packing.fields(data.parts[0].fields)
    if data.source_field in own:
        raise ConfigError(
            f"source_field {data.source_field!r} is a field of packed batches already"
        )
    sources = _sources(data, packing, shuffle, seed)
    length = data.epoch_length([source.length for source in sources], packing.length)
    mixed = MixtureOrder(sources, data.schedule, seed, length=length)
    return PackedMixture(mixed, tuple(sources))


def _sources(
    data: Mixture, packing: Packing, shuffle: str, seed: int
) -> list[PackedOrder] | list[WholeOrder]:
    """Each source of a mixture, packed by itself."""
    lengths = [token_lengths(source.parts, packing) for source in data.sources]
    if packing.split:
        orders = data.source_orders(shuffle, seed, 1)
        return [_packed(o, some, packing) for o, some in zip(orders, lengths, strict=True)]
    tables = PERMUTATION_SAMPLES // len(data.sources)
    return [
        _whole(
            source.parts,
            source.mapping,
            some,
            packing,
            shuffle,
            derive_seed(seed, number),
            tables,
        )
        for number, (source, some) in enumerate(zip(data.sources, lengths, strict=True))
    ]


def _packed(order: Order, lengths: Lengths, packing: Packing) -> PackedOrder:
    return PackedOrder(
        order,
        lengths,
        packing.length,
        field=packing.field,
        separator=packing.separator,
        drop_last=packing.remainder == "drop",
    )


def _whole(
    parts: Sequence[Dataset],
    mapping: Indices | None,
    lengths: Lengths,
    packing: Packing,
    shuffle: str,
    seed: int,
    table_samples: int = PERMUTATION_SAMPLES,
) -> WholeOrder:
    samples = sum(map(len, parts))
    return WholeOrder(
        SequentialOrder(samples)
        if mapping is None
        else SubsetOrder(SequentialOrder(len(mapping)), mapping, samples=samples),
        lengths,
        packing.length,
        field=packing.field,
        separator=packing.separator,
        seed=check_seed(seed) if shuffle == "global" else None,
        table_samples=table_samples,
    )


def token_lengths(parts: Sequence[Dataset], packing: Packing) -> Lengths:
    """Tokens of every document of datasets laid end to end.

    Raises ConfigError where a field beside has another number of values.
    """
    found = []
    for data in parts:
        lengths = ragged_lengths(data, packing.field)
        for name in packing.beside:
            differ = np.flatnonzero(ragged_lengths(data, name) != lengths)
            if len(differ):
                raise ConfigError(
                    f"packing: sample {differ[0]} of data set {data.name!r} has other lengths of "
                    f"{name!r} than of {packing.field!r} ({len(differ)} samples have). Nothing was "
                    "started; leave the field out"
                )
        found.append(lengths)
    return np.concatenate(found)


def documents_of(order: SequenceOrder, tokens: int) -> int:
    """Twice as many documents as so many tokens are in the mean."""
    documents = sum(source.documents.length for source in order.sources)
    total = sum(source.tokens for source in order.sources)
    return 2 * tokens * documents // max(1, total) + 2
