"""Packed sequences beside a naive list: no token lost or twice, at any cut, on any ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpstore.errors import ConfigError
from hpstore.loaders.batching.batch_counters import Counts
from hpstore.loaders.batching.packed_batches import LongDocuments, PackedSession
from hpstore.loaders.batching.packing import Packing, cu_seqlens, document_mask
from hpstore.loaders.dataset.batch_values import Ragged
from hpstore.loaders.dataset.fields import Field
from hpstore.loaders.sampling import packed_order
from hpstore.loaders.sampling.batch_plan import BatchPiece, pieces
from hpstore.loaders.sampling.mixture_order import MixtureOrder
from hpstore.loaders.sampling.order import GlobalOrder, Order, SequentialOrder, SubsetOrder
from hpstore.loaders.sampling.packed_order import PackedMixture, PackedOrder
from hpstore.loaders.sampling.random_draws import Indices
from hpstore.loaders.sampling.rank_slices import Slices

PAD = 9999


class Documents:
    """What reads documents, in the place of a Session: token t of document d is 1000 d + t."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths, self.counts = lengths, Counts()
        self.read: list[int] = []

    def batch(self, indices: Indices) -> dict[str, Any]:
        """As Session.batch."""
        self.read += indices.tolist()
        values = [tokens(d, self.lengths[d]) for d in indices.tolist()]
        ends = np.cumsum([0, *map(len, values)])
        flat = [token for one in values for token in one]
        return {"t": Ragged(torch.tensor(flat, dtype=torch.int32), torch.tensor(ends))}


def tokens(document: int, count: int) -> list[int]:
    """Its tokens."""
    return [1000 * document + t for t in range(count)]


@st.composite
def sources(draw: st.DrawFn, base: int = 0, least: int = 1) -> tuple[Order, list[int]]:
    """An order over documents of any lengths, some empty, some far longer than a sequence."""
    lengths = draw(st.lists(st.integers(0, 12) | st.integers(0, 70), min_size=least, max_size=30))
    count = len(lengths)
    kind = draw(st.sampled_from(["sequential", "global", "subset"]))
    seed = draw(st.integers(0, 2**32))
    if kind == "sequential":
        return SequentialOrder(count), lengths
    if kind == "global":
        return GlobalOrder(count, seed, table_samples=draw(st.sampled_from([0, 100]))), lengths
    mapping = np.array(
        draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=count)), np.int64
    )
    return SubsetOrder(GlobalOrder(len(mapping), seed), mapping, samples=count), lengths


def naive(
    order: Order, lengths: list[int], epoch: int, packing: Packing, base: int = 0
) -> list[tuple[list[int], list[int], list[int]]]:
    """Rows of an epoch: tokens, document ids, position ids; one token after another."""
    stream: list[tuple[int, int]] = []  # (token, number of the document in the order)
    for number, document in enumerate(order.indices(epoch, 0, order.length).tolist()):
        own = tokens(document + base, lengths[document])
        own += [] if packing.separator is None else [packing.separator]
        stream += [(token, number) for token in own]
    found = []
    for first in range(0, len(stream), packing.length):
        row = stream[first : first + packing.length]
        if len(row) < packing.length and packing.remainder == "drop":
            break
        ids: list[int] = []
        places: list[int] = []
        for at, (_, number) in enumerate(row):
            new = at == 0 or row[at - 1][1] != number
            ids.append((ids[-1] + 1 if at else 0) if new else ids[-1])
            places.append(0 if new else places[-1] + 1)
        lack = packing.length - len(row)
        texts = [token for token, _ in row] + [PAD] * lack
        found.append((texts, ids + [-1] * lack, places + [0] * lack))
    return found


def packed(order: Order, lengths: list[int], packing: Packing) -> PackedOrder:
    """Its sequences."""
    return PackedOrder(
        order,
        np.array(lengths, np.uint32),
        packing.length,
        field="t",
        separator=packing.separator,
        drop_last=packing.remainder == "drop",
    )


def session(order: Any, lengths: list[int], packing: Packing, bases: list[int]) -> Any:
    """What makes batches of them, and what it reads from."""
    inner: Any = Documents(lengths)
    fields = packing.fields({"t": Field("int32", (None,))})
    return PackedSession(inner, order, packing, fields, bases, None, LongDocuments()), inner


packings = st.builds(
    lambda length, separator, remainder: Packing(
        field="t", length=length, separator=separator, pad=PAD, remainder=remainder
    ),
    st.integers(1, 25),
    st.sampled_from([None, 7]),
    st.sampled_from(["pad", "drop"]),
)


