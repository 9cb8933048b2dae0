"""Several datasets as one, in fixed shares or in shares that change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch.utils.data

from hpstore.errors import ConfigError
from hpstore.loaders.batching.dataset_orders import is_plain, source_order, subset_numbers
from hpstore.loaders.dataset.class_names import other_meaning
from hpstore.loaders.dataset.dataset import Dataset
from hpstore.loaders.dataset.row_filter import RowFilter, filter_mask
from hpstore.loaders.sampling.mixture_order import MixtureOrder, Sources, sources_of
from hpstore.loaders.sampling.mixture_shares import Stop, WeightSteps, require_stop, schedule_of
from hpstore.loaders.sampling.order import PERMUTATION_SAMPLES, Order
from hpstore.loaders.sampling.random_draws import Indices, derive_seed
from hpstore.units import MIB, bytes_argument, whole_argument

WINDOW_BYTES = 64 * MIB


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MixtureSource:
    """What is mixed in: datasets laid end to end, all samples of them or those of `mapping`."""

    parts: tuple[Dataset, ...]
    mapping: Indices | None = None

    @property
    def samples(self) -> int:
        """Indices are below it."""
        return sum(map(len, self.parts))

    def __len__(self) -> int:
        return self.samples if self.mapping is None else len(self.mapping)

    def filtered(self, condition: RowFilter, number: int) -> MixtureSource:
        """Those of its samples that a filter keeps. ConfigError when it keeps none."""
        mask = np.concatenate([filter_mask(part, condition) for part in self.parts])
        kept = np.flatnonzero(mask) if self.mapping is None else self.mapping[mask[self.mapping]]
        if not len(kept):
            names = ", ".join(repr(part.name) for part in self.parts)
            raise ConfigError(
                f"filter keeps none of the {len(self)} samples of source {number} of the mixture "
                f"({names}). Nothing was started; change the filter, or leave the source out"
            )
        return replace(self, mapping=kept.astype(np.int64))


class Mixture:
    """Datasets with the same fields, mixed by weight, for a DataLoader.

    Every run of 1024 samples (or a few more) has each dataset's exact share; a small one is
    repeated, each time in another order.

    Parameters
    ----------
    datasets
        Open datasets, Subsets of them, or ConcatDatasets of both. They stay the caller's.
    weights
        Share of each dataset, of their sum: finite and not negative, one above 0. Or a list of
        (step, weights): from each step on others, counted from the start of the first epoch.
    length
        Samples of an epoch; of a loader with `packing`, sequences. Default: those of all datasets
        together.
    source_field
        Name of an int64 field that batches have besides: the number of the dataset in `datasets`
        that a sample is from.
    stop
        Instead of a length: an epoch ends when the "first" of the datasets has been gone through
        once, or "all" of them, with the weights that hold from the start. The others go on in the
        next epoch where they have stopped.
    tokens
        Instead of a length, for a loader with `packing`: tokens of an epoch, rounded up to whole
        sequences.
    step_samples
        Samples that a step of `weights` is: your global batch. Thereby the weights change at the
        same sample whatever batches a resumed run has.

    Raises
    ------
    ConfigError
        There is no dataset, one is not of hpstore, their fields differ, there are more or
        fewer weights, they or the steps cannot be used, `source_field` is a field already, or two
        of `length`, `stop` and `tokens` are given.
    """

    def __init__(
        self,
        datasets: Sequence[Any],
        weights: Sequence[float] | WeightSteps,
        *,
        length: int | None = None,
        source_field: str | None = None,
        stop: Stop | None = None,
        tokens: int | None = None,
        step_samples: int = 1,
    ) -> None:
        if not datasets:
            raise ConfigError("a mixture of no data sets")
        self.datasets, self.length, self.source_field = tuple(datasets), length, source_field
        self.weights = weights
        self.stop, self.tokens, self.step_samples = stop, tokens, step_samples
        self._require_one_end()
        self._set_sources(tuple(mixture_source(data) for data in datasets))
        self._require_same_fields()
        self.schedule = schedule_of(weights, len(datasets), step_samples)

    def _require_one_end(self) -> None:
        given = {"length": self.length, "stop": self.stop, "tokens": self.tokens}
        names = [name for name, value in given.items() if value is not None]
        if len(names) > 1:
            raise ConfigError(f"{' and '.join(names)} of a mixture: one of them ends an epoch")
        require_stop(self.stop)
        for name in ("length", "tokens"):
            if given[name] is not None:
                whole_argument(name, given[name], least=1)

    def _set_sources(self, sources: tuple[MixtureSource, ...]) -> None:
        self.sources = sources
        self.parts = tuple(part for source in sources for part in source.parts)
        self._offsets = np.cumsum([0, *(source.samples for source in sources)], dtype=np.int64)
        self._part_offsets = np.cumsum([0, *map(len, self.parts)], dtype=np.int64)

    def _require_same_fields(self) -> None:
        first = self.parts[0]
        for other in self.parts[1:]:
            if other.fields != first.fields:
                raise ConfigError(
                    f"data sets {first.name!r} and {other.name!r} have different fields: "
                    f"{list(first.fields.items())} and {list(other.fields.items())}. Open both "
                    "with fields= for those that they share."
                )
            odd = other_meaning(
                first.manifest.metadata, other.manifest.metadata, first.fields, more=False
            )
            if odd is not None:
                raise ConfigError(
                    f"data sets {first.name!r} and {other.name!r} differ in {odd}: the "
                    "same numbers would stand for others. Give both the same, classes in the same "
                    "order, or open both without that field"
                )
        if self.source_field in first.stored:
            raise ConfigError(f"{self.source_field!r} is a field of {first.name!r} already")

    def __len__(self) -> int:
        return self.epoch_length([len(source) for source in self.sources])

    def epoch_length(self, lengths: Sequence[int], token_count: int = 0) -> int:
        """Samples of an epoch.

        Parameters
        ----------
        lengths
            Samples of each source, or sequences.
        token_count
            Tokens of a sequence; 0 where there are none.

        Returns
        -------
        int
            As `length`, `stop` or `tokens` say.

        Raises
        ------
        ConfigError
            It does not end, or tokens end it and there are no sequences.
        """
        if self.tokens is not None:
            if not token_count:
                raise ConfigError(
                    "tokens= of a mixture counts those of sequences: give the loader packing=, or "
                    "the mixture length="
                )
            return -(-self.tokens // token_count)
        if self.stop is not None:
            return self.schedule.length_until(self.stop, lengths)
        return sum(lengths) if self.length is None else self.length

    @property
    def samples(self) -> int:
        """Of all datasets; indices count through them laid end to end."""
        return int(self._offsets[-1])

    @property
    def bases(self) -> list[int]:
        """Where the samples of each source begin."""
        return [int(offset) for offset in self._offsets[:-1]]

    def split(self, indices: Indices) -> Sources:
        """Find the samples in their datasets.

        Parameters
        ----------
        indices
            int64 (n,), 0 <= i < samples, counted through the datasets laid end to end. Of a Subset,
            the whole of what it is a part of counts.

        Returns
        -------
        Sources
            Numbers of the datasets and of the samples in them, int64 (n,) each.

        Raises
        ------
        IndexError
            An index is outside.
        """
        return sources_of(indices, self._offsets)

    def split_parts(self, indices: Indices) -> Sources:
        """As split(), into `parts`: the Datasets that lie under the sources.

        Parameters
        ----------
        indices
            As of split().

        Returns
        -------
        Sources
            Numbers of the parts and of the samples in them.
        """
        return sources_of(indices, self._part_offsets)

    @property
    def fingerprints(self) -> tuple[str, ...]:
        """Of the datasets, in their order."""
        return tuple(part.fingerprint for part in self.parts)

    def filtered(self, condition: RowFilter) -> Mixture:
        """The same mixture of the samples that a filter keeps.

        Parameters
        ----------
        condition
            As a DataLoader's `filter`.

        Returns
        -------
        Mixture
            Of the same datasets; the weights stay.

        Raises
        ------
        ConfigError
            The filter cannot be used, or keeps nothing of one of the datasets.
        """
        made = Mixture(
            self.datasets,
            self.weights,
            length=self.length,
            source_field=self.source_field,
            stop=self.stop,
            tokens=self.tokens,
            step_samples=self.step_samples,
        )
        made._set_sources(
            tuple(source.filtered(condition, n) for n, source in enumerate(self.sources))
        )
        return made

    def source_orders(self, shuffle: str, seed: int, window_bytes: int | str) -> list[Order]:
        """Make the order of each source, by itself.

        Parameters
        ----------
        shuffle, seed
            As of order().
        window_bytes
            Of the windows of each, a number or text.

        Returns
        -------
        list
            One for each dataset.

        Raises
        ------
        ConfigError
            The seed cannot be used, or a ConcatDataset has no windows.
        """
        window_bytes = bytes_argument("window_bytes", window_bytes)
        tables = PERMUTATION_SAMPLES // len(self.sources)  # else 200 of them take seconds
        return [
            source_order(
                source.parts,
                source.mapping,
                shuffle,
                derive_seed(seed, number),
                window_bytes=window_bytes,
                table_samples=tables,
            )
            for number, source in enumerate(self.sources)
        ]

    def order(
        self, shuffle: str, seed: int, *, window_bytes: int | str = WINDOW_BYTES
    ) -> MixtureOrder:
        """Make the order of a loader.

        Parameters
        ----------
        shuffle
            "global", "window": each dataset is shuffled so by itself. "none": each is read as it
            was written.
        seed
            0 <= seed < 2**64. It determines the order, with the datasets' sizes and the weights.
        window_bytes
            Of the windows of all datasets together, a number or text.

        Returns
        -------
        MixtureOrder
            An Order over `samples`.

        Raises
        ------
        ConfigError
            `shuffle` is none of them, or the weights or the seed cannot be used.
        """
        if shuffle not in ("global", "window", "none"):
            raise ConfigError(
                f'shuffle {shuffle!r} of a mixture: choose "global", "window" or "none"'
            )
        each = max(1, bytes_argument("window_bytes", window_bytes) // len(self.sources))
        orders = self.source_orders(shuffle, seed, each)
        length = self.epoch_length([order.length for order in orders])
        return MixtureOrder(orders, self.schedule, seed, length=length)


def mixture_source(data: Any) -> MixtureSource:
    """What lies under Subsets and ConcatDatasets. Raises ConfigError for what cannot be mixed."""
    if is_plain(data):
        return MixtureSource(parts=(data,))
    if type(data) is torch.utils.data.Subset:
        inner = mixture_source(data.dataset)
        chosen = subset_numbers(data.indices, len(inner))
        mapping = chosen if inner.mapping is None else inner.mapping[chosen]
        return replace(inner, mapping=mapping)
    if type(data) is torch.utils.data.ConcatDataset:
        found = [mixture_source(one) for one in data.datasets]
        starts = np.cumsum([0, *(one.samples for one in found)], dtype=np.int64)
        parts = tuple(part for one in found for part in one.parts)
        if all(one.mapping is None for one in found):
            return MixtureSource(parts=parts)
        chosen = np.concatenate(
            [
                start + (np.arange(one.samples) if one.mapping is None else one.mapping)
                for start, one in zip(starts[:-1], found, strict=True)
            ]
        )
        return MixtureSource(parts=parts, mapping=chosen.astype(np.int64))
    raise ConfigError(
        f"a mixture is of hpstore's Datasets, and of Subsets and ConcatDatasets of them; this is a "
        f"{type(data).__name__}"
    )
