"""Sources of random numbers as JSON: generators of torch, numpy and Python, by their state. Pure.

States are inline, a few kB each: they must be there when a value is made, before tensors are read.
"""

from __future__ import annotations

import base64
import random
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from hpstore.errors import CheckpointError

# Any below: states of generators, and JSON
_BITS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")  # numpy's bit generators
TORCH, PYTHON, NUMPY, LEGACY = "torch generator", "random", "numpy generator", "random state"
SOURCES = (TORCH, PYTHON, NUMPY, LEGACY)


def kind_of(value: Any) -> str | None:
    """The kind of a source that can be saved; None for all else."""
    if isinstance(value, torch.Generator):
        return TORCH
    if type(value) is random.Random:
        return PYTHON
    if "numpy.random" in sys.modules:
        if type(value) is np.random.RandomState:
            return LEGACY
        if type(value) is np.random.Generator and type(value.bit_generator).__name__ in _BITS:
            return NUMPY
    return None


def encode_source(value: Any) -> dict[str, Any] | None:
    """JSON of a source, without the tag; None for what is none."""
    kind = kind_of(value)
    if kind == TORCH:
        raw = value.get_state().numpy().tobytes()
        return {"v": base64.b64encode(raw).decode(), "device": str(value.device)}
    if kind == PYTHON:
        return {"v": value.getstate()}
    if kind == NUMPY:
        return {"v": _json(value.bit_generator.state)}
    return {"v": _json(value.get_state(legacy=False))} if kind == LEGACY else None


def decode_source(kind: str, node: Mapping[str, Any]) -> Any:
    """Inverse of encode_source. Raises ValueError, TypeError, KeyError, RuntimeError."""
    state = node["v"]
    made: Any
    if kind == TORCH:
        made = _generator(node["device"])
        raw = bytearray(base64.b64decode(state))
        try:
            made.set_state(torch.frombuffer(raw, dtype=torch.uint8))
        except RuntimeError as error:
            raise ValueError(f"no state of a generator: {error}") from error
    elif kind == PYTHON:
        version, words, gauss = state
        made = random.Random()
        made.setstate((version, tuple(words), gauss))
    else:
        state = _value(state)
        if state["bit_generator"] not in _BITS:
            raise ValueError(f"no bit generator of numpy is called {state['bit_generator']!r}")
        if kind == NUMPY:
            made = np.random.Generator(getattr(np.random, state["bit_generator"])())
            made.bit_generator.state = state
        else:
            made = np.random.RandomState()
            made.set_state(state)
    return made


def _generator(device: str) -> torch.Generator:
    try:
        return torch.Generator(device)
    except RuntimeError as error:
        raise CheckpointError(
            f"the checkpoint holds a random generator of {device}, which cannot be made here: "
            f"{error}. Nothing was changed."
        ) from error


def can_continue(target: Any, saved: Any) -> bool:
    """Whether both are sources of one kind, on one kind of device, of one algorithm."""
    kind = kind_of(saved)
    if kind is None or kind_of(target) != kind:
        return False
    if kind == TORCH:
        return bool(target.device.type == saved.device.type)
    return kind != NUMPY or type(target.bit_generator) is type(saved.bit_generator)


def continue_source(target: Any, saved: Any) -> None:
    """Let `target` go on from where `saved` stands. Both are sources of one kind."""
    kind = kind_of(saved)
    if kind == TORCH:
        target.set_state(saved.get_state())
    elif kind == PYTHON:
        target.setstate(saved.getstate())
    elif kind == NUMPY:
        target.bit_generator.state = saved.bit_generator.state
    else:
        target.set_state(saved.get_state(legacy=False))


def _json(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: _json(part) for name, part in state.items()}
    if isinstance(state, np.ndarray):
        return {"dtype": state.dtype.str, "hex": state.tobytes().hex()}
    return state.item() if isinstance(state, np.generic) else state


def _value(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    if node.keys() == {"dtype", "hex"}:
        dtype = np.dtype(node["dtype"])
        if dtype.kind not in "biuf":
            raise ValueError(f"no random state has numbers of type {dtype}")
        return np.frombuffer(bytes.fromhex(node["hex"]), dtype)
    return {name: _value(part) for name, part in node.items()}
