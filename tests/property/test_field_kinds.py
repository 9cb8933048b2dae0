"""Values of every kind of field come back equal, however they are written and read."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpstore.errors import ConfigError, IntegrityError
from hpstore.loaders import (
    DataLoader,
    Dataset,
    DatasetWriter,
    Field,
    LoaderMemory,
    Mixture,
    ingest,
    verify_dataset,
)
from hpstore.loaders.dataset import fields as fields_module
from hpstore.loaders.dataset.fields import MEDIA_DTYPES, mask_name
from hpstore.loaders.dataset.json_values import check_json, decode_value, encode_value
from hpstore.pool.pool import Pool
from hpstore.testing.memory_pool import Harness
from hpstore.units import KIB
from tests.thorough import some_of

Sample = dict[str, Any]
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**40), 10**40)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)
CALLS = st.lists(
    st.fixed_dictionaries(
        {"function": st.fixed_dictionaries({"name": TEXTS, "arguments": TEXTS})},
        optional={"id": TEXTS},
    ),
    min_size=1,
    max_size=2,
)
MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": TEXTS},
    optional={"tool_calls": CALLS, "name": TEXTS},
) | st.fixed_dictionaries({"role": st.just("assistant"), "tool_calls": CALLS})
ARRAYS = st.integers(0, 2**32).map(
    lambda seed: np.random.default_rng(seed).random((seed % 5, 2), np.float32)
)
# of each kind: the field and its values
KINDS: dict[str, tuple[Field, st.SearchStrategy[Any]]] = {
    "json": (Field("json"), JSON),
    "chat": (Field("chat"), st.lists(MESSAGES, max_size=4)),
    "texts": (Field("str", (None,)), st.lists(TEXTS, max_size=5)),
    "text": (Field("str"), TEXTS),
    "image": (Field("image"), st.binary(max_size=40)),
    "audio": (Field("audio"), st.binary(max_size=40)),
    "video": (Field("video", media_type="video/mp4"), st.binary(max_size=40)),
    "number": (Field("int64"), st.integers(-(2**63), 2**63 - 1)),
    "box": (Field("float32", (30,)), st.integers(0, 9).map(lambda n: np.full(30, n, np.float32))),
    "wave": (Field("float32", (None, 2)), ARRAYS),
}


@contextmanager
def pools() -> Iterator[Pool]:
    with (
        tempfile.TemporaryDirectory() as directory,
        Harness(Path(directory), data=2, parity=1, devices=3).open() as pool,
    ):
        yield pool


@st.composite
def cases(draw: st.DrawFn) -> tuple[dict[str, Field], list[Sample]]:
    """Fields of some kinds, some of them optional, and samples with None in these."""
    names = draw(st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=4, unique=True))
    fields, values = {"index": Field("int64")}, {}
    for name in names:
        field, found = KINDS[name]
        if draw(st.booleans()):
            media = field.media_type
            field = Field(field.dtype, field.shape, optional=True, media_type=media)
            found = st.none() | found
        fields[name], values[name] = field, found
    rows = draw(st.lists(st.fixed_dictionaries(values), min_size=1, max_size=12))
    return fields, [{"index": n, **row} for n, row in enumerate(rows)]


def equal(found: Any, wanted: Any) -> bool:
    """The same value of the same type; arrays and numbers come back as tensors."""
    if isinstance(found, torch.Tensor):
        return wanted is not None and bool(np.array_equal(found.numpy(), np.asarray(wanted)))
    return type(found) is type(wanted) and bool(found == wanted) and repr(found) == repr(wanted)


def check(samples: list[Sample], found: Sample) -> None:
    wanted = samples[int(found["index"])]
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        assert equal(found[name], value), (name, found[name], value)


def check_batch(fields: dict[str, Field], samples: list[Sample], batch: Sample) -> None:
    """Every row is the sample's value; of what is None the mask tells."""
    masks = [mask_name(name) for name, field in fields.items() if field.optional]
    assert set(batch) == {*fields, *masks}
    for row, index in enumerate(batch["index"].tolist()):
        for name, field in fields.items():
            wanted = samples[index][name]
            if field.optional:
                assert bool(batch[mask_name(name)][row]) is (wanted is not None)
            found = batch[name][row]
            if wanted is None and isinstance(found, torch.Tensor):
                assert not found.any() or not found.numel()
                continue
            if field.is_bytes:
                found = found.numpy().tobytes()
            assert equal(found, wanted), (name, found, wanted)


