"""The state that checkpoint benchmarks save: a Llama-like model with Adam, 110 parameters.

bf16 weights, two fp32 moments and a 0-d step for each: 440 tensors of nearly incompressible bytes,
1.62 GB (1.51 GiB) at full size. A smaller size narrows every matrix and keeps all 440.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from hpstore.units import MIB, round_up

# Any: nested dicts of tensors, as a state_dict() is
State = dict[str, Any]

FULL_BYTES = 1_622_000_000
_WIDTH, _HIDDEN, _WORDS, _LAYERS = 768, 2048, 50304, 12
NOISE_WORDS = 16 * MIB // 4
_SHARED_ALIGNMENT = 64  # as the allocator's


def shapes(size_bytes: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters of a model whose state has about `size_bytes`. Pure."""
    factor = math.sqrt(min(1.0, size_bytes / FULL_BYTES))

    def scaled(size: int) -> int:
        return max(8, round(size * factor / 8) * 8)

    width, hidden, words = scaled(_WIDTH), scaled(_HIDDEN), scaled(_WORDS)
    found: dict[str, tuple[int, ...]] = {
        "embed.weight": (words, width),
        "head.weight": (words, width),
    }
    for layer in range(_LAYERS):
        at = f"layers.{layer}."
        found |= {f"{at}attn.{name}.weight": (width, width) for name in "qkvo"}
        found[f"{at}mlp.gate.weight"] = found[f"{at}mlp.up.weight"] = (hidden, width)
        found[f"{at}mlp.down.weight"] = (width, hidden)
        found[f"{at}norm1.weight"] = found[f"{at}norm2.weight"] = (width,)
    return found


def _build(size_bytes: int, make: Callable[[tuple[int, ...], torch.dtype], torch.Tensor]) -> State:
    wanted = shapes(size_bytes)
    return {
        "model": {name: make(shape, torch.bfloat16) for name, shape in wanted.items()},
        "optimizer": {
            name: {
                "step": make((), torch.float32),
                "exp_avg": make(shape, torch.float32),
                "exp_avg_sq": make(shape, torch.float32),
            }
            for name, shape in wanted.items()
        },
    }


def empty_state(size_bytes: int) -> State:
    """The state with zeros in it, every page touched: what a freshly built model owns."""
    return _build(size_bytes, lambda shape, dtype: torch.empty(shape, dtype=dtype).zero_())


def map_state(path: str, size_bytes: int) -> State:
    """The state in a SharedState's memory; every tensor has a storage of its own.

    The pages are mapped at once, so that no save or load pays for that.
    """
    with open(path, "r+b") as file:
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        memory = mmap.mmap(file.fileno(), _shared_bytes(size_bytes), flags=flags)
    at = 0

    def place(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        nonlocal at
        count, start = math.prod(shape), at
        at = round_up(at + count * dtype.itemsize, _SHARED_ALIGNMENT)
        return torch.frombuffer(memory, dtype=dtype, count=count, offset=start).view(shape)

    return _build(size_bytes, place)


def _shared_bytes(size_bytes: int) -> int:
    return sum(
        round_up(math.prod(shape) * itemsize, _SHARED_ALIGNMENT)
        for shape in shapes(size_bytes).values()
        for itemsize in (2, 4, 4)
    ) + _SHARED_ALIGNMENT * len(shapes(size_bytes))


class SharedState:
    """Memory for a state that outlives the sessions that use it, and so never turns cold."""

    def __init__(self, name: str, size_bytes: int) -> None:
        self._fd = os.memfd_create(name)
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"
        os.ftruncate(self._fd, _shared_bytes(size_bytes))

    def close(self) -> None:
        """Give it up."""
        os.close(self._fd)


def leaves(state: State, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors with their paths, in order."""
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            yield prefix + name, value
        else:
            yield from leaves(value, f"{prefix}{name}/")


def flat(state: State) -> dict[str, torch.Tensor]:
    """Tensors by path, for formats that know no nesting."""
    return dict(leaves(state))


def state_bytes(state: State) -> int:
    """Bytes in all tensors."""
    return sum(tensor.nbytes for _, tensor in leaves(state))


class TensorContents:
    """What the tensors hold: slices of one noise, others for every step, and the number of the step
    in every 0-d tensor. So nothing of a save can be taken from the one before.

    Numbers are finite as fp32 and as bf16. Other values than noise: `values`, fp32, NOISE_WORDS of
    them.
    """

    def __init__(self, values: torch.Tensor | None = None) -> None:
        if values is None:
            noise = np.random.default_rng(0).integers(0, 2**30, NOISE_WORDS, np.int32)
            words = torch.from_numpy(noise & 0x3FFF3FFF | 0x20002000)
            self._words = {torch.bfloat16: words, torch.float32: words}
        else:
            halves = values.bfloat16().repeat(2)
            self._words = {t.dtype: t.view(torch.int32) for t in (values, halves)}

    def fill(self, state: State, step: int) -> None:
        """Write the values of `step` into every tensor."""
        for words, noise in self._pieces(state, step):
            words.copy_(noise)
        for _, tensor in leaves(state):
            if not tensor.dim():
                tensor.fill_(step)

    def check(self, state: State, step: int, whose: str) -> None:
        """Compare every byte with what fill() wrote. Raises RuntimeError naming the contender."""
        equal = all(torch.equal(words, noise) for words, noise in self._pieces(state, step))
        steps = all(float(tensor) == step for _, tensor in leaves(state) if not tensor.dim())
        if not equal or not steps:
            raise RuntimeError(f"{whose} loaded other values than were saved as step {step}")

    def _pieces(self, state: State, step: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        start = 15_485_863 * step % (NOISE_WORDS // 2)
        for _, tensor in leaves(state):
            if not tensor.dim():
                continue
            words, noise = tensor.view(-1).view(torch.int32), self._words[tensor.dtype]
            at = 0
            while at < len(words):
                start = (start + 104_729) % (NOISE_WORDS // 2)
                count = min(len(words) - at, NOISE_WORDS // 2)
                yield words[at : at + count], noise[start : start + count]
                at += count
