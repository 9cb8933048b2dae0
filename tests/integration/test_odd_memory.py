"""Tensors whose memory is not what it seems: freed, overlapping itself, or not there at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import hpstore
from hpstore.checkpoint import Checkpointer
from hpstore.errors import CheckpointError, CheckpointMismatch


def freed(*, offset: int = 0) -> torch.Tensor:
    """As FSDP leaves a parameter between two uses."""
    whole = torch.ones(200_000)
    part = whole[offset:]
    whole.untyped_storage().resize_(0)
    return part


@pytest.mark.parametrize("offset", [0, 100_000])
def test_a_freed_tensor_is_refused_where_it_ended_the_process(
    pool: hpstore.Pool, offset: int
) -> None:
    """SIGSEGV in save(), and in restore() into one; of a view the pointer is not even null."""
    size = 200_000 - offset
    with Checkpointer(pool, "run", rng=False) as ckpt:
        with pytest.raises(CheckpointError, match="'a/b' is a tensor whose storage was freed"):
            ckpt.save(1, {"a": {"b": freed(offset=offset)}})
        ckpt.save(1, {"a": {"b": torch.ones(size)}}).result()
        with pytest.raises(CheckpointMismatch, match="'a/b' is a tensor whose storage was freed"):
            ckpt.restore({"a": {"b": freed(offset=offset)}})
        model = torch.nn.Linear(2, 2)
        model.weight.untyped_storage().resize_(0)
        with pytest.raises(CheckpointError, match="'m/weight' is a tensor whose storage was"):
            ckpt.save(2, {"m": model})
        good = torch.nn.Linear(2, 2)
        ckpt.save(2, {"m": good}).result()
        with pytest.raises(CheckpointMismatch, match="'m/weight' is a tensor whose storage was"):
            ckpt.restore({"m": model})
        model.weight.untyped_storage().resize_(16)
        ckpt.restore({"m": model})
        assert torch.equal(model.weight, good.weight)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (freed, "'x/n' is a tensor whose storage was freed"),
        (lambda: torch.ones(3, device="meta"), "'x/n' is a meta tensor"),
        (lambda: torch.empty(0, device="meta"), "'x/n' is a meta tensor"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "'x/n' is a nested"),
        (lambda: torch.eye(3).to_sparse_csr(), "'x/n' is a sparse_csr tensor"),
        (lambda: torch.eye(3).to_sparse(), "'x/n' is a sparse_coo tensor"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "a quantised"),
    ],
    ids=["freed", "meta", "empty", "nested", "csr", "coo", "quantised"],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_one_odd_tensor_among_many_is_refused_by_its_name(
    pool: hpstore.Pool, make: Callable[[], torch.Tensor], said: str
) -> None:
    """All tensors are looked at together, and in a state whose like was saved before, too."""
    plain = {f"t{n}": torch.ones(3) for n in range(5)}
    with Checkpointer(pool, "run", rng=False) as ckpt:
        ckpt.save(1, {"x": {**plain, "n": torch.ones(3)}}).result()
        with pytest.raises(CheckpointError, match=said):
            ckpt.save(2, {"x": {**plain, "n": make()}})


def test_a_steady_save_asks_each_tensor_for_its_address_once(
    pool: hpstore.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look for freed ones and the look for shared memory asked it twice: 10,000 tensors made
    the stall longer."""
    state = {f"t{n}": torch.ones(3) for n in range(5)}
    asked: list[torch.Tensor] = []
    ask = torch.Tensor.data_ptr

    def count(tensor: torch.Tensor) -> int:
        asked.append(tensor)
        return ask(tensor)

    with Checkpointer(pool, "run", rng=False) as ckpt:
        ckpt.save(1, state).result()
        monkeypatch.setattr(torch.Tensor, "data_ptr", count)
        ckpt.save(2, state).result()
    assert [id(tensor) for tensor in asked] == [id(tensor) for tensor in state.values()]


def test_an_array_under_the_path_of_a_tensor_is_refused(pool: hpstore.Pool) -> None:
    """One took the place of the other, and both were restored from it."""
    state = {"a/b": torch.zeros(2), "a": {"b": np.ones(2, np.float32)}}
    said = "two tensors have the path 'a/b'"
    with (
        Checkpointer(pool, "run", rng=False) as ckpt,
        pytest.raises(CheckpointError, match=said),
    ):
        ckpt.save(1, state)


def test_an_empty_tensor_is_not_a_freed_one(pool: hpstore.Pool) -> None:
    """Its pointer is null, too."""
    state = {"a": torch.empty(0), "b": torch.empty(3, 0), "c": torch.ones(4)[2:2]}
    with Checkpointer(pool, "run", rng=False) as ckpt:
        ckpt.save(1, state).result()
        assert ckpt.restore(state) == 1


