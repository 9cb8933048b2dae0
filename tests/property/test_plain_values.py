"""The compiled look at Python values says what the one in Python says (decision 0171)."""

from __future__ import annotations

import enum
import importlib.util
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpstore.checkpoint.state import plain_values
from hpstore.checkpoint.state.plain_values import JSON_TYPES, all_json, is_plain, values_library

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("hpstore._values") is None, reason="installed without a compiler"
)


class Text(str):
    """Not a str as JSON knows it."""


class Level(enum.IntEnum):
    LOW = 1


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**14_000, -(2**14_000), 10**4299])
    | st.floats()
    | st.text()
    | st.sampled_from(["\ud800", "\xe9", "\u20ac", "\U0001f600"])
)
OTHERS = st.sampled_from([Text("a"), Level.LOW, b"a", 1j, {}, object(), int, Ellipsis])
ROWS = st.lists(LEAVES, max_size=3) | st.lists(LEAVES, max_size=3).map(tuple)


def in_python(monkeypatch: pytest.MonkeyPatch, values: Any) -> tuple[bool, bool]:
    with monkeypatch.context() as patched:
        patched.setattr(plain_values, "values_library", lambda: None)
        return all_json(values), is_plain(values)


@given(st.lists(LEAVES | OTHERS | ROWS, max_size=12) | st.lists(LEAVES, min_size=8, max_size=20))
def test_both_say_the_same(values: list[Any]) -> None:
    """Of lists, tuples and the values of a dict, short and long."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        for same in (values, tuple(values), dict(enumerate(values)).values()):
            assert (all_json(same), is_plain(same)) == in_python(monkeypatch, same)


@pytest.mark.parametrize(
    "last", [math.inf, -math.inf, math.nan, 2**14_000, "\ud800", Text("a"), b""]
)
def test_one_among_many_is_not_json(last: Any) -> None:
    """What has no JSON is found wherever it stands, and what is no leaf at all."""
    plain = [*range(1000), *map(float, range(1000)), *map(str, range(1000))]
    assert all_json(plain)
    for place in (0, 1500, 3000):
        values = [*plain[:place], last, *plain[place:]]
        assert not all_json(values)
        assert is_plain(values) == (type(last) in JSON_TYPES)


@given(st.lists(LEAVES, min_size=8, max_size=20))
def test_what_is_json_comes_back(values: list[Any]) -> None:
    if all_json(values):
        assert json.loads(json.dumps(values, ensure_ascii=False).encode()) == values


def test_what_cannot_be_looked_at_is_an_error() -> None:
    """The library raises as Python does, and no error stays behind."""
    look = values_library()
    assert look is not None
    with pytest.raises(TypeError, match="iterable"):
        look(7)  # type: ignore[arg-type]
    assert look([1]) == 2
