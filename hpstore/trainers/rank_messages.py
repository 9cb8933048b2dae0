"""What ranks of a job send each other: small nested values as JSON, never pickle, and errors."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from hpstore.checkpoint.ranks.collectives import RankChannel, Ranks
from hpstore.checkpoint.state.scalars import dtype_name, dtype_named
from hpstore.checkpoint.state.state_tree import CollectedTensors, Decoding, decode_tree, encode_tree
from hpstore.errors import CheckpointError
from hpstore.format.untrusted_bytes import parsing

T = TypeVar("T")


def to_bytes(value: Any) -> bytes:  # Any: whatever a checkpoint may hold
    """Small values with tensors on the CPU. Raises CheckpointError naming what cannot be sent."""
    found = CollectedTensors()
    tree = encode_tree(value, "state", found)
    tensors = {
        name: [dtype_name(tensor.dtype), list(tensor.shape), _text(tensor)]
        for name, tensor in found.tensors.items()
    }
    return json.dumps([tree, tensors]).encode()


def _text(tensor: torch.Tensor) -> str:
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return base64.b64encode(flat.numpy().tobytes()).decode()


def of_bytes(data: bytes) -> Any:  # Any: as above
    """Inverse of to_bytes; the tensors are the caller's own. Raises IntegrityError."""
    with parsing("a message of another rank"):
        tree, tensors = json.loads(data)

    def tensor(name: str) -> torch.Tensor:
        dtype, shape, text = tensors[name]
        raw = bytearray(base64.b64decode(text))
        flat = (
            torch.frombuffer(raw, dtype=torch.uint8)
            if raw
            else torch.empty(0, dtype=torch.uint8, device="cpu")
        )
        try:
            return flat.view(dtype_named(dtype)).view(shape)
        except RuntimeError as error:  # torch's for sizes that do not fit
            raise ValueError(str(error)) from error

    return decode_tree(tree, Decoding(tensor=tensor))


def agreed(ranks: Ranks, action: Callable[[], T]) -> T:
    """Run what every rank does, here. Collective: raised on all when it fails on one."""
    error: Exception | None = None
    try:
        found = action()
    except Exception as failed:  # noqa: BLE001 (sent to the other ranks, then raised)
        error = failed
    said = "" if error is None else f"{type(error).__name__}: {error}"
    votes = ranks.all_gather(said.encode(), RankChannel.TRAINER)
    if error is not None:
        raise error
    others = [f"rank {n}: {vote.decode()}" for n, vote in enumerate(votes) if vote]
    if others:
        raise CheckpointError("; ".join(others))
    return found
