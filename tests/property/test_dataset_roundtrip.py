"""Any samples of any fields come back bit by bit, however they are laid out, cut and compressed."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from hpstore.loaders import Dataset, DatasetWriter, Field, verify_dataset
from hpstore.loaders.dataset.fields import DTYPES, FieldKind
from hpstore.pool.pool import Pool
from hpstore.testing.memory_pool import Harness
from hpstore.units import KIB

FIELDS = st.builds(
    Field,
    st.sampled_from([d for d in DTYPES if d not in ("bytes", "str")]),
    st.lists(st.integers(1, 6), max_size=3).map(tuple)
    | st.lists(st.integers(1, 4), max_size=2).map(lambda s: (None, *s))
    | st.sampled_from([(3000,), (9, 700), (40, 40, 3)]),
) | st.sampled_from([Field("bytes"), Field("str")])


@dataclass(frozen=True)
class Case:
    """Fields, samples of them, and how they are stored."""

    fields: dict[str, Field]
    samples: list[dict[str, Any]]
    options: dict[str, Any]
    batched: bool


def value_of(field: Field, rng: np.random.Generator) -> Any:
    """Random bits; sizes from nothing to some pages."""
    size = int(rng.choice([0, 1, 7, 300, 5000, 20_000, 40_000]))
    if field.dtype == "bytes":
        return rng.bytes(size)
    if field.dtype == "str":
        return "".join(map(chr, rng.integers(0x20, 0xD7FF, size // 10)))
    lead = () if not field.is_ragged else (int(rng.integers(0, 9)) * int(rng.choice([1, 900])),)
    shape = (*lead, *field.inner_shape)
    if field.dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    count = int(np.prod(shape, dtype=np.int64)) * field.storage.itemsize
    return np.frombuffer(rng.bytes(count), field.storage).reshape(shape)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    fields = {
        f"f{i}": field for i, field in enumerate(draw(st.lists(FIELDS, min_size=1, max_size=6)))
    }
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    samples = [
        {name: value_of(field, rng) for name, field in fields.items()}
        for _ in range(draw(st.integers(0, 25)))
    ]
    options = {
        "layout": draw(st.sampled_from(["auto", "rows", "columns"])),
        "shard_bytes": draw(st.sampled_from([1, 150 * KIB, 400 * KIB])),
        "unit_bytes": draw(st.sampled_from([None, 4 * KIB, 16 * KIB, 64 * KIB])),
        "compression": draw(st.sampled_from([None, None, "lz4", "zstd", "blosc"])),
    }
    return Case(fields=fields, samples=samples, options=options, batched=draw(st.booleans()))


def write(pool: Pool, name: str, case: Case, **changed: Any) -> None:
    with DatasetWriter(pool, name, case.fields, **{**case.options, **changed}) as writer:
        if case.batched:
            batch = {n: [sample[n] for sample in case.samples] for n in case.fields}
            assert writer.write_batch(batch) == range(len(case.samples))
        else:
            for index, sample in enumerate(case.samples):
                assert writer.write(sample) == index


def equal(field: Field, found: Any, wanted: Any) -> bool:
    """Bit by bit, with dtype and shape."""
    if not isinstance(found, torch.Tensor):
        return type(found) is type(wanted) and bool(found == wanted)
    if field.dtype == "bfloat16":
        assert found.dtype is torch.bfloat16
        found = found.view(torch.uint16)
    array = found.numpy()
    facts = (array.dtype, array.shape, array.tobytes())
    return bool(facts == (wanted.dtype, wanted.shape, wanted.tobytes()))


def bits(sample: dict[str, Any]) -> list[Any]:
    """A sample in a form that compares bit by bit."""
    return [(v.shape, v.tobytes()) if isinstance(v, np.ndarray) else v for v in sample.values()]


def check_places(pool: Pool, data: Dataset) -> None:
    """locate, pages and stripes agree with the bytes in the objects and with each other."""
    rows = np.arange(len(data), dtype=np.int64)
    for stream in data.streams:
        places, pages = data.locate(stream, rows), data.pages(stream)
        assert len(pages.first_sample) == len(pages.shard) + 1
        assert pages.first_sample[-1] == len(data)
        for row in rows.tolist():
            shard, start, length = (
                int(places.shard[row]),
                int(places.start[row]),
                int(places.length[row]),
            )
            first = int(np.searchsorted(pages.first_sample, row, "right")) - 1
            assert pages.shard[first] == shard
            assert pages.start[first] <= start < pages.start[first] + stream.unit_bytes
            inside = start + length <= pages.start[first] + stream.unit_bytes
            assert places.page[row] == (first if inside else -1)
            if not stream.compression:
                raw = pool.get(data.shard_key(stream, shard), start, start + length)
                assert xxhash.xxh3_64_intdigest(raw) == int(places.checksum[row])
    stripes = data.stripes()
    assert stripes[-1] == len(data)
    assert not len(data) or stripes[0] == 0
    assert (np.diff(stripes) > 0).all()


@given(cases(), st.integers(0, 2**32))
def test_samples_come_back_in_any_order(case: Case, seed: int) -> None:
    """Written one by one or at once, any layout, page, shard size and codec; verify is clean."""
    with tempfile.TemporaryDirectory() as directory:
        harness = Harness(Path(directory), data=2, parity=1, devices=3)
        with harness.open() as pool:
            write(pool, "a", case)
            data = Dataset(pool, "a")
            assert len(data) == len(case.samples)
            rng = np.random.default_rng(seed)
            order = rng.integers(0, len(data), 40).tolist() if case.samples else []
            for index, sample in zip(order, data.__getitems__(order), strict=True):
                assert list(sample) == list(case.fields)
                for name, field in case.fields.items():
                    assert equal(field, sample[name], case.samples[index][name]), (index, name)
            for name, field in case.fields.items():
                if field.kind is FieldKind.SCALAR and order:
                    found = data.scalars(name, np.array(order))
                    assert found.tobytes() == b"".join(
                        case.samples[index][name].tobytes() for index in order
                    )
            check_places(pool, data)
            report = verify_dataset(pool, "a")
            assert report.clean, report
            assert report.samples == len(case.samples)


@given(cases(), st.sampled_from([None, "zstd"]), st.sampled_from([1, 300 * KIB]))
def test_the_fingerprint_is_that_of_the_samples(
    case: Case, compression: str | None, shard_bytes: int
) -> None:
    """Other shards, pages and codec: the same one. Another order of samples: another one."""
    with tempfile.TemporaryDirectory() as directory:
        harness = Harness(Path(directory), data=2, parity=1, devices=3)
        with harness.open() as pool:
            write(pool, "a", case)
            write(
                pool,
                "b",
                case,
                compression=compression,
                shard_bytes=shard_bytes,
                unit_bytes=8 * KIB,
            )
            layout = Dataset(pool, "a").manifest.layout
            assert Dataset(pool, "b").manifest.layout == layout
            assert Dataset(pool, "a").fingerprint == Dataset(pool, "b").fingerprint
            turned = Case(case.fields, case.samples[::-1], case.options, case.batched)
            write(pool, "c", turned)
            same = [bits(s) for s in case.samples] == [bits(s) for s in turned.samples]
            assert (Dataset(pool, "c").fingerprint == Dataset(pool, "a").fingerprint) is same
