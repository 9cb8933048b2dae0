"""Batches out of pages in memory hold the same bytes whichever way they are copied."""

from __future__ import annotations

import platform
from typing import Any

import numpy as np
import pytest

import hpstore
from hpstore.loaders import DataLoader, Dataset, DatasetWriter, Field
from hpstore.loaders.batching import streaming_copy
from hpstore.loaders.batching.assembler import Assembler, _Move
from hpstore.loaders.batching.batch_buffers import Slots
from hpstore.loaders.batching.batch_counters import Counts
from hpstore.loaders.batching.gather_copy import How
from hpstore.loaders.batching.page_memory import NEVER, PageMemory
from hpstore.units import GIB, KIB, MIB
from tests.fault.common import poll

COUNT = 60
built = pytest.mark.skipif(
    streaming_copy.past_the_cache(streaming_copy.LARGE_BYTES, 1) is None,
    reason="no C compiler when hpstore was installed, or no AVX2",
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


def take_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if hpstore had been installed without a C compiler."""
    monkeypatch.setattr(streaming_copy, "_installed", lambda: None)
    monkeypatch.setattr(streaming_copy, "_library", lambda: None)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")


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
        poll(60, lambda: loader.stats()["pages_in_memory"] == loader.stats()["pages_to_keep"])
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
        monkeypatch.setattr(streaming_copy, "LARGE_BYTES", 8 * 9 * KIB // 2)
    if way == "through":
        take_away(monkeypatch)
    with Dataset(pool, "d") as data:
        stats = epochs(data, fields)
    past, through = stats["copied_past_the_cache"], stats["copied_through_the_cache"]
    apart = kind == "two fixed"  # gathered, then taken apart: read again at once
    assert (past > 0, through > 0) == (way == "past" and not apart, way == "through" and not apart)


@built
@pytest.mark.parametrize("stay", [False, True])
@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("kind", FIELDS)
def test_each_copy_is_counted_once(
    pool: hpstore.Pool, monkeypatch: pytest.MonkeyPatch, kind: str, there: bool, stay: bool
) -> None:
    """Of pages that stay, so that a table says where records lie, and of pages that may go."""
    write(pool, FIELDS[kind])
    monkeypatch.setattr(streaming_copy, "LARGE_BYTES", 8 * 9 * KIB // 2)
    if not there:
        take_away(monkeypatch)
    with Dataset(pool, "d") as data:
        stream, counts = data.streams[0], Counts()
        slab = PageMemory(data, stream, 1 << 10)
        slab.read(slab.reserve(np.arange(slab.capacity), NEVER if stay else 1) or {})
        made = Assembler(data, Slots(64 * MIB, None), {stream.number: slab}, counts)
        for _ in range(3):
            made.batch(np.arange(8), awaited=0, urgent=lambda: False)
    way = How.PAST_THE_CACHE if there else How.THROUGH_THE_CACHE
    # two of one size are read again at once, to be taken apart
    large = {} if kind == "two fixed" else {way: 3}
    assert {how: n for how, n in counts.copies.items() if how is not How.USUALLY} == large


@pytest.mark.parametrize("kind", FIELDS)
def test_some_in_memory_and_some_not(
    pool: hpstore.Pool, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Each comes to its own place in the batch; what is copied on at once stays in the cache."""
    monkeypatch.setattr(streaming_copy, "LARGE_BYTES", 8 * 9 * KIB // 2)
    fields = FIELDS[kind]
    with DatasetWriter(pool, "d", {"i": Field("int64"), **fields}, unit_bytes=64 * KIB) as writer:
        for number in range(COUNT):
            writer.write(sample(fields, number))
    with Dataset(pool, "d") as data:
        stream, counts = data.streams[0], Counts()
        slab = PageMemory(data, stream, 1 << 10)
        slab.read(slab.reserve(np.arange(0, slab.capacity, 2), NEVER) or {})
        made = Assembler(data, Slots(64 * MIB, None), {stream.number: slab}, counts)
        order = np.random.default_rng(3).permutation(COUNT)
        batch: Any = made.batch(order, awaited=0, urgent=lambda: False)
        for row, index in enumerate(order.tolist()):
            wanted = sample(fields, index)
            for name in fields:
                assert plain(batch[name], row) == plain([wanted[name]], 0), (index, name)
    assert counts.copies[How.PAST_THE_CACHE] == counts.copies[How.THROUGH_THE_CACHE] == 0
    assert counts.gathered_total + counts.read_total == COUNT
    assert counts.gathered_total > 0
    assert counts.read_total > 0


def test_a_record_that_is_shorter_than_its_table_says_is_an_error() -> None:
    """Not a value with whatever lay in the slot before it."""
    move = _Move(np.array([0, 4]), np.array([10, 10]))
    out = np.zeros(20, np.uint8)
    with pytest.raises(ValueError, match="broadcast"):
        move.run([1], [np.ones(10, np.uint8)], out)
    assert not out.any()