def rows_of(batch: dict[str, torch.Tensor]) -> list[tuple[list[int], list[int], list[int]]]:
    """As naive() has them."""
    columns = [batch[name].tolist() for name in ("t", "document_ids", "position_ids")]
    return list(zip(*columns, strict=True))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of several blocks, made in several parts."""
    monkeypatch.setattr(packed_order, "BLOCK_DOCUMENTS", 4)
    monkeypatch.setattr(packed_order, "_PART_DOCUMENTS", 8)


fast = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


@fast
@given(sources(), packings, st.integers(0, 3), st.data())
def test_sequences_are_the_naive_ones_at_any_cut(
    source: tuple[Order, list[int]], packing: Packing, epoch: int, data: st.DataObject
) -> None:
    """Any stretch of an epoch, asked for by itself, has what the list has there."""
    order, lengths = source
    wanted = naive(order, lengths, epoch, packing)
    if not wanted:
        with pytest.raises(ConfigError, match="make no sequence"):
            packed(order, lengths, packing)
        return
    made = packed(order, lengths, packing)
    assert made.length == len(wanted)
    first = data.draw(st.integers(0, made.length - 1))
    last = data.draw(st.integers(first + 1, made.length))
    found, inner = session(made, lengths, packing, [0])
    batch = found.batch(made.indices(epoch, first, last))
    assert rows_of(batch) == wanted[first:last]
    assert len(inner.read) <= order.length


@fast
@given(sources(), packings, st.data())
def test_ranks_and_resumes_lose_no_token(
    source: tuple[Order, list[int]], packing: Packing, data: st.DataObject
) -> None:
    """Cut anywhere, gone on with on 1 to 5 ranks and other batches: the rows of all ranks, step by
    step, are the list's, each once."""
    order, lengths = source
    if not naive(order, lengths, 0, packing):
        return
    made = packed(order, lengths, packing)
    wanted = [row for epoch in range(2) for row in naive(order, lengths, epoch, packing)]
    got: list[Any] = []
    epoch, position = 0, 0
    while epoch < 2:
        world, size = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
        steps = data.draw(st.integers(1, 6))
        ranks = []
        for rank in range(world):
            slices = Slices(
                length=made.length, batch_size=size, world_size=world, rank=rank, tail="uneven"
            )
            todo = list(pieces(slices, epoch, position))[:steps]
            found, _ = session(made, lengths, packing, [0])
            ranks.append([(piece, found.make(piece)[1]) for piece in todo])
        done = max(map(len, ranks))
        for step in range(done):
            for mine in ranks:
                got += rows_of(mine[step][1]) if step < len(mine) else []
        after = next(mine[-1][0].after for mine in ranks if len(mine) == done)
        whole = Slices(length=made.length, batch_size=size, world_size=world)
        epoch, position = after if whole.steps(position) > done else (epoch + 1, 0)
    assert got == wanted


@fast
@given(
    sources(least=5), sources(least=5), st.integers(1, 4), packings, st.integers(0, 2), st.data()
)
def test_mixtures_of_sequences_have_each_source_in_its_own_order(
    one: tuple[Order, list[int]],
    other: tuple[Order, list[int]],
    weight: int,
    packing: Packing,
    epoch: int,
    data: st.DataObject,
) -> None:
    """Rows of a source, taken from the mixture, are its own sequences one after another, through
    its own epochs; a stretch by itself has what the whole has."""
    lists = [one, other]
    if not all(naive(order, lengths, 0, packing) for order, lengths in lists):
        return
    parts = tuple(packed(order, lengths, packing) for order, lengths in lists)
    mixed = PackedMixture(MixtureOrder(parts, [weight, 1], 3, length=40), parts)
    bases = [0, len(one[1])]
    found, _ = session(mixed, one[1] + other[1], packing, bases)
    numbers = mixed.indices(epoch, 0, 40)
    split = mixed.split(numbers)
    rows = rows_of(found.batch(numbers))
    for source, (order, lengths) in enumerate(lists):
        mine = np.flatnonzero(split.source == source)
        draws = split.sample[mine].tolist()
        assert draws == list(range(draws[0], draws[0] + len(draws))), "a draw is lost"
        for row, draw in zip(mine.tolist(), draws, strict=True):
            at, place = divmod(draw, parts[source].length)
            assert rows[row] == naive(order, lengths, at, packing, bases[source])[place]
    start = data.draw(st.integers(0, 39))
    again, _ = session(mixed, one[1] + other[1], packing, bases)
    piece = BatchPiece(epoch=epoch, start=start, stop=40, after=(epoch + 1, 0))
    assert rows_of(again.make(piece)[1]) == rows[start:]


