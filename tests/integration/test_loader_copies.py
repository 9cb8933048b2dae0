"""Batches out of pages in memory hold the same bytes whichever way they are copied."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import hpstore
from hpstore.loaders import DataLoader, Dataset, DatasetWriter, Field, nontemporal
from hpstore.loaders.batches import Assembler
from hpstore.loaders.counts import Counts
from hpstore.loaders.joining import How
from hpstore.loaders.slab import NEVER, Slab
from hpstore.loaders.slots import Slots
from hpstore.units import GIB, KIB, MIB
from tests.fault.common import poll

COUNT = 60
built = pytest.mark.skipif(
    nontemporal.past_the_cache(nontemporal.LARGE_BYTES) is None,
    reason="hpstore was installed without a C compiler",
)
FIELDS = {
    "fixed": {"x": Field("uint8", (9 * KIB,))},
    "two fixed": {"x": Field("uint8", (9 * KIB,)), "y": Field("int16", (33,))},
    "ragged": {"x": Field("bytes")},
    "two ragged": {"x": Field("bytes"), "y": Field("int32", (None,)), "z": Field("uint8", (5,))},
}


def sample(fields: dict[str, Field], number: int) -> dict[str, Any]:
    random = np.random.default_rng(number)
    found: dict[str, Any] = {"i": number}
    for name, field in fields.items():
        if field.dtype == "bytes":
            found[name] = random.bytes(9 * KIB + number * 37)
        else:
            shape = [number % 7 if n is None else n for n in field.shape]
            found[name] = random.integers(0, 100, shape).astype(field.dtype)
    return found


def plain(value: Any, row: int) -> bytes:
    one = value[row]
    return one if isinstance(one, bytes) else bytes(np.asarray(one).tobytes())


def epochs(data: Dataset, fields: dict[str, Field], **options: Any) -> dict[str, Any]:
    """stats() after two epochs whose samples were all looked at."""
    loader = DataLoader(data, 8, shuffle=True, cache=GIB, **options)
    for number in range(2):
        loader.set_epoch(number)
        seen = []
        for batch in loader:
            for row, index in enumerate(batch["i"].tolist()):
                wanted = sample(fields, index)
                for name in fields:
                    assert plain(batch[name], row) == plain([wanted[name]], 0), (index, name)
                seen.append(index)
        assert sorted(seen) == list(range(COUNT))
        poll(10, lambda: loader.stats()["pages_in_memory"] == loader.stats()["pages_to_keep"])
    loader.close()
    return loader.stats()


def write(pool: hpstore.Pool, fields: dict[str, Field]) -> None:
    with DatasetWriter(pool, "d", {"i": Field("int64"), **fields}) as writer:
        for number in range(COUNT):
            writer.write(sample(fields, number))


@pytest.mark.parametrize("kind", FIELDS)
@pytest.mark.parametrize("way", [pytest.param("past", marks=built), "through", "small"])
def test_every_way_hands_out_what_was_written(
    pool: hpstore.Pool, monkeypatch: pytest.MonkeyPatch, kind: str, way: str
) -> None:
    """And stats() says which it was: what is to stay 0 is counted where it is not."""
    fields = FIELDS[kind]
    write(pool, fields)
    if way != "small":
        monkeypatch.setattr(nontemporal, "LARGE_BYTES", 8 * 9 * KIB // 2)
    if way == "through":
        monkeypatch.setattr(nontemporal, "_installed", lambda: None)
    with Dataset(pool, "d") as data:
        stats = epochs(data, fields)
    past, through = stats["copied_past_the_cache"], stats["copied_through_the_cache"]
    assert (past > 0, through > 0) == (way == "past", way == "through")


@built
@pytest.mark.parametrize("stay", [False, True])
@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("kind", FIELDS)
def test_each_copy_is_counted_once(
    pool: hpstore.Pool, monkeypatch: pytest.MonkeyPatch, kind: str, there: bool, stay: bool
) -> None:
    """Of pages that stay, so that a table says where records lie, and of pages that may go."""
    write(pool, FIELDS[kind])
    monkeypatch.setattr(nontemporal, "LARGE_BYTES", 8 * 9 * KIB // 2)
    if not there:
        monkeypatch.setattr(nontemporal, "_installed", lambda: None)
    with Dataset(pool, "d") as data:
        stream, counts = data.streams[0], Counts()
        slab = Slab(data, stream, 1 << 10)
        slab.read(slab.reserve(np.arange(slab.capacity), NEVER if stay else 1) or {})
        made = Assembler(data, Slots(64 * MIB, None), {stream.number: slab}, counts)
        for _ in range(3):
            made.batch(np.arange(8), awaited=0, urgent=lambda: False)
    way = How.PAST_THE_CACHE if there else How.THROUGH_THE_CACHE
    assert {how: n for how, n in counts.copies.items() if how is not How.USUALLY} == {way: 3}


@pytest.mark.parametrize("kind", FIELDS)
def test_some_in_memory_and_some_not(pool: hpstore.Pool, kind: str) -> None:
    """Each comes to its own place in the batch."""
    fields = FIELDS[kind]
    with DatasetWriter(
        pool, "d", {"i": Field("int64"), **fields}, unit_bytes=64 * KIB
    ) as writer:  # fmt: skip
        for number in range(COUNT):
            writer.write(sample(fields, number))
    with Dataset(pool, "d") as data:
        stream = data.streams[0]
        slab = Slab(data, stream, 1 << 10)
        slab.read(slab.reserve(np.arange(0, slab.capacity, 2), NEVER) or {})
        made = Assembler(data, Slots(64 * MIB, None), {stream.number: slab}, Counts())
        order = np.random.default_rng(3).permutation(COUNT)
        where = data.locate(stream, order)
        with slab.resident(where) as slots:
            assert 0 < (slots < 0).sum() < COUNT
        batch: Any = made.batch(order, awaited=0, urgent=lambda: False)
        for row, index in enumerate(order.tolist()):
            wanted = sample(fields, index)
            for name in fields:
                assert plain(batch[name], row) == plain([wanted[name]], 0), (index, name)
