"""Values of a training state come back as the types that they were, whatever is nested in what."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import decimal
import enum
import fractions
import io
import json
import pathlib
import random
import sys
import types
import uuid
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpstore.checkpoint.state.scalars import Classes, StandIn
from hpstore.checkpoint.state.state_tree import (
    CollectedTensors,
    Decoding,
    decode_tree,
    encode_tree,
    tensor_names,
)
from hpstore.checkpoint.state.tree_paths import leaves, plain
from hpstore.errors import CheckpointError, IntegrityError

Pair = namedtuple("Pair", "first second")
RAN: list[object] = []


class Colour(enum.Enum):
    RED = 1
    GREEN = (2, "g")


class Level(enum.IntEnum):
    LOW = 1


class Mode(enum.StrEnum):
    FAST = "fast"


class Access(enum.Flag):
    READ = 1
    WRITE = 2


@dataclasses.dataclass
class Settings:
    rate: float
    path: pathlib.Path
    moments: Any = None
    extra: list[int] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        RAN.append(self)


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    name: str
    sizes: tuple[int, ...]


def there_and_back(value: Any, classes: Classes | None = None) -> Any:
    """By way of the JSON text of a manifest."""
    found = CollectedTensors()
    tree = json.loads(json.dumps(encode_tree({"v": value}, "", found)))
    assert set(tensor_names(tree)) == set(found.tensors)
    how = Decoding(tensor=found.tensors.__getitem__, classes=classes or Classes())
    return decode_tree(tree, how)["v"]


def part_read(content: bytes, at: int) -> io.BytesIO:
    stream = io.BytesIO(content)
    stream.seek(at)
    return stream


def same(one: Any, two: Any) -> bool:
    """Equal in value and in every type."""
    if type(one) is not type(two):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == two.dtype and torch.equal(one, two)
    if isinstance(one, np.ndarray):
        return one.dtype == two.dtype and np.array_equal(one, two)
    if isinstance(one, defaultdict) and one.default_factory is not two.default_factory:
        return False
    if isinstance(one, io.BytesIO):
        return (one.getvalue(), one.tell()) == (two.getvalue(), two.tell())
    if isinstance(one, dict):
        return list(one) == list(two) and all(same(one[key], two[key]) for key in one)
    if isinstance(one, deque) and one.maxlen != two.maxlen:
        return False
    if isinstance(one, (list, tuple, deque)):
        return len(one) == len(two) and all(map(same, one, two))
    if dataclasses.is_dataclass(one) and not isinstance(one, type):
        return all(
            same(getattr(one, f.name), getattr(two, f.name)) for f in dataclasses.fields(one)
        )
    return bool(one == two)


SCALARS = [
    Colour.RED,
    Colour.GREEN,
    Level.LOW,
    Mode.FAST,
    Access.READ | Access.WRITE,
    Access(0),
    pathlib.Path("a/b"),
    pathlib.PurePosixPath("/x"),
    pathlib.PureWindowsPath("c:/x"),
    datetime.datetime(2026, 11, 28, 9, 5, 7, 123, fold=1),
    datetime.datetime(2026, 3, 1, tzinfo=datetime.UTC),
    datetime.datetime(2026, 3, 1, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin")),
    datetime.time(7, 8, tzinfo=datetime.timezone(datetime.timedelta(hours=-3))),
    datetime.date(2026, 1, 2),
    datetime.timedelta(days=-1, microseconds=5),
    zoneinfo.ZoneInfo("Asia/Tokyo"),
    decimal.Decimal("1.10"),
    decimal.Decimal("Infinity"),
    fractions.Fraction(-1, 3),
    uuid.UUID(int=7),
    slice(1, None, 2),
    range(3, 9, 2),
    complex(-0.0, 2.5),
    b"\x00\xff",
    bytearray(b"ab"),
    torch.Size([2, 3]),
    torch.bfloat16,
    torch.device("cuda:1"),
    torch.channels_last,
    torch.strided,
    np.dtype("<i2"),
    np.float32(1.5),
    np.float64(0.1),
    np.int8(-3),
    np.bool_(True),
    np.complex64(1 + 2j),
    np.datetime64("2026-01-02T03:04", "s"),
    np.timedelta64(5, "D"),
    np.str_("text"),
    np.bytes_(b"x"),
    float("inf"),
    -0.0,
    2**4000,
    -(2**63),
    2**63,
    None,
    True,
    "snowman \u2603",
]
CONTAINERS = [
    {"stream": part_read(b"abc", 2)},
    Counter({"a": 2, "b": 1}),
    Counter({7: 1}),
    OrderedDict([("z", 1), ("a", {"n": 2})]),
    defaultdict(list, {"a": [1]}),
    defaultdict(None, {1: 2}),
    defaultdict(int),
    deque([1, 2], 5),
    deque([[1], (2,)]),
    {1, 2, 3},
    frozenset({"a", ("b", 1)}),
    set(),
    Frozen("x", (1, 2)),
    Settings(0.1, pathlib.Path("p"), torch.ones(2), [3]),
    argparse.Namespace(lr=0.1, out=pathlib.Path("o")),
    types.SimpleNamespace(a={1: (2,)}),
    {Colour.RED: 1, Frozen("k", ()): 2},
    {"$": 1, "ü": 2},
    {1: "a", "1x": "b"},
    [(1, 2.5), (2, float("nan"))],
    [[1, 2], [3]],
    [(1, "a"), (2, "b")],
    list(range(20)),
    [1.0, float("inf"), *range(9)],
    {str(n): n * 0.5 for n in range(20)},
    {"t": (torch.arange(3), [torch.zeros(0)]), "n": np.arange(4.0)},
]


@pytest.mark.parametrize("value", SCALARS, ids=lambda value: type(value).__name__)
def test_a_value_comes_back_as_its_type(value: Any) -> None:
    """Alone, in a list, as a key, and in the objects that hold others."""
    assert same(there_and_back(value), value)
    assert same(there_and_back([value, {"k": (value,)}]), [value, {"k": (value,)}])
    if isinstance(value, (slice, bytearray)):
        return
    keyed = {value: 1, "other": frozenset([value])}
    assert same(there_and_back(keyed), keyed)


@pytest.mark.parametrize("value", CONTAINERS, ids=lambda value: type(value).__name__)
def test_a_container_comes_back_as_its_type(value: Any) -> None:
    """With what is in it; the constructor of no class has run for that."""
    RAN.clear()
    found = there_and_back(value)
    if "nan" in repr(value):
        assert repr(found) == repr(value)
    else:
        assert same(found, value)
    assert RAN == []


numbers = (
    st.integers()
    | st.floats(allow_nan=False)
    | st.booleans()
    | st.none()
    | st.text(st.characters(codec="utf-8"), max_size=5)
)
keys = (
    st.text(st.characters(codec="utf-8"), max_size=3)
    | st.integers(-9, 9)
    | st.sampled_from(list(Colour))
)
scalars = numbers | st.sampled_from([v for v in SCALARS if v.__hash__ is not None])
nested = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=12),
        st.lists(inner, max_size=3).map(tuple),
        st.lists(inner, max_size=3).map(deque),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4).map(OrderedDict),
        st.builds(lambda a, b: Settings(a, b), inner, inner),
        st.lists(st.tuples(numbers, numbers), max_size=12),
    ),
    max_leaves=12,
)


@given(nested)
def test_whatever_is_nested_comes_back(value: Any) -> None:
    """Also shown, listed and exported by those who only look at a checkpoint."""
    found = CollectedTensors()
    tree = json.loads(json.dumps(encode_tree({"v": value}, "", found)))
    assert same(decode_tree(tree, Decoding(tensor=found.tensors.__getitem__))["v"], value)
    assert all(isinstance(leaf.shown(), str) for leaf in leaves(tree))
    plain(tree, found.tensors.__getitem__)


def test_elements_of_a_set_are_in_one_order() -> None:
    """Ranks whose strings hash otherwise record the same."""
    one, other = set[int](), set[int]()
    for number in (0, 8, 16):
        one.add(number)
        other.add(16 - number)
    assert list(one) != list(other)
    assert encode_tree(one, "", CollectedTensors()) == encode_tree(other, "", CollectedTensors())


def test_a_class_that_is_not_loaded_is_not_imported() -> None:
    """An error that names it, or a stand-in; never an import, nor a class of another kind."""
    tree = encode_tree(Frozen("x", (1,)), "", CollectedTensors())
    tree["class"] = "antigravity:Thing"
    nothing = Decoding(tensor=dict[str, torch.Tensor]().__getitem__)
    with pytest.raises(CheckpointError, match="Import its module first"):
        decode_tree(tree, nothing)
    shown = decode_tree(tree, dataclasses.replace(nothing, classes=Classes(strict=False)))
    assert isinstance(shown, StandIn)
    assert shown.value == {"name": "x", "sizes": (1,)}
    assert "antigravity" not in sys.modules
    for name in ("subprocess:Popen", "builtins:eval", "os:system", "pathlib:Path"):
        tree["class"] = name
        with pytest.raises(CheckpointError, match="no class of its kind"):
            decode_tree(tree, nothing)
    known = Classes(lambda: {"Thing": Frozen})
    tree["class"] = "__old_main__:Thing"
    assert decode_tree(tree, dataclasses.replace(nothing, classes=known)) == Frozen("x", (1,))


def test_what_no_restore_would_find_is_refused_when_it_is_saved() -> None:
    """A class inside a function, an attribute that is no field, a time zone of unknown rules."""

    @dataclasses.dataclass
    class Local:
        n: int

    class Zone(datetime.tzinfo):
        def utcoffset(self, _: datetime.datetime | None) -> datetime.timedelta:
            return datetime.timedelta(hours=1)

        tzname = dst = utcoffset  # type: ignore[assignment]

    @dataclasses.dataclass
    class Failure(Exception):
        n: int

    globals()["Failure"], Failure.__qualname__ = Failure, "Failure"
    with_more = Settings(1.0, pathlib.Path())
    with_more.added = 1  # type: ignore[attr-defined]
    for value, says in (
        (Local(1), "no restore would find it"),
        (Failure(1), "not all of it"),
        (with_more, "no field of it"),
        (datetime.datetime(2026, 1, 1, tzinfo=Zone()), "whose rules no checkpoint can hold"),
    ):
        with pytest.raises(CheckpointError, match=says):
            encode_tree({"v": value}, "", CollectedTensors())
    del globals()["Failure"]
    found = encode_tree({"v": with_more}, "", CollectedTensors(allow_pickle=True))
    assert found["v"]["$"] == "pickle"


def test_a_field_that_was_added_since_gets_its_default() -> None:
    """And one that is gone is an error: nothing saved is dropped."""
    tree = encode_tree(Settings(1.0, pathlib.Path("x")), "", CollectedTensors())
    rows = dict(map(tuple, tree["v"]))
    nothing = Decoding(tensor=dict[str, torch.Tensor]().__getitem__)
    less = {**tree, "v": [[k, v] for k, v in rows.items() if k != "extra"]}
    assert decode_tree(less, nothing).extra == []
    with pytest.raises(CheckpointError, match="does not have now"):
        decode_tree({**tree, "v": [*tree["v"], ["gone", 1]]}, nothing)


# numpy takes it, and raises SystemError when it is looked at
NO_CHARACTER = {"dtype": "<U1", "hex": "0100007f"}


@pytest.mark.parametrize(
    "node",
    [
        {"$": "fraction", "v": ["1", "0"]},
        {"$": "decimal", "v": "x"},
        {"$": "uuid", "v": "1"},
        {"$": "timedelta", "v": [10**12, 0, 0]},
        {"$": "zone", "v": "../../etc/passwd"},
        {"$": "datetime", "v": "x", "zone": None, "fold": 0},
        {"$": "device", "v": "moon"},
        {"$": "scalar", "dtype": "O", "v": "00"},
        {"$": "scalar", "dtype": "<U1", "v": "0100007f"},
        {"$": "numpy generator", "v": {"bit_generator": "PCG64", "state": NO_CHARACTER}},
        {"$": "numpy generator", "v": {"bit_generator": "MT19937", "state": {"key": NO_CHARACTER}}},
        {"$": "numpy dtype", "v": "O"},
        {"$": "torch generator", "device": "cpu", "v": "AAAA"},
        {"$": "random", "v": [3, [1], None]},
        {"$": "numpy generator", "v": {"bit_generator": "os"}},
        {"$": "tuple", "type": "slice", "v": [1]},
        {"$": "tuple", "type": "other", "v": []},
        {"$": "dict", "type": "other", "v": []},
        {"$": "tuple", "type": "set", "v": [[1]]},
        {"$": "tuple", "type": "range", "v": [0, 1, 0]},
        {"$": "dict", "type": "Namespace", "v": [[1, 2]]},
        {"$": "enum", "class": 7, "v": "RED"},
        {"$": "tuple", "type": "deque", "maxlen": -1, "v": []},
    ],
    ids=str,
)
def test_bytes_of_an_enemy_are_an_error_of_ours(node: Any) -> None:
    """No error of Python's, no code that runs, no memory that a number asks for."""
    with pytest.raises((IntegrityError, CheckpointError)):
        decode_tree(node, Decoding(tensor=dict[str, torch.Tensor]().__getitem__))


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.Generator().manual_seed(5),
        lambda: random.Random(5),
        lambda: np.random.default_rng(5),
        lambda: np.random.Generator(np.random.MT19937(5)),
        lambda: np.random.Generator(np.random.Philox(5)),
        lambda: np.random.RandomState(5),
    ],
)
def test_a_source_of_random_numbers_goes_on_where_it_stood(make: Any) -> None:
    """Also in the middle of its block of numbers."""

    def draw(source: Any) -> list[float]:
        if isinstance(source, torch.Generator):
            return torch.rand(7, generator=source).tolist()
        return [
            source.normal() if hasattr(source, "normal") else source.gauss(0, 1) for _ in range(7)
        ]

    source = make()
    draw(source)
    found = there_and_back(source)
    assert type(found) is type(source)
    assert draw(found) == draw(source)


