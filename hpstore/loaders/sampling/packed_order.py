"""Documents laid end to end and cut into sequences of one length. Pure.

An epoch of a source is the documents in the order's sequence, each with its separator, cut every
`length` tokens. Where a sequence begins is found in a table of the tokens before each block of
documents: made once an epoch, from the lengths alone, 8 bytes for 1024 documents. So the number of
a sequence is the whole state, and any rank finds it as fast as any other.

Sequences are numbered through the epochs of their source: epoch * length + position.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np

from hpstore.errors import ConfigError
from hpstore.loaders.dataset.ragged_lengths import Lengths
from hpstore.loaders.sampling.mixture_order import MixtureOrder, Sources
from hpstore.loaders.sampling.order import EPOCHS_KEPT, Order, SubsetOrder, check_range
from hpstore.loaders.sampling.order_cache import Recent
from hpstore.loaders.sampling.random_draws import Indices

BLOCK_DOCUMENTS = 1024
_PART_DOCUMENTS = 1 << 20  # of which the order is evaluated at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Cuts:
    """What some sequences are made of: stretches of documents, in the order of the sequences.

    Stretch i is `count[i]` tokens of document `document[i]` (a number in `documents`), from token
    `begin[i]` on; it goes to place `place[i]`, counted through the sequences' rows. No stretch is
    empty or in two rows. A token behind the document's last one is its separator.
    """

    documents: Indices  # (d,): in the dataset, to be read, each once
    start: int  # the position in the order at which they begin, or -1 where they are chosen singly
    document: Indices
    begin: Indices
    count: Indices
    place: Indices


class SequenceOrder(Order, Protocol):
    """An Order whose samples are sequences, numbered through all epochs."""

    def split(self, numbers: Indices) -> Sources:
        """The source of each sequence, and its number there."""
        ...

    @property
    def sources(self) -> tuple[SequenceSource, ...]:
        """What the sequences are made of."""
        ...


class SequenceSource(Order, Protocol):
    """The sequences of one source."""

    documents: Order
    tokens: int
    """Of an epoch, with separators."""

    def cuts(self, epoch: int, first: int, last: int) -> Cuts:
        """Sequences first .. last - 1 of an epoch, 0 <= first < last <= length."""
        ...


class SequencesOfOneSource:
    """What orders of one source have in common. Classes below it set `length` and describe()."""

    length: int
    samples: int

    @property
    def sources(self) -> tuple[Self, ...]:
        """Itself."""
        return (self,)

    def indices(self, epoch: int, start: int, stop: int) -> Indices:
        """See Order: numbers of sequences, through all epochs."""
        return _numbers(self, epoch, start, stop)

    def split(self, numbers: Indices) -> Sources:
        """See SequenceOrder."""
        return Sources(source=np.zeros(len(numbers), np.int64), sample=numbers)

    def describe(self) -> dict[str, object]:
        """See Order."""
        raise NotImplementedError


class PackedOrder(SequencesOfOneSource):
    """The sequences of one source, documents split where a sequence ends. A SequenceOrder.

    Parameters
    ----------
    documents
        The order of the documents. Every epoch has the same ones.
    lengths
        Tokens of each document of the dataset, uint32 (documents.samples,). Kept, not copied.
    length
        Tokens of a sequence.
    field, separator
        Where the tokens are from, and which one follows on each document, if any.
    drop_last
        What is left of an epoch is left out, instead of a last sequence that is not full.
    """

    def __init__(
        self,
        documents: Order,
        lengths: Lengths,
        length: int,
        *,
        field: str,
        separator: int | None,
        drop_last: bool,
    ) -> None:
        self.documents, self._lengths = documents, lengths
        self._row, self._field, self._drop_last = length, field, drop_last
        self._token, self._separator = separator, separator is not None
        used = lengths[documents.mapping] if isinstance(documents, SubsetOrder) else lengths
        self.tokens = int(used.sum(dtype=np.int64)) + documents.length * self._separator
        self.length = self.tokens // length if drop_last else -(-self.tokens // length)
        self.samples = self.length  # of an epoch
        if not self.length:
            raise ConfigError(
                f"packing: {self.tokens} tokens in {documents.length} documents make no sequence "
                f"of {length}. Nothing was started"
            )
        self._epochs: Recent[int, Indices] = Recent(EPOCHS_KEPT)
        self._prepared = 0  # the last epoch whose table was made before its time

    def describe(self) -> dict[str, object]:
        """See Order."""
        return {
            "kind": "packed",
            "length": self.length,
            "tokens": self.tokens,
            "sequence": self._row,
            "field": self._field,
            "separator": self._token,
            "drop_last": self._drop_last,
            "documents": self.documents.describe(),
        }

    def document_at(self, epoch: int, position: int) -> int:
        """The position in the order of the document with a sequence's first token."""
        if position >= self.length:
            return self.documents.length
        return self._find(epoch, position * self._row)[0]

    def cuts(self, epoch: int, first: int, last: int) -> Cuts:
        """See SequenceSource."""
        if 2 * first >= self.length and self._prepared != epoch + 1 and epoch in self._epochs:
            self._prepared = epoch + 1  # so that nobody waits for it between two epochs
            self._table(epoch + 1)
        low, high = first * self._row, min(last * self._row, self.tokens)
        start, before = self._find(epoch, low)
        stop = self._find(epoch, high - 1)[0] + 1
        chosen = self.documents.indices(epoch, start, stop)
        ends = before + np.cumsum(self._sizes(chosen))
        starts = np.append(before, ends[:-1])
        edges = np.arange(low, high, self._row)  # of rows, and of documents
        edges = np.union1d(edges, starts[starts > low])
        document = np.searchsorted(ends, edges, "right")
        return Cuts(
            documents=chosen,
            start=start,
            document=document,
            begin=edges - starts[document],
            count=np.diff(np.append(edges, high)),
            place=edges - low,
        )

    def _sizes(self, chosen: Indices) -> Indices:
        """Tokens of documents, with their separators."""
        return self._lengths[chosen].astype(np.int64) + self._separator

    def _find(self, epoch: int, token: int) -> tuple[int, int]:
        """The position of the document that holds a token, and the tokens before it."""
        table = self._table(epoch)
        block = int(np.searchsorted(table, token, "right")) - 1
        first = block * BLOCK_DOCUMENTS
        last = min(first + BLOCK_DOCUMENTS, self.documents.length)
        ends = table[block] + np.cumsum(self._sizes(self.documents.indices(epoch, first, last)))
        inside = int(np.searchsorted(ends, token, "right"))
        return first + inside, int(ends[inside - 1] if inside else table[block])

    def _table(self, epoch: int) -> Indices:
        return self._epochs.get(epoch, lambda: self._make_table(epoch))

    def _make_table(self, epoch: int) -> Indices:
        """Tokens before each block of documents."""
        sums = []
        for first in range(0, self.documents.length, _PART_DOCUMENTS):
            last = min(first + _PART_DOCUMENTS, self.documents.length)
            sizes = self._sizes(self.documents.indices(epoch, first, last))
            sums.append(np.add.reduceat(sizes, np.arange(0, len(sizes), BLOCK_DOCUMENTS)))
        made: Indices = np.concatenate([[0], np.cumsum(np.concatenate(sums))[:-1]])
        return made.astype(np.int64)


