"""What goes from process to process arrives as it was, in memory of the receiver's own."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpstore.loaders import Ragged
from hpstore.loaders.batching.worker_channel import UNSENDABLE, WorkerChannel

DTYPES = (torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float32, torch.complex64)


@pytest.fixture
def ends() -> Iterator[tuple[WorkerChannel, WorkerChannel, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        yield WorkerChannel(one.fileno()), WorkerChannel(other.fileno()), one


def through(sender: WorkerChannel, receiver: WorkerChannel, value: Any) -> Any:
    thread = threading.Thread(target=sender.send, args=(value,))
    thread.start()
    try:
        return receiver.receive()
    finally:
        thread.join()


def test_values_arrive_as_they_were(ends: tuple[WorkerChannel, WorkerChannel, Any]) -> None:
    """Large and small, of every kind that a batch has, with gaps between rows, empty."""
    rng = np.random.default_rng(0)
    for dtype in DTYPES:
        for shape in ((), (0, 3), (5,), (300, 400), (2, 3, 20_000)):
            value = torch.from_numpy(rng.integers(0, 2, shape)).to(dtype)
            for one in (
                value,
                value.transpose(0, -1) if shape else value,
                value[..., None][..., 0],
            ):
                found = through(*ends[:2], one)
                assert (found.dtype, found.shape) == (one.dtype, one.shape)
                assert torch.equal(found, one)
                found.fill_(1)  # it can be written
    array = rng.random((500, 70))[:, ::2]
    assert np.array_equal(through(*ends[:2], array), array)
    values = Ragged(torch.arange(40_000), torch.tensor([0, 7, 40_000]))
    found = through(*ends[:2], {"a": [values], "b": ("text", b"bytes", None)})
    assert torch.equal(found["a"][0].values, values.values)
    assert torch.equal(found["a"][0].offsets, values.offsets)
    assert found["b"] == ("text", b"bytes", None)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_is_no_plain_tensor_goes_as_torch_has_it(
    ends: tuple[WorkerChannel, WorkerChannel, Any],
) -> None:
    """Gradients wanted, parameters, sparse, conjugated, nested."""
    wanted = torch.ones(3, requires_grad=True)
    assert through(*ends[:2], wanted).requires_grad
    assert isinstance(through(*ends[:2], torch.nn.Parameter(torch.ones(3))), torch.nn.Parameter)
    sparse = torch.eye(4).to_sparse()
    assert torch.equal(through(*ends[:2], sparse).to_dense(), torch.eye(4))
    turned = torch.tensor([1 + 2j, 3 - 1j]).conj()
    assert torch.equal(through(*ends[:2], turned), turned)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    assert through(*ends[:2], nested).is_nested


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 70_000), max_size=30), st.integers(1, 4000))
def test_any_number_of_arrays_in_pieces_of_any_size(sizes: list[int], room: int) -> None:
    """However little the system takes at a time; more arrays than it takes in one call."""
    one, other = socket.socketpair()
    with one, other:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, room)
        arrays = [np.full(size, number % 256, np.uint8) for number, size in enumerate(sizes)]
        found = through(WorkerChannel(one.fileno()), WorkerChannel(other.fileno()), arrays)
        assert [a.tobytes() for a in found] == [a.tobytes() for a in arrays]


def test_more_arrays_than_one_call_takes(ends: tuple[WorkerChannel, WorkerChannel, Any]) -> None:
    arrays = [np.full(20_000, number % 256, np.uint8) for number in range(1300)]
    found = through(*ends[:2], arrays)
    assert [int(a[0]) for a in found] == [n % 256 for n in range(1300)]
    assert all((a == a[0]).all() for a in found)


def test_ends_are_told(ends: tuple[WorkerChannel, WorkerChannel, socket.socket]) -> None:
    """Stopped, gone within a value; nothing is sent of what does not pickle."""
    one, other, held = ends
    with pytest.raises(UNSENDABLE):
        one.send([np.zeros(100_000), lambda: None])
    assert through(one, other, 7) == 7
    one.stop()
    with pytest.raises(EOFError):
        other.receive()
    os.write(held.fileno(), b"\x01")
    held.shutdown(socket.SHUT_WR)
    with pytest.raises(EOFError):
        other.receive()
