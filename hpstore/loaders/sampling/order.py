"""Which sample stands at which position of an epoch. Pure functions of (seed, epoch, position).

So a position is the whole state of a run: any process, rank and world size computes the same
samples from it, and what comes next is known as far ahead as anybody likes.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from hpstore.errors import ConfigError
from hpstore.loaders.sampling.feistel import MAX_LENGTH, Feistel
from hpstore.loaders.sampling.order_cache import Ahead, Recent
from hpstore.loaders.sampling.random_draws import (
    DRAWS_VERSION,
    Indices,
    Purpose,
    check_seed,
    shuffled,
)

PERMUTATION_SAMPLES = 2_000_000
"""Up to here an epoch is a permutation in memory (8 MB), above a Feistel network."""

EPOCHS_KEPT = 2
"""This epoch and the next one: reading ahead crosses the border."""


class Order(Protocol):
    """Samples by position. Any number of threads; picklable; nothing random in its state."""

    length: int
    """Positions of one epoch."""
    samples: int
    """Indices are below this: the number of samples that the order chooses from."""

    def indices(self, epoch: int, start: int, stop: int) -> Indices:
        """Samples at positions start .. stop - 1 of an epoch.

        A function of the construction and the arguments alone.

        Parameters
        ----------
        epoch
            0 <= epoch.
        start, stop
            0 <= start <= stop <= length.

        Returns
        -------
        numpy.ndarray
            int64 (stop - start,), each below `samples`. It is the caller's.

        Raises
        ------
        ValueError
            An epoch does not have these positions.
        """
        ...

    def describe(self) -> dict[str, object]:
        """Plain JSON: what must be equal for a saved position to mean the same samples."""
        ...


def check_range(order: Order, epoch: int, start: int, stop: int) -> None:
    """Raises ValueError for positions that an epoch does not have."""
    if epoch < 0 or not 0 <= start <= stop <= order.length:
        raise ValueError(
            f"positions {start} .. {stop} of epoch {epoch}: an epoch has 0 .. {order.length}"
        )


def check_length(length: int) -> int:
    """The length as a plain int. Raises ConfigError when negative or above 2**40."""
    value = int(length)
    if not 0 <= value <= MAX_LENGTH:
        raise ConfigError(f"an order of {value} samples: 0 .. {MAX_LENGTH} are possible")
    return value


def digest(array: npt.NDArray[np.int64] | npt.NDArray[np.float64]) -> str:
    """XXH3-128 of the little-endian bytes, hex: an array in a description."""
    little = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False)
    return xxhash.xxh3_128_hexdigest(little.data)


class SequentialOrder:
    """As written: position i is sample i, in every epoch."""

    def __init__(self, length: int) -> None:
        self.length = self.samples = check_length(length)

    def indices(self, epoch: int, start: int, stop: int) -> Indices:
        """See Order."""
        check_range(self, epoch, start, stop)
        return np.arange(start, stop, dtype=np.int64)

    def describe(self) -> dict[str, object]:
        """See Order."""
        return {"kind": "sequential", "length": self.length}


class GlobalOrder:
    """Each epoch another permutation of all samples.

    Up to `table_samples` a table of 4 bytes a sample, made at the first use of an epoch (about
    40 ms at 2e6), or in the middle of the epoch before it, so that nobody waits for it. Above, a
    Feistel network: 1 to 2 ms for 64 Ki positions, evaluated a block at a time when read in
    sequence, and for just what is asked after a jump (about 50 us for 256). Set a lower limit
    where one loader has many orders, as in a mixture: the sum of all tables is made before the
    first batch.
    """

    def __init__(self, length: int, seed: int, *, table_samples: int = PERMUTATION_SAMPLES) -> None:
        self.length = self.samples = check_length(length)
        self.network = self.length > min(table_samples, PERMUTATION_SAMPLES)
        self.seed = check_seed(seed)
        self._tables: Recent[int, npt.NDArray[np.int32]] = Recent(EPOCHS_KEPT)
        self._networks: Recent[int, Feistel] = Recent(EPOCHS_KEPT)
        self._ahead = Ahead(self.length)
        self._prepared = 0  # the last epoch whose table was made before its time

    def indices(self, epoch: int, start: int, stop: int) -> Indices:
        """See Order."""
        check_range(self, epoch, start, stop)
        if start == stop:
            return np.empty(0, np.int64)
        if self.network:
            return self._ahead.read(self._evaluate, epoch, start, stop)
        ahead = 2 * start >= self.length and self._prepared != epoch + 1
        if ahead and epoch in self._tables:  # not before the first batch
            self._prepared = epoch + 1
            self._tables.get(epoch + 1, lambda: self._table(epoch + 1))
        table = self._tables.get(epoch, lambda: self._table(epoch))
        return table[start:stop].astype(np.int64)

    def describe(self) -> dict[str, object]:
        """See Order."""
        return {
            "kind": "global",
            "draws": DRAWS_VERSION,
            "length": self.length,
            "seed": self.seed,
            "network": self.network,
        }

    def _table(self, epoch: int) -> npt.NDArray[np.int32]:
        drawn = shuffled(Purpose.PERMUTATION, seed=self.seed, epoch=epoch, count=self.length)
        return drawn.astype(np.int32)

    def _evaluate(self, epoch: int, start: int, stop: int) -> Indices:
        network = self._networks.get(
            epoch, lambda: Feistel.of(self.length, seed=self.seed, epoch=epoch)
        )
        return network.images(start, stop)


class SubsetOrder:
    """An order over some samples of a dataset: torch's Subset and random_split.

    `order` runs over 0 .. len(mapping) - 1, `mapping` int64[n] gives the sample of the dataset
    (n times 8 bytes, kept, not copied; not to be changed). `samples` is the dataset's size.
    `inner`: that order; a position of it is the same position here.
    """

    def __init__(self, order: Order, mapping: Indices, *, samples: int) -> None:
        self.length, self.samples = order.length, check_length(samples)
        if order.samples > len(mapping):
            raise ConfigError(
                f"an order of {order.samples} samples over a subset of {len(mapping)}"
            )
        if len(mapping) and not 0 <= int(mapping.min()) <= int(mapping.max()) < samples:
            raise ConfigError(
                f"a subset with indices {mapping.min()} .. {mapping.max()} of {samples} samples"
            )
        self.inner, self.mapping = order, mapping
        self._digest = digest(mapping)

    def indices(self, epoch: int, start: int, stop: int) -> Indices:
        """See Order."""
        return self.mapping[self.inner.indices(epoch, start, stop)]

    def describe(self) -> dict[str, object]:
        """See Order."""
        return {
            "kind": "subset",
            "samples": self.samples,
            "mapping": self._digest,
            "order": self.inner.describe(),
        }