class PackedMixture:
    """Sequences of several sources, each of one of them, in the shares of a mixture.

    `mixture`: an order over the sources, which are packed by themselves.
    """

    def __init__(self, mixture: MixtureOrder, sources: tuple[SequenceSource, ...]) -> None:
        self._mixture, self.sources = mixture, sources
        self.length = self.samples = mixture.length

    def indices(self, epoch: int, start: int, stop: int) -> Indices:
        """See Order: numbers of sequences of the mixture, through all epochs."""
        return _numbers(self, epoch, start, stop)

    def split(self, numbers: Indices) -> Sources:
        """See SequenceOrder."""
        source, sample = np.empty(len(numbers), np.int64), np.empty(len(numbers), np.int64)
        for rows in runs(numbers, self.length):
            epoch, start = divmod(int(numbers[rows.start]), self.length)
            found = self._mixture.draws(epoch, start, start + rows.stop - rows.start)
            source[rows], sample[rows] = found.source, found.sample
        return Sources(source=source, sample=sample)

    def describe(self) -> dict[str, object]:
        """See Order."""
        return {"kind": "packed mixture", "mixture": self._mixture.describe()}


def _numbers(order: Order, epoch: int, start: int, stop: int) -> Indices:
    """Sequences at positions start .. stop - 1 of an epoch, counted through all epochs."""
    check_range(order, epoch, start, stop)
    return np.arange(start, stop, dtype=np.int64) + epoch * order.length


def runs(numbers: Indices, length: int) -> list[slice]:
    """Where numbers follow on each other within one epoch of `length`: the rows of each run."""
    breaks = np.flatnonzero((np.diff(numbers) != 1) | (numbers[1:] % length == 0)) + 1
    edges = [0, *breaks.tolist(), len(numbers)]
    return [slice(a, b) for a, b in itertools.pairwise(edges) if a < b]