def write(pool: Pool, fields: dict[str, Field], samples: list[Sample], batched: bool) -> Dataset:
    options: dict[str, Any] = {"shard_bytes": 8 * KIB, "unit_bytes": 4 * KIB}
    with DatasetWriter(pool, "d", fields, **options) as writer:
        if batched:
            writer.write_batch({name: [s[name] for s in samples] for name in fields})
        for sample in () if batched else samples:
            writer.write(sample)
    return Dataset(pool, "d")


@given(cases(), st.booleans())
@settings(max_examples=12)
def test_values_come_back_as_samples_and_in_batches(
    case: tuple[dict[str, Field], list[Sample]], batched: bool
) -> None:
    """By write() and write_batch(); by number, by batches, shuffled in windows, cut and resumed."""
    fields, samples = case
    with pools() as pool, write(pool, fields, samples, batched) as data:
        assert dict(data.fields) == fields
        assert verify_dataset(pool, "d").clean
        for found in data.__getitems__(range(len(samples))):
            check(samples, found)
        window = {"shuffle": "window", "cache": 0, "memory": LoaderMemory(window_bytes=8 * KIB)}
        for options in ({"cache": 0}, {"shuffle": True}, window):
            loader = DataLoader(data, 3, seed=1, **options)
            first = next(iter(loader))
            check_batch(fields, samples, first)
            state = loader.state_dict()
            loader.close()
            loader = DataLoader(data, 2, seed=1, **options)
            loader.load_state_dict(state)
            seen = first["index"].tolist()
            for batch in loader:
                check_batch(fields, samples, batch)
                seen += batch["index"].tolist()
            assert sorted(seen) == list(range(len(samples)))
            loader.close()


@given(cases())
@settings(max_examples=6)
def test_transforms_see_samples_and_their_batches_hold_the_same(
    case: tuple[dict[str, Field], list[Sample]],
) -> None:
    """A transform gets what was written; what it leaves alone is collated as without it, but for
    arrays of different sizes, which stay a list."""
    fields, samples = case
    fixed = {n: f for n, f in fields.items() if not f.is_plain or not f.is_ragged}

    def look(sample: Sample) -> Sample:
        wanted = samples[int(sample["index"])]
        assert all(equal(sample[name], wanted[name]) for name in fixed)
        return sample

    with pools() as pool, write(pool, fields, samples, False):
        data = Dataset(pool, "d", fields=list(fixed))
        loader = DataLoader(data, 4, transform=look)
        for batch in loader:
            for row, index in enumerate(batch["index"].tolist()):
                for name, field in fixed.items():
                    wanted = samples[index][name]
                    if field.optional:
                        assert bool(batch[mask_name(name)][row]) is (wanted is not None)
                    if wanted is not None:
                        assert equal(batch[name][row], wanted)
        loader.close()
        data.close()


@given(cases(), st.booleans())
@settings(max_examples=6)
def test_samples_of_python_are_ingested(
    case: tuple[dict[str, Field], list[Sample]], shuffle: bool
) -> None:
    """A list of dicts with the fields said, shuffled on writing or not."""
    fields, samples = case
    with pools() as pool:
        ingest(pool, "d", samples, fields=fields, shuffle=shuffle, format="auto")
        with Dataset(pool, "d") as data:
            assert dict(data.fields) == fields
            for found in data.__getitems__(range(len(samples))):
                check(samples, found)


@given(JSON)
def test_json_text_is_canonical(value: Any) -> None:
    """One value has one text, which gives back the value and that text."""
    text = encode_value("json", value)
    again = decode_value("json", text)
    assert repr(again) == repr(value)
    assert encode_value("json", again) == text


@pytest.mark.parametrize(
    "value",
    [float("nan"), [float("inf")], {1: 2}, (1,), {"a": b""}, {"a": {1}}, 10**5000, "\ud800"],
    ids=range(8),
)
def test_what_json_would_change_is_refused(value: Any) -> None:
    """NaN, keys that are no str, tuples, bytes, sets, endless ints, half of a surrogate pair."""
    with pytest.raises(ConfigError):
        encode_value("json", value)