@pytest.mark.parametrize(
    ("shape", "strides"), [((3, 3), (1, 1)), ((2, 5), (2, 1)), ((4,), (0,)), ((2, 2, 2), (3, 1, 1))]
)
def test_windows_over_one_memory_cannot_be_filled(
    pool: hpstore.Pool, shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    """They held the values that were written last, and the restore had succeeded."""
    target = torch.zeros(40).as_strided(shape, strides)
    with Checkpointer(pool, "run", rng=False) as ckpt:
        ckpt.save(1, {"x": torch.rand(shape)}).result()
        with pytest.raises(CheckpointMismatch, match=r"'x' .* one place in memory. Give its clone"):
            ckpt.restore({"x": target})
        assert not target.any()


@pytest.mark.parametrize(
    ("shape", "strides"), [((4, 3), (1, 4)), ((2, 2), (3, 2)), ((3, 2), (10, 3)), ((1, 5), (0, 2))]
)
def test_strides_that_do_not_clash_are_filled(
    pool: hpstore.Pool, shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    """Transposed, with gaps, interleaved."""
    target, wanted = torch.zeros(40).as_strided(shape, strides), torch.rand(shape)
    with Checkpointer(pool, "run", rng=False) as ckpt:
        ckpt.save(1, {"x": wanted}).result()
        ckpt.restore({"x": target})
    assert torch.equal(target, wanted)


def test_a_fake_tensor_is_refused_by_name(pool: hpstore.Pool) -> None:
    """It was an AssertionError of torch's, in the middle of the copies."""
    with FakeTensorMode():
        fake = torch.ones(3)
    with Checkpointer(pool, "run") as ckpt:
        with pytest.raises(CheckpointError, match="'x' is a fake tensor: it holds no values"):
            ckpt.save(1, {"x": fake})
        with pytest.raises(CheckpointError, match="'x' is a meta tensor: it holds no values"):
            ckpt.save(1, {"x": torch.ones(3, device="meta")})


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (1 << 20_000, r"a number of 20001 bits, and a checkpoint holds up to 14000.*to_bytes"),
        ("\ud800", r"half a surrogate pair, which has no UTF-8.*surrogatepass"),
        (type("Inner", (), {"state_dict": dict})(), r"Inner, which is asked for no state there"),
    ],
    ids=["number", "text", "object"],
)
def test_what_cannot_be_saved_is_said_with_what_can(
    pool: hpstore.Pool, value: Any, said: str
) -> None:
    with Checkpointer(pool, "run") as ckpt, pytest.raises(CheckpointError, match=said):
        ckpt.save(1, {"x": [value]})


def test_a_name_that_is_empty_is_not_missing(pool: hpstore.Pool) -> None:
    """A warning listed it as wanted and not recorded, though it was loaded."""
    target = {"": {"": torch.zeros(1)}, "a": {"": torch.zeros(1)}}
    with Checkpointer(pool, "run", rng=False) as ckpt:
        ckpt.save(1, {"": {"": torch.ones(1)}, "a": {"": torch.ones(1)}}).result()
        ckpt.restore(target)
        assert ckpt.last_restore is not None
        assert ckpt.last_restore.missing == ()
    assert target[""][""] == target["a"][""] == 1


def test_a_default_device_of_the_script_is_none_of_ours(pool: hpstore.Pool) -> None:
    """torch.set_default_device("cuda") is common; "meta" shows what it does: tensors without values
    came back from read(), and staging on the host went to the device."""
    state = {"x": torch.rand(300_000), "few": torch.rand(3), "none": torch.empty(0)}
    wanted = {name: value.clone() for name, value in state.items()}
    with Checkpointer(pool, "run", rng=False) as ckpt, torch.device("meta"):
        ckpt.save(1, state).result()
        found = ckpt.read(1).tree()
        loaded = ckpt.load(1)
        for value in state.values():
            value.zero_()
        ckpt.restore(state, 1)
    for name, value in wanted.items():
        assert found[name].device.type == loaded[name].device.type == "cpu"
        assert torch.equal(found[name], value)
        assert torch.equal(state[name], value)


def test_a_read_only_array_cannot_be_filled(pool: hpstore.Pool) -> None:
    """It was numpy's error, after other parts of the state had been filled."""
    target: dict[str, Any] = {"a": torch.zeros(2), "b": np.frombuffer(bytes(8), np.uint8)}
    with Checkpointer(pool, "run", rng=False) as ckpt:
        ckpt.save(1, {"a": torch.ones(2), "b": np.arange(8, dtype=np.uint8)}).result()
        with pytest.raises(CheckpointMismatch, match=r"'b' is a read-only array. Give its copy"):
            ckpt.restore(target)
    assert not target["a"].any()
