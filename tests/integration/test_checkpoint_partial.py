"""Restores that fit in part or fail in the middle, and values that come back as what they were."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import hpstore
from hpstore.checkpoint import Checkpointer, SaveOptions
from hpstore.config import Settings
from hpstore.errors import CheckpointError, CheckpointMismatch, HpstoreError
from hpstore.testing.memory_pool import Harness
from hpstore.units import KIB, MIB

pytestmark = pytest.mark.usefixtures("segments_apart")

SIZE = 400_000


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    return Harness(tmp_path, data=2, parity=1, devices=3, settings=Settings(memory_bytes=32 * MIB))


@pytest.fixture
def pool(harness: Harness) -> Iterator[hpstore.Pool]:
    with harness.open() as opened:
        yield opened


def ckpt_of(pool: hpstore.Pool) -> Checkpointer:
    """One that reads what is stored."""
    return Checkpointer(pool, "run", rng=False, save=SaveOptions(warm=False))


def two_steps(pool: hpstore.Pool) -> str:
    """Step 1 with `w`, step 2 with `w` and `x`; the key of step 2's segment."""
    with ckpt_of(pool) as ckpt:
        ckpt.save(1, {"w": torch.full((SIZE,), 1.0)}).result()
        ckpt.save(2, {"w": torch.full((SIZE,), 2.0), "x": torch.full((SIZE,), 2.0)}).result()
        return ckpt.steps.manifest(2).segments[0].key


def blank() -> dict[str, torch.Tensor]:
    """A state for both."""
    return {"w": torch.zeros(SIZE), "x": torch.zeros(SIZE)}


def damage_the_end(harness: Harness, key: str) -> None:
    """Flip bits late in more columns than parity mends."""
    for url, path in harness.columns(key)[:2]:
        size = len(harness.devices[url].files[path].bytes)
        for offset in range(size // 2, size - 64 * KIB, 32 * KIB):
            harness.flip(url, path, offset)


# --- a restore that fails in the middle ---------------------------------------------------------


def test_a_step_whose_segments_are_gone_is_passed_over_before_anything_changes(
    pool: hpstore.Pool,
) -> None:
    """One of the two that a step needs: what the other holds is not written either."""
    with ckpt_of(pool) as ckpt:
        ckpt.save(1, {"w": torch.full((SIZE,), 1.0)}).result()
        ckpt.save(2, {"w": torch.full((SIZE,), 1.0), "x": torch.full((SIZE,), 2.0)}).result()
        keys = [segment.key for segment in ckpt.steps.manifest(2).segments]
        (own,) = [key for key in keys if "/step-000000000002/" in key]
        assert len(keys) == 2
        pool.delete(own)
        state = blank()
        with pytest.raises(HpstoreError, match=r"step 1 can be read.*Nothing in the state was"):
            ckpt.restore(state, step=2)
        assert not any(tensor.any() for tensor in state.values())
        assert ckpt.restore(state, strict=False) == 1
        assert ckpt.last_restore is not None
        assert (ckpt.last_restore.missing, ckpt.last_restore.half_written) == (("x",), ())
        assert not state["x"].any()


def test_what_a_damaged_step_was_read_into_is_named(
    harness: Harness, pool: hpstore.Pool, caplog: pytest.LogCaptureFixture
) -> None:
    """Damage that shows in the middle of a read: `x` is in no older step, so it is listed."""
    damage_the_end(harness, two_steps(pool))
    with ckpt_of(pool) as ckpt:
        state = blank()
        assert ckpt.restore(state, strict=False) == 1
        assert ckpt.last_restore is not None
        assert ckpt.last_restore.half_written == ("x",)
        assert torch.equal(state["w"], torch.full((SIZE,), 1.0))
        assert "such as 'x', may hold parts of a damaged later step" in caplog.text
        with pytest.raises(HpstoreError, match="2 tensors of the state, such as 'w', may hold"):
            ckpt.restore(blank(), step=2)
        with pytest.raises(CheckpointMismatch, match=r"'x'.* such as 'w', may hold parts") as said:
            ckpt.restore(blank())  # the older step, in its place, does not fit
        assert "Nothing was changed" not in str(said.value)
        ckpt.delete(1)
        with pytest.raises(CheckpointError, match=r"none of the 1 .* such as 'w', may hold parts"):
            ckpt.restore(blank())


# --- what did not fit ---------------------------------------------------------------------------


class Holder:
    """An object with a state of its own."""

    def __init__(self) -> None:
        self.seen = 3

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


class Extra(torch.nn.Linear):
    """A module with a state that is no tensor."""

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 7}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {"calls": 7}