def test_depth_is_bounded() -> None:
    """200 lists in each other are a value; more are refused, and so is such text."""
    value: Any = 1
    for _ in range(200):
        value = [value]
    assert decode_value("json", encode_value("json", value)) == value
    with pytest.raises(ConfigError, match="200 deep"):
        check_json([value])
    with pytest.raises(ValueError, match="nested"):
        decode_value("json", b"[" * 100_000)


def test_all_media_are_kinds() -> None:
    assert set(MEDIA_DTYPES) < set(KINDS)


def every_kind(count: int) -> tuple[dict[str, Field], list[Sample]]:
    """All kinds, optional, with every third value None."""
    fields = {"index": Field("int64")}
    fields |= {
        name: Field(f.dtype, f.shape, optional=True, media_type=f.media_type)
        for name, (f, _) in KINDS.items()
    }
    values: Sample = {
        "json": {"a": [1, None]},
        "chat": [{"role": "user", "content": "é"}],
        "texts": ["a", ""],
        "text": "né",
        "image": b"i",
        "audio": b"a",
        "video": b"v",
        "number": 7,
        "box": np.full(30, 2, np.float32),
        "wave": np.ones((2, 2), np.float32),
    }
    rows: list[Sample] = [
        {
            "index": n,
            **{k: None if (n + i) % 3 == 0 else v for i, (k, v) in enumerate(values.items())},
        }
        for n in range(count)
    ]
    return fields, rows


def unchanged(value: Any) -> Any:
    return value


@pytest.mark.parametrize("context", some_of(["fork", "spawn"], 0))
def test_values_go_through_worker_processes(context: str) -> None:
    """As whole batches, and as samples whose transform runs there."""
    fields, samples = every_kind(10)
    processes: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": context}
    with pools() as pool, write(pool, fields, samples, True) as data:
        loader = DataLoader(data, 4, batch_transform=unchanged, **processes)
        for batch in loader:
            check_batch(fields, samples, batch)
        loader.close()
        loader = DataLoader(data, 4, transform=unchanged, collate_fn=unchanged, **processes)
        for batch in loader:
            for sample in batch:
                check(samples, sample)
        loader.close()


def test_mixtures_and_ranks_keep_values_and_masks() -> None:
    """Two datasets with the same fields; each sample of a batch is one of its dataset's."""
    fields, samples = every_kind(12)
    options: dict[str, Any] = {"shard_bytes": 8 * KIB, "unit_bytes": 4 * KIB}
    with pools() as pool:
        for name, part in (("a", samples[:6]), ("b", samples[6:])):
            with DatasetWriter(pool, name, fields, **options) as writer:
                for sample in part:
                    writer.write(sample)
        both = Mixture([Dataset(pool, "a"), Dataset(pool, "b")], [1, 1], source_field="from")
        seen: list[int] = []
        for rank in range(2):
            loader = DataLoader(both, 3, shuffle=True, rank=rank, world_size=2, tail="uneven")
            for batch in loader:
                del batch["from"]
                check_batch(fields, samples, batch)
                seen += batch["index"].tolist()
            loader.close()
        assert sorted(seen) == list(range(12))


def test_batches_come_with_masks_and_are_written_with_them() -> None:
    """What a mask leaves out is not stored, whatever stands there; a wrong mask is refused."""
    fields = {"x": Field("float32", optional=True), "t": Field("str", optional=True)}
    values = {"x": np.array([1, np.nan, 3], np.float32), "t": ["a", None, "c"]}
    mask = np.array([True, False, True])
    with pools() as pool:
        with DatasetWriter(pool, "d", fields) as writer:
            writer.write_batch(values | {"x_mask": mask})
            writer.write_batch(
                {"x": torch.ones(2), "x_mask": torch.tensor([False, True]), "t": ["d", "e"]}
            )
            for wrong in (np.array([1, 0, 1]), mask[:2], mask[None]):
                with pytest.raises(ConfigError):
                    writer.write_batch(values | {"x_mask": wrong})
            with pytest.raises(ConfigError):
                writer.write_batch(values | {"y_mask": mask})
        data = Dataset(pool, "d")
        assert [sample["x"] for sample in data.__getitems__(range(5))] == [1, None, 3, None, 1]
        batch = next(iter(DataLoader(data, 5)))
        assert batch["x"].tolist() == [1, 0, 3, 0, 1]
        assert batch["x_mask"].tolist() == [True, False, True, False, True]
        assert batch["t"] == ["a", None, "c", "d", "e"]
        assert list(Dataset(pool, "d", fields=["t"])[1].items()) == [("t", None)]


