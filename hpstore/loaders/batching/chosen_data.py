"""Which samples a loader reads, of which datasets, and in which order."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch.utils.data

from hpstore.errors import ConfigError
from hpstore.loaders.batching.dataset_orders import is_plain, subset_numbers, window_order
from hpstore.loaders.batching.mixture import Mixture
from hpstore.loaders.batching.packed_orders import packed_order
from hpstore.loaders.batching.packing import Packing
from hpstore.loaders.dataset.dataset import Dataset
from hpstore.loaders.dataset.fields import Field
from hpstore.loaders.dataset.image_decode import Decode, checked_decode
from hpstore.loaders.dataset.row_filter import RowFilter, filtered_rows, require_filter
from hpstore.loaders.dataset.value_decoder import ValueDecoder
from hpstore.loaders.sampling.order import GlobalOrder, Order, SequentialOrder, SubsetOrder
from hpstore.loaders.sampling.random_draws import Indices
from hpstore.loaders.sampling.rank_slices import Slices


@dataclass(frozen=True, slots=True)
class Native:
    """A hpstore dataset or a mixture, and which samples are used: all, or those of a Subset."""

    data: Dataset | Mixture
    mapping: Indices | None
    packing: Packing | None = None

    @property
    def fields(self) -> dict[str, Field]:
        """Of the dataset, or of those that are mixed."""
        return self.data.parts[0].fields if isinstance(self.data, Mixture) else self.data.fields

    def __len__(self) -> int:
        return len(self.data) if self.mapping is None else len(self.mapping)

    @property
    def samples(self) -> int:
        """Indices of the data are below it. An epoch of a mixture may have another length."""
        return self.data.samples if isinstance(self.data, Mixture) else len(self.data)

    @property
    def chosen(self) -> int:
        """A sampler's indices are below it."""
        return self.samples if self.mapping is None else len(self.mapping)

    def share(self, slices: Slices | None) -> float:
        """The part of the dataset's samples that a rank reads in an epoch."""
        world = 1 if slices is None else slices.world_size
        return self.chosen / max(1, self.samples) / world


# Any: whatever the user's dataset is
def native_of(dataset: Any) -> Native | None:
    """The hpstore dataset under torch's Subset and random_split; None when it is another.

    Subclasses with samples of their own making are other datasets.
    """
    parts = list[object]()
    while type(dataset) is torch.utils.data.Subset:
        parts.append(dataset.indices)
        dataset = dataset.dataset
    if not isinstance(dataset, Mixture) and not is_plain(dataset):
        return None
    found = Native(dataset, None)
    for indices in reversed(parts):
        chosen = subset_numbers(indices, found.chosen)
        found = Native(dataset, chosen if found.mapping is None else found.mapping[chosen])
    return found


def chosen_data(
    dataset: Any, condition: RowFilter | None, packing: Packing | None
) -> Native | None:
    """What a loader reads: native_of(), without what a filter leaves out. Raises ConfigError."""
    found = native_of(dataset)
    if packing is not None and not isinstance(packing, Packing):
        raise ConfigError(f"packing is a {type(packing).__name__}: give a Packing(...)")
    if found is None:
        return None
    if packing is not None:
        found = replace(found, packing=packing)
        packing.fields(found.fields)
    if condition is None:
        return found
    require_filter(condition)
    data, mapping = found.data, found.mapping
    if isinstance(data, Mixture):
        if mapping is not None:
            raise ConfigError("filter of a part of a mixture: mix Subsets of its data sets instead")
        return replace(found, data=data.filtered(condition))
    kept = filtered_rows(data, condition)
    if mapping is not None:
        kept = mapping[np.isin(mapping, kept)]
        if not len(kept):
            raise ConfigError(
                f"filter keeps none of the {len(mapping)} samples of this Subset of data set "
                f"{data.name!r}. Nothing was started; change the filter"
            )
    return replace(found, mapping=kept)


def order_for(
    dataset: Any,
    native: Native | None,
    shuffle: bool | str | Order | None,
    seed: int,
    window_bytes: int,
) -> Order:
    """The order that `shuffle` asks for. Raises ConfigError."""
    count = native.chosen if native is not None else len(dataset)
    name: Any = shuffle
    if shuffle is None or (isinstance(shuffle, int) and shuffle in (False, True)):
        name = "global" if shuffle else "none"
    made: Order
    if native is not None and native.packing is not None:
        if name not in ("none", "global", "window"):
            raise ConfigError(
                "packing needs an order that has every document once an epoch: shuffle= True, "
                f'"global", "window" or "none", not {name!r}'
            )
        return packed_order(native.data, native.mapping, native.packing, name, seed, window_bytes)
    if isinstance(name, str) or not (hasattr(name, "indices") and hasattr(name, "samples")):
        if name not in ("none", "global", "window"):
            raise ConfigError(
                f'shuffle {name!r} is not one of True, False, "global", "window", "none", an Order'
            )
        if native is not None and isinstance(native.data, Mixture):
            if native.mapping is None:
                return native.data.order(name, seed, window_bytes=window_bytes)
            if name == "window":
                raise ConfigError(
                    'shuffle="window" of a part of a mixture: use "global", or mix Subsets of its '
                    "data sets"
                )
        elif name == "window":
            if native is None:
                raise ConfigError(
                    'shuffle="window" follows the stripes of a hpstore data set; this is a '
                    f'{type(dataset).__name__}: use "global"'
                )
            assert isinstance(native.data, Dataset)
            return window_order(native.data, native.mapping, seed, window_bytes)
        made = GlobalOrder(count, seed) if name == "global" else SequentialOrder(count)
    else:
        made = name
        if made.samples > count:
            raise ConfigError(f"the order chooses from {made.samples} samples, there are {count}")
    return _of_subset(made, native)


def _of_subset(order: Order, native: Native | None) -> Order:
    if native is None or native.mapping is None:
        return order
    return SubsetOrder(order, native.mapping, samples=native.samples)


def decoder_of(native: Native | None, decode: Decode) -> ValueDecoder | None:
    """What makes values of stored batches; None where they are what is stored. Raises ConfigError.

    `decode`: the loader's; None: the dataset's own.
    """
    if native is None or native.packing is not None:
        return None  # torch's own machinery reads samples; sequences are stored numbers
    first = native.data.parts[0] if isinstance(native.data, Mixture) else native.data
    how = first.decode if decode is None else decode
    made = ValueDecoder(first.fields, checked_decode(how, first.fields))
    return made if made.needed else None