LONE = "a\ud800"


def made(kind: Any, name: str) -> Any:
    """An enum of this module whose only member has a name without UTF-8."""
    found = kind(name, {LONE: 1})
    found.__module__ = __name__
    return found


Halved = made(enum.Flag, "Halved")
Named = made(enum.Enum, "Named")


class Texts(enum.StrEnum):
    HALF = LONE


NO_UTF8: dict[str, Any] = {
    "path": pathlib.Path(LONE),
    "posix path": pathlib.PurePosixPath(LONE),
    "windows path": pathlib.PureWindowsPath(LONE),
    "a path in a set": {pathlib.Path(LONE)},
    "a path for a key": {pathlib.Path(LONE): 1},
    "a zone": datetime.timezone(datetime.timedelta(hours=1), LONE),
    "a time": datetime.datetime(2026, 1, 1, tzinfo=datetime.timezone(datetime.timedelta(0), LONE)),
    "an enum": Named(1),
    "a name of a tensor": {Halved(1): torch.ones(1)},
    "a name by its text": {Texts.HALF: torch.ones(1)},
    "text": LONE,
    "a key": {LONE: 1},
    "a key among others": {LONE: 1, 2: 3},
    "an attribute": types.SimpleNamespace(**{LONE: 1}),
}


@pytest.mark.parametrize("case", NO_UTF8)
def test_text_without_utf8_is_refused_with_its_place(case: str) -> None:
    """A manifest is UTF-8: a save failed in the background, where no path was known."""
    for value in (NO_UTF8[case], [NO_UTF8[case]]):
        with pytest.raises(CheckpointError, match=r"'v.* half a surrogate pair"):
            encode_tree({"v": value}, "", CollectedTensors())


@pytest.mark.parametrize("sizes", [[-1, 64], [], [0], [-(2**63), 2**63 - 1]])
def test_every_size_of_torch_comes_back(sizes: list[int]) -> None:
    """One with -1 in it, as view() takes, could be saved and never be restored."""
    back = there_and_back(torch.Size(sizes))
    assert type(back) is torch.Size
    assert list(back) == sizes