def test_a_field_may_not_have_the_name_of_a_mask() -> None:
    with pools() as pool:
        fields = {"x": Field("int8", optional=True), "x_mask": Field("bool")}
        with pytest.raises(ConfigError, match="rename it"):
            DatasetWriter(pool, "d", fields)
        with pytest.raises(ConfigError, match="1 to 255 bytes"):
            DatasetWriter(pool, "d", {"x" * 253: Field("int8", optional=True)})


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        (
            Field("json"),
            {"a": (1,)},
            r"field 'x' \['a'\] is a tuple, which is no JSON; give a list",
        ),
        (Field("json"), np.float32(1), "field 'x' is a float32, which is no JSON"),
        (Field("str", (None,)), ["a", 1], r"field 'x' \[1\] is a int, not a str"),
        (Field("str", (None,)), "a", "is a str, not a list of strings"),
        (Field("chat"), {"role": "user"}, "is a dict, not a list of messages"),
        (Field("chat"), [{"role": "user"}], r"\[0\] has neither content nor tool_calls"),
        (Field("chat"), [{"content": "x"}], r"\[0\] has the role None, not a text"),
        (Field("chat"), [{"role": "u", "content": 3}], "has content of int"),
        (Field("chat"), [{"role": "u", "content": [3]}], "no dict with a type"),
        (Field("chat"), [{"role": "u", "tool_calls": [{}]}], "without a function"),
        (Field("chat"), [{"role": "u", "content": "", "tool_calls": 3}], "tool_calls that are a"),
        (Field("int64"), None, "is a NoneType"),
        (Field("str"), None, "is a NoneType"),
        (Field("image"), "x", "is a str, not bytes"),
        (Field("int32", (None,)), [2**31], "numbers that do not fit int32"),
        (Field("int32", (None,)), [1.5], "list of float64, the field has int32"),
        (Field("int32", (None,)), [True], "list of bool, the field has int32"),
        (Field("float16", (2,)), [1.0, 1e9], "infinite as float16"),
        (Field("float32", (2, 2)), [[1.0], [2.0, 3.0]], "no array"),
    ],
)
def test_a_value_of_another_kind_is_named(field: Field, value: Any, says: str) -> None:
    """What it is, where in the value, and what the field has; nothing of it is written."""
    with pools() as pool:
        writer = DatasetWriter(pool, "d", {"x": field})
        with pytest.raises(ConfigError, match=says):
            writer.write({"x": value})
        assert len(writer) == 0
        writer.abandon()


@pytest.mark.parametrize("text", [b"{", b"\xff", b"NaN", b"[1e", b"[" * 5000, b'["a", 1]'])
def test_hostile_text_is_named_by_its_sample(text: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written past the check of a writer: the error has the number, skip leaves it out."""

    def written(form: str, value: object) -> bytes:
        return text if value == ["bad"] else encode_value(form, value)

    monkeypatch.setattr(fields_module, "encode_value", written)
    with pools() as pool:
        with DatasetWriter(pool, "d", {"t": Field("str", (None,)), "n": Field("int64")}) as writer:
            for n, value in enumerate((["a"], ["bad"], ["b"])):
                writer.write({"t": value, "n": n})
        data = Dataset(pool, "d")
        with pytest.raises(
            IntegrityError, match="sample 1 of data set 'd': field 't' holds no str"
        ):
            data[1]
        loader = DataLoader(data, 3)
        with pytest.raises(IntegrityError, match=r"sample 1 .*cannot be decoded: field 't'"):
            next(iter(loader))
        loader.close()
        loader = DataLoader(data, 3, on_error="skip")
        batch = next(iter(loader))
        assert (batch["t"], batch["n"].tolist()) == ([["a"], ["b"]], [0, 2])
        loader.close()
