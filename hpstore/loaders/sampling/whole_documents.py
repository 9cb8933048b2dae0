"""Documents laid into sequences whole, by best fit, in windows of the dataset. Pure.

Which documents share a sequence depends on their lengths alone: it is computed once and is the
same in every epoch, so that an epoch always has as many sequences; their order is shuffled.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hpstore.errors import ConfigError
from hpstore.loaders.dataset.ragged_lengths import Lengths
from hpstore.loaders.sampling.order import (
    PERMUTATION_SAMPLES,
    GlobalOrder,
    Order,
    SequentialOrder,
    SubsetOrder,
)
from hpstore.loaders.sampling.packed_order import Cuts, SequencesOfOneSource
from hpstore.loaders.sampling.random_draws import Indices

WINDOW_DOCUMENTS = 16_384  # of which any may share a sequence: neighbours are read together


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """Stretches of documents by sequence: those of sequence s are edges[s] .. edges[s + 1] - 1."""

    document: Indices  # its position among the documents
    begin: Indices
    count: Indices
    edges: Indices


def fit_whole(sizes: npt.NDArray[np.int64], length: int, *, window: int) -> Fitted:
    """Lay documents of these sizes into sequences of `length`, the fullest that has room first.

    Longest documents first ("best fit decreasing"), window by window. One longer than a sequence
    fills as many as it can; only what is left of it is fitted. Sequences come in the order of their
    first documents, and documents of one in their own.
    """
    full = np.maximum(sizes - 1, 0) // length  # a document that just fits is fitted
    rest = sizes - full * length
    group = np.empty(len(sizes), np.int64)  # the sequence that the rest of each is in
    groups = 0
    for first in range(0, len(sizes), window):
        groups = _fit_window(rest[first : first + window], length, group[first:], groups)
    used = np.flatnonzero(rest)
    longs = np.repeat(np.arange(len(sizes)), full)
    number = np.arange(len(longs)) - np.repeat(np.cumsum(full) - full, full)
    document = np.concatenate([longs, used])
    begin = np.concatenate([number * length, (full * length)[used]])
    count = np.concatenate([np.full(len(longs), length), rest[used]])
    owner = np.concatenate([groups + np.arange(len(longs)), group[used]])
    # by the first document of each sequence, then by what begins there first
    heads = np.full(groups + len(longs), len(sizes), np.int64)
    np.minimum.at(heads, owner, document)
    within = np.concatenate([begin[: len(longs)], np.full(len(used), np.iinfo(np.int64).max)])
    by = np.lexsort((document, owner, within, heads[owner]))
    ranked = owner[by]
    edges = np.flatnonzero(np.diff(ranked, prepend=-1, append=-1))
    return Fitted(document=document[by], begin=begin[by], count=count[by], edges=edges)


def _fit_window(rest: Indices, length: int, group: Indices, groups: int) -> int:
    """Number the sequences of a window's documents from `groups` on, into `group`."""
    open_by_room: dict[int, list[int]] = {}
    rooms = 0  # bit r: there is a sequence with room for exactly r more
    order = np.argsort(-rest, kind="stable")
    for at, size in zip(order.tolist(), rest[order].tolist(), strict=True):
        if not size:
            break
        found = rooms >> size
        if found:
            room = size + (found & -found).bit_length() - 1
            same = open_by_room[room]
            chosen = same.pop()
            if not same:
                rooms &= ~(1 << room)
        else:
            room, chosen, groups = length, groups, groups + 1
        group[at] = chosen
        left = room - size
        if left:
            open_by_room.setdefault(left, []).append(chosen)
            rooms |= 1 << left
    return groups


class WholeOrder(SequencesOfOneSource):
    """Sequences of one source that split no document that fits into one. A SequenceOrder.

    Parameters
    ----------
    documents
        The documents as written, all or some of them: in this order windows are cut from them.
    lengths
        Tokens of each document of the dataset, uint32 (documents.samples,).
    length
        Tokens of a sequence.
    field, separator
        Where the tokens are from, and which one follows on each document, if any.
    seed
        Of the order of the sequences; None: as they are.
    table_samples
        As GlobalOrder has it.
    """

    def __init__(
        self,
        documents: SequentialOrder | SubsetOrder,
        lengths: Lengths,
        length: int,
        *,
        field: str,
        separator: int | None,
        seed: int | None,
        table_samples: int = PERMUTATION_SAMPLES,
    ) -> None:
        self.documents: Order = documents
        self._row = length
        self._field, self._token = field, separator
        self._mapping = documents.mapping if isinstance(documents, SubsetOrder) else None
        own = lengths if self._mapping is None else lengths[self._mapping]
        sizes = own.astype(np.int64) + (separator is not None)
        self.tokens = int(sizes.sum())
        self._fitted = fit_whole(sizes, length, window=WINDOW_DOCUMENTS)
        self.length = self.samples = len(self._fitted.edges) - 1
        if self.length < 1:
            raise ConfigError(
                f"packing: {documents.length} documents have no tokens. Nothing was started"
            )
        self._order: Order = (
            SequentialOrder(self.length)
            if seed is None
            else GlobalOrder(self.length, seed, table_samples=table_samples)
        )

    def describe(self) -> dict[str, object]:
        """See Order."""
        return {
            "kind": "packed whole",
            "tokens": self.tokens,
            "sequence": self._row,
            "field": self._field,
            "separator": self._token,
            "window": WINDOW_DOCUMENTS,
            "documents": self.documents.describe(),
            "order": self._order.describe(),
        }

    def cuts(self, epoch: int, first: int, last: int) -> Cuts:
        """See SequenceSource."""
        fitted = self._fitted
        chosen = self._order.indices(epoch, first, last)
        low = fitted.edges[chosen]
        each = fitted.edges[chosen + 1] - low
        before = np.cumsum(each) - each
        at = np.arange(int(each.sum()))
        rows = np.repeat(np.arange(len(chosen)), each)
        stretch = at - before[rows] + low[rows]
        count = fitted.count[stretch]
        laid = np.cumsum(count) - count
        places, document = np.unique(fitted.document[stretch], return_inverse=True)
        return Cuts(
            documents=places if self._mapping is None else self._mapping[places],
            start=-1,
            document=document,
            begin=fitted.begin[stretch],
            count=count,
            place=rows * self._row + laid - laid[before[rows]],
        )