def test_a_long_document_is_read_once() -> None:
    """Sequence after sequence of one document of 1000 tokens: it is kept, not read 100 times."""
    packing = Packing(field="t", length=10)
    lengths = [3, 1000, 3]
    made = packed(SequentialOrder(3), lengths, packing)
    found, inner = session(made, lengths, packing, [0])
    rows = [rows_of(found.batch(made.indices(0, n, n + 1)))[0] for n in range(made.length)]
    assert [row[0] for row in rows] == [r[0] for r in naive_rows(lengths, packing)]
    assert inner.read.count(1) == 1, f"read {inner.read.count(1)} times"


def naive_rows(lengths: list[int], packing: Packing) -> Any:
    """Of an epoch as written, padded with the packing's own token."""
    found = naive(SequentialOrder(len(lengths)), lengths, 0, packing)
    return [([0 if t == PAD else t for t in row], ids, places) for row, ids, places in found]


def test_long_documents_are_kept_within_their_budget() -> None:
    """The one used longest ago goes; a single one above the budget stays."""
    kept = LongDocuments(100)
    kept.keep(1, [np.zeros(60, np.uint8)])
    kept.keep(2, [np.zeros(30, np.uint8)])
    assert kept.get(1) is not None
    kept.keep(3, [np.zeros(30, np.uint8)])
    assert kept.get(2) is None
    assert kept.get(1) is not None
    kept.keep(4, [np.zeros(500, np.uint8)])
    assert kept.get(4) is not None
    assert kept.get(1) is None
    assert kept.get(3) is None


def test_masks_keep_documents_apart() -> None:
    """Of two documents and a filled end: each place looks back within its document alone."""
    ids = torch.tensor([[0, 0, 1, -1], [0, 1, 1, 1]], dtype=torch.int32)
    assert document_mask(ids)[0, 0].int().tolist() == [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [0, 0, 1, 0],
        [0, 0, 0, 1],
    ]
    assert document_mask(ids, causal=False)[1, 0].int().tolist() == [
        [1, 0, 0, 0],
        [0, 1, 1, 1],
        [0, 1, 1, 1],
        [0, 1, 1, 1],
    ]
    found = cu_seqlens(ids)
    assert found.tolist() == [0, 2, 3, 4, 5, 8]
    assert found.dtype is torch.int32


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"length": 0}, "length"),
        ({"separator": 1.5}, "no token"),
        ({"separator": True}, "no token"),
        ({"pad": None}, "no token"),
        ({"remainder": "carry"}, "neither"),
        ({"dtype": "float32"}, "dtype"),
        ({"beside": "mask"}, "tuple"),
        ({"field": 3}, "not the name"),
        ({"split": 1}, "split 1"),
        ({"split": False, "remainder": "drop"}, "every sequence is filled up"),
    ],
)
def test_wrong_packings_are_refused(wrong: dict[str, Any], says: str) -> None:
    """By name, when they are made."""
    with pytest.raises(ValueError, match=says):
        Packing(**{"field": "t", "length": 8, **wrong})


def test_numbers_of_numpy_are_taken() -> None:
    """They are kept as Python's, so that a state is JSON."""
    made = Packing(field="t", length=np.int64(8), separator=np.uint16(3), pad=np.int8(-1))  # type: ignore[arg-type]
    assert [type(one) for one in (made.length, made.separator, made.pad)] == [int, int, int]


@pytest.mark.parametrize(
    ("fields", "wrong", "says"),
    [
        ({"t": Field("int32", (None,))}, {"field": "x"}, "no field 'x'"),
        ({"t": Field("float32", (None,))}, {}, "whole numbers"),
        ({"t": Field("int32", (None, 2))}, {}, "whole numbers"),
        ({"t": Field("int64")}, {}, "whole numbers"),
        ({"t": Field("str")}, {}, "whole numbers"),
        ({"t": Field("uint16", (None,))}, {"dtype": None, "separator": 70_000}, "does not fit"),
        ({"t": Field("uint16", (None,))}, {"dtype": None, "pad": -1}, "does not fit"),
        ({"t": Field("uint16", (None,))}, {"beside": ("t",)}, "twice"),
        ({"document_ids": Field("int8", (None,))}, {"field": "document_ids"}, "of their own"),
    ],
)
def test_fields_that_cannot_be_packed_are_refused(
    fields: dict[str, Field], wrong: dict[str, Any], says: str
) -> None:
    """By name, before anything is read."""
    with pytest.raises(ConfigError, match=says):
        Packing(**{"field": "t", "length": 8, **wrong}).fields(fields)
