"""A loader's state: what it says, and what it refuses."""

from __future__ import annotations

import json

import pytest

from hpstore.errors import ConfigError, FormatTooNew
from hpstore.loaders.sampling.loader_state import LoaderState, order_text
from hpstore.loaders.sampling.mixture_order import MixtureOrder
from hpstore.loaders.sampling.order import GlobalOrder, SequentialOrder

ORDER = order_text(GlobalOrder(10**9, 7))


def state(order: str = ORDER, seed: int = 7, samples: int = 10**8) -> LoaderState:
    """In the middle of epoch 3."""
    return LoaderState(fingerprints=("ab12",), order=order, seed=seed, epoch=3, samples=samples)


def test_a_state_is_the_same_after_json() -> None:
    """JSON types only, a few hundred bytes at 1e9 samples."""
    text = json.dumps(state().to_dict())
    assert LoaderState.from_dict(json.loads(text)) == state()
    assert len(text) < 300


def test_a_state_handed_out_is_shared_with_nobody() -> None:
    """Changing it changes neither the next one nor the loader's."""
    first = state()
    raw = first.to_dict()
    raw["fingerprints"] = raw["samples"] = None
    assert first == state()
    prints = first.to_dict()["fingerprints"]
    assert isinstance(prints, list)
    prints.append("x")
    assert first == state()


def test_the_same_run_is_accepted() -> None:
    """Up to the last position."""
    for samples in (0, 10**9):
        state(samples=samples).require_same_run(
            fingerprints=["ab12"], order=ORDER, seed=7, length=10**9
        )


def test_another_run_is_refused_with_both_sides() -> None:
    """Data set, seed, kind of order, its entries, position: what was saved and what is set."""
    plain = order_text(SequentialOrder(10**9))
    longer = order_text(GlobalOrder(10**9 + 1, 7))
    for prints, order, seed, length, said in (
        ("cd34", ORDER, 7, 10**9, r"data set \['ab12'\] was saved, \['cd34'\] is set"),
        ("ab12", ORDER, 8, 10**9, "seed 7 was saved, 8 is set"),
        ("ab12", plain, 7, 10**9, "order global was saved, sequential is set"),
        ("ab12", longer, 7, 10**9, "order length 1000000000 was saved, 1000000001 is set"),
        ("ab12", ORDER, 7, 10**7, "at least 100000000 was saved, 10000000 is set"),
    ):
        with pytest.raises(ConfigError, match=said) as refused:
            state().require_same_run(fingerprints=[prints], order=order, seed=seed, length=length)
        assert "Nothing was loaded" in str(refused.value)


def test_every_difference_is_named_at_once() -> None:
    """Also inside the sources of a mixture."""
    saved = MixtureOrder([GlobalOrder(10, 1), SequentialOrder(10)], [1, 1], 7)
    here = MixtureOrder([GlobalOrder(10, 2), GlobalOrder(10, 5)], [1, 3], 7)
    with pytest.raises(ConfigError) as refused:
        state(order_text(saved), samples=0).require_same_run(
            fingerprints=["other"], order=order_text(here), seed=7, length=20
        )
    for part in (
        "data set",
        "order orders[0] seed 1 was saved, 2 is set",
        "order orders[1] sequential was saved, global is set",
        "order weights[1] 1.0 was saved, 3.0 is set",
    ):
        assert part in str(refused.value)


def test_a_state_of_a_newer_hpstore_is_refused() -> None:
    """It may count otherwise."""
    with pytest.raises(FormatTooNew, match="version 2, this hpstore reads 1"):
        LoaderState.from_dict({**state().to_dict(), "version": 2})


@pytest.mark.parametrize(
    "change",
    [
        {"version": None},
        {"version": 0},
        {"samples": -1},
        {"samples": 1.5},
        {"epoch": "3"},
        {"order": None},
        {"order": "{"},
        {"epoch": True},
        {"fingerprints": "ab12"},
        {"fingerprints": [1]},
        {"seed": None},
    ],
)
def test_what_is_no_state_is_refused(change: dict[str, object]) -> None:
    """A sampler's state, a damaged one, another library's."""
    with pytest.raises(ConfigError, match="not the state of a hpstore loader"):
        LoaderState.from_dict({**state().to_dict(), **change})
    with pytest.raises(ConfigError, match="none was loaded"):
        LoaderState.from_dict({})