def full_state() -> dict[str, Any]:
    """Values of every kind, all of which somebody takes."""
    net = Extra(3, 3)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, foreach=False)
    net(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return {
        "model": net,
        "optimizer": optimizer,
        "held": Holder(),
        "epoch": 3,
        "losses": [1.0, 2.0],
        "nested": {"lr": 0.5, "none": None, "pair": (1, torch.ones(2))},
        "empty": {},
        "array": np.zeros(8, np.float32)[::2],
    }


def test_values_that_did_not_fit_are_listed_beside_tensors(pool: hpstore.Pool) -> None:
    """strict=False: numbers, lists and objects with a state, wanted or recorded in vain."""
    with ckpt_of(pool) as ckpt:
        ckpt.save(1, full_state()).result()
        same = full_state()
        same["losses"] = [1.0, 2.0, 3.0]  # lists are replaced as wholes
        ckpt.restore(same)
        assert ckpt.last_restore is not None
        assert (ckpt.last_restore.missing, ckpt.last_restore.unexpected) == ((), ())
        assert same["losses"] == [1.0, 2.0]
        other = full_state()
        for name in ("held", "epoch", "losses", "optimizer"):
            del other[name]
        del other["nested"]["lr"]
        other["nested"]["more"] = "text"
        other["new"] = Holder()
        other["rate"] = 1.0
        ckpt.restore(other, strict=False)
        assert ckpt.last_restore.missing == ("nested/more", "new", "rate")
        left = ckpt.last_restore.unexpected
        assert {"epoch", "held/seen", "losses", "nested/lr"} < set(left)
        assert all(
            p.startswith("optimizer/")
            for p in set(left) - {"epoch", "held/seen", "losses", "nested/lr"}
        )
        assert "optimizer/state/weight/exp_avg" in left
        without = {**full_state(), "second": full_state()["optimizer"]}
        del without["optimizer"]
        ckpt.restore(without, strict=False)
        assert any(p.startswith("second") for p in ckpt.last_restore.missing)


# --- named tuples -------------------------------------------------------------------------------


class Point(NamedTuple):
    """Of a training's own."""

    x: int
    weights: torch.Tensor


class One(NamedTuple):
    """Of fewer fields."""

    x: int


Swapped = namedtuple("Swapped", ("weights", "x"))


def test_a_namedtuple_comes_back_as_its_class(pool: hpstore.Pool) -> None:
    """Where the state has one with the same fields; its tensors are filled where they are."""
    with ckpt_of(pool) as ckpt:
        inner = {"p": Point(3, torch.ones(4)), "list": [Point(1, torch.zeros(2))]}
        ckpt.save(1, {"at": Point(2, torch.full((3,), 5.0)), "in": inner}).result()
        mine = torch.zeros(3)
        state: dict[str, Any] = {
            "at": Point(0, mine),
            "in": {"p": Point(0, torch.zeros(4)), "list": [Point(0, torch.ones(2))]},
        }
        ckpt.restore(state)
        assert isinstance(state["at"], Point)
        assert state["at"].x == 2
        assert state["at"].weights is mine
        assert torch.equal(mine, torch.full((3,), 5.0))
        assert isinstance(state["in"]["p"], Point)
        assert isinstance(state["in"]["list"][0], Point)
        plain = ckpt.read(1).tree()["at"]
        assert isinstance(plain, tuple)
        assert plain[0] == 2
        ckpt.save(2, {"at": plain}).result()  # a value that knows its fields keeps them
        ckpt.restore(state := {"at": Point(0, torch.zeros(3))}, step=2)
        assert isinstance(state["at"], Point)


def test_a_namedtuple_of_other_fields_changes_nothing(pool: hpstore.Pool) -> None:
    """Fields in another order, or too many, would give values to the wrong names."""
    with ckpt_of(pool) as ckpt:
        ckpt.save(1, {"at": Point(2, torch.ones(3)), "z": torch.ones(2)}).result()
        for other in (Swapped(torch.zeros(3), 0), One(1)):
            state: dict[str, Any] = {"at": other, "z": torch.zeros(2)}
            with pytest.raises(CheckpointMismatch, match=r"\('x', 'weights'\) was saved"):
                ckpt.restore(state)
            assert torch.equal(state["z"], torch.zeros(2))


# --- what cannot be saved -----------------------------------------------------------------------


SPARSE: dict[str, tuple[Callable[[], Any], str]] = {
    "sparse_coo": (lambda: torch.eye(3).to_sparse(), r"\.indices\(\) and \.values\(\)"),
    "sparse_csr": (lambda: torch.eye(3).to_sparse_csr(), r"crow_indices\(\)"),
    "quantised": (
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        r"int_repr\(\)",
    ),
}


@pytest.mark.parametrize("kind", SPARSE)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tensors_that_cannot_be_saved_say_what_can(pool: hpstore.Pool, kind: str) -> None:
    """The name, the layout, the parts to save, and the dense way out."""
    make, parts = SPARSE[kind]
    with (
        ckpt_of(pool) as ckpt,
        pytest.raises(CheckpointError, match=rf"'a/b' is a {kind}.*{parts}"),
    ):
        ckpt.save(1, {"a": {"b": make()}})


LATER: dict[str, tuple[Callable[[], Any], str]] = {
    "nested": (
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        r"'a/b' is a nested tensor.*x\.unbind\(\)",
    ),
    "lazy": (lambda: torch.nn.LazyLinear(3), "'a/b/weight' is a parameter without a shape"),
    "key": (lambda: {"\ud800": 1}, r"'a/b' has the key '\\ud800'"),
    "key of a module": (lambda: torch.nn.ParameterDict({"\ud800": torch.ones(2)}), "surrogate"),
    # single.py `dtypes`: torch's own NotImplementedError, and bytes that no restore could take
    "int4": (
        lambda: torch.zeros(4, dtype=torch.uint8).view(torch.int4),  # type: ignore[attr-defined]
        r"'a/b' is a tensor of torch\.int4.*x\.view\(torch\.uint8\)",
    ),
    "quint8": (
        lambda: torch.zeros(4, dtype=torch.uint8).view(torch.quint8),
        r"'a/b' is a tensor of torch\.quint8.*x\.view\(torch\.uint8\)",
    ),
}


@pytest.mark.parametrize("kind", LATER)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_has_no_shape_or_no_name_is_refused_by_name(pool: hpstore.Pool, kind: str) -> None:
    """torch's own errors for these say nothing of where in the state they are."""
    make, says = LATER[kind]
    with ckpt_of(pool) as ckpt, pytest.raises(CheckpointError, match=says):
        ckpt.save(1, {"a": {"b": make()}})


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_has_no_shape_is_not_restored_into(pool: hpstore.Pool) -> None:
    """A lazy module that has not run, a nested tensor; the rest of the state stays."""
    with ckpt_of(pool) as ckpt:
        ckpt.save(1, {"a": torch.nn.Linear(2, 3), "z": torch.ones(2)}).result()
        ckpt.save(2, {"a": torch.ones(2), "z": torch.ones(2)}).result()
        for step, made, says in (
            (1, torch.nn.LazyLinear(3), "'a/weight' has no shape yet"),
            (2, LATER["nested"][0](), "'a' is a nested tensor"),
        ):
            state: dict[str, Any] = {"a": made, "z": torch.zeros(2)}
            with pytest.raises(CheckpointMismatch, match=says):
                ckpt.restore(state, step=step)
            assert torch.equal(state["z"], torch.zeros(2))
