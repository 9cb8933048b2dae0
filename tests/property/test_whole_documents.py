"""Best fit without splitting beside a naive list: what shares a sequence, and every token once."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpstore.errors import ConfigError
from hpstore.loaders.batching.packing import Packing
from hpstore.loaders.sampling import whole_documents
from hpstore.loaders.sampling.batch_plan import pieces
from hpstore.loaders.sampling.order import SequentialOrder, SubsetOrder
from hpstore.loaders.sampling.rank_slices import Slices
from hpstore.loaders.sampling.whole_documents import WholeOrder, fit_whole
from tests.property.test_packing import rows_of, session, tokens

Stretch = tuple[int, int, int]  # document, first token, tokens


def naive(sizes: list[int], length: int, window: int) -> list[list[Stretch]]:
    """One document after another, by looking at every sequence that is open."""
    found: list[list[Stretch]] = []
    for first in range(0, len(sizes), window):
        rests: list[tuple[int, int, int]] = []
        for document in range(first, min(first + window, len(sizes))):
            begin, left = 0, sizes[document]
            while left > length:
                found.append([(document, begin, length)])
                begin, left = begin + length, left - length
            if left:
                rests.append((document, begin, left))
        mine: list[list[Stretch]] = []  # the one touched last in the end
        for one in sorted(rests, key=lambda rest: -rest[2]):
            rooms = [length - sum(count for _, _, count in bins) for bins in mine]
            fitting = [n for n, room in enumerate(rooms) if room >= one[2]]
            best = min(fitting, key=lambda n: (rooms[n], -n), default=None)
            mine.append([*(mine.pop(best) if best is not None else []), one])
        found += mine
    return [sorted(one) for one in found]


SIZES = st.lists(st.integers(0, 20) | st.integers(0, 70), min_size=1, max_size=60)


@settings(deadline=None)
@given(SIZES, st.integers(1, 25), st.sampled_from([4, 16, 1000]))
def test_documents_share_sequences_as_the_naive_fit_has_it(
    sizes: list[int], length: int, window: int
) -> None:
    """The same sets of stretches; in the order of their first documents."""
    fitted = fit_whole(np.array(sizes, np.int64), length, window=window)
    rows = list(
        zip(fitted.document.tolist(), fitted.begin.tolist(), fitted.count.tolist(), strict=True)
    )
    edges = fitted.edges.tolist()
    got = [rows[a:b] for a, b in itertools.pairwise(edges)]
    wanted = naive(sizes, length, window)
    assert sorted(got) == sorted(wanted)
    assert [one[0][0] for one in got] == sorted(one[0][0] for one in wanted)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    SIZES,
    st.integers(1, 25),
    st.sampled_from([None, 7]),
    st.none() | st.integers(0, 2**40),
    st.booleans(),
    st.data(),
)
def test_every_document_comes_once_an_epoch_on_any_ranks(
    monkeypatch: pytest.MonkeyPatch,
    lengths: list[int],
    length: int,
    separator: int | None,
    seed: int | None,
    subset: bool,
    data: st.DataObject,
) -> None:
    """Cut anywhere, on 1 to 5 ranks and with any batches: stretches of all rows, put together, are
    each document with its separator; one that fits is whole."""
    monkeypatch.setattr(whole_documents, "WINDOW_DOCUMENTS", 16)
    packing = Packing(field="t", length=length, separator=separator, pad=9999, split=False)
    count = len(lengths)
    mapping = np.array(
        data.draw(st.permutations(range(count)))[: max(1, count // 2)] if subset else range(count),
        np.int64,
    )
    documents = SubsetOrder(SequentialOrder(len(mapping)), mapping, samples=count)
    made_of = documents if subset else SequentialOrder(count)
    sizes = [lengths[d] + (separator is not None) for d in mapping.tolist()]
    options = {"field": "t", "separator": separator, "seed": seed}
    if not sum(sizes):
        with pytest.raises(ConfigError, match="have no tokens"):
            WholeOrder(made_of, np.array(lengths, np.uint32), length, **options)  # type: ignore[arg-type]
        return
    made = WholeOrder(made_of, np.array(lengths, np.uint32), length, **options)  # type: ignore[arg-type]
    assert made.length == len(naive(sizes, length, 16))
    epoch, position = data.draw(st.integers(0, 2)), 0
    rows = []
    while position < made.length:
        world, size = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
        steps = data.draw(st.integers(1, 5))
        after = position
        for rank in range(world):
            slices = Slices(
                length=made.length, batch_size=size, world_size=world, rank=rank, tail="uneven"
            )
            found, _ = session(made, lengths, packing, [0])
            for piece in list(pieces(slices, epoch, position))[:steps]:
                rows += rows_of(found.make(piece)[1])
            whole = slices.steps(position)
            after = slices.step(position, min(steps, whole) - 1).after
        position = after
    assert len(rows) == made.length
    stretches: list[list[int]] = []
    for texts, ids, places in rows:
        assert (len(texts), len(ids), len(places)) == (length, length, length)
        for number in range(max(ids) + 1):
            at = [n for n, one in enumerate(ids) if one == number]
            assert [places[n] for n in at] == list(range(len(at)))
            stretches.append([texts[n] for n in at])
        assert all(texts[n] == 9999 for n, one in enumerate(ids) if one == -1)
    wanted = []
    for document in mapping.tolist():
        own = tokens(document, lengths[document]) + ([] if separator is None else [separator])
        wanted += [own[n : n + length] for n in range(0, len(own), length)]
    assert sorted(stretches) == sorted(wanted)
