"""States of other shapes than a model's: very many small tensors, a tree of Python values, mostly
frozen weights, and a large model whose weights are stand-ins of 16 bytes.

Each is a session that runs once per benchmark and takes its samples itself, hpstore and torch.save
in turn. Both make what they save durable; a load ends with the values in what the caller owns.
"""

from __future__ import annotations

import gc
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hpstore.benchmarks.checkpoint.checkpoint_ours import (
    HpstoreSaver,
    make_checkpointer,
    open_or_make,
)
from hpstore.benchmarks.checkpoint.checkpoint_peers import TorchSave
from hpstore.benchmarks.checkpoint.checkpoint_sessions import CheckpointSpec
from hpstore.benchmarks.checkpoint.checkpoint_state import FULL_BYTES, State
from hpstore.benchmarks.harness.measure import seconds
from hpstore.benchmarks.harness.sessions import Found, Sections
from hpstore.units import MIB

TINY_TENSORS, TINY_ELEMENTS = 100_000, 64
PYTHON_LEAVES, LEAVES_A_LIST = 2_000_000, 1000
FROZEN_BYTES, FROZEN_TENSORS, TRAINED = 512 * MIB, 100, 10  # tensors; how many of them change
STAND_IN_LAYERS, STAND_IN_ELEMENTS, STAND_IN_STEPS = 32, 8, 20  # of bf16
SAMPLES, WARM_SAVES = 5, 2
# Any: a tree of Python values has no shorter type
Tree = dict[str, Any]


def share_of_full(spec: CheckpointSpec) -> float:
    """How much of its full size a shape has: that of the benchmark's own state."""
    return min(1.0, spec.size_bytes / FULL_BYTES)


def tiny_tensors_session(sections: Sections, spec: CheckpointSpec) -> Found:
    """100,000 tensors of 64 elements."""
    count = max(100, int(TINY_TENSORS * share_of_full(spec)))
    state = {f"layers.{i // 100}.w{i % 100}": torch.full((TINY_ELEMENTS,), i) for i in range(count)}
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}

    def change() -> None:
        for tensor in state.values():
            tensor.add_(1)

    def check() -> None:
        if not all(torch.equal(state[name], tensor) for name, tensor in target.items()):
            raise RuntimeError("a load of small tensors gave other values than were saved")

    return {"leaves": count} | _beside_torch_save(sections, spec, state, target, change, check)


def python_leaves_session(sections: Sections, spec: CheckpointSpec) -> Found:
    """Lists of ints, floats and strings: 2 million values."""
    lists = max(2, int(PYTHON_LEAVES * share_of_full(spec)) // LEAVES_A_LIST)
    state: Tree = {f"list{n}": _values(n * LEAVES_A_LIST) for n in range(lists)}
    target: Tree = {name: [] for name in state}

    def change() -> None:
        for values in state.values():
            values[0] += 1

    def check() -> None:
        if target != state:
            raise RuntimeError("a load of Python values gave others than were saved")

    found = _beside_torch_save(sections, spec, state, target, change, check)
    return {"leaves": lists * LEAVES_A_LIST} | found


def _values(start: int) -> list[Any]:
    kinds: tuple[Callable[[int], Any], ...] = (int, float, str)
    return [kinds[i % 3](start + i) for i in range(LEAVES_A_LIST)]


class TorchTree(TorchSave):
    """torch.save of a state that has values which are no tensors."""

    @property
    def loads(self) -> dict[str, Callable[[State, int], None]]:
        def load(target: State, step: int) -> None:
            target.update(torch.load(self.path(step), weights_only=True))

        return {"torch.load": load}


def _beside_torch_save(
    sections: Sections,
    spec: CheckpointSpec,
    state: Tree,
    target: Tree,
    change: Callable[[], None],
    check: Callable[[], None],
) -> Found:
    """Stall, durable seconds and load of both, sample by sample; torch.load in its faster way."""
    directory = spec.directory / spec.contender
    tensors = isinstance(next(iter(state.values())), torch.Tensor)
    ours = HpstoreSaver(directory / "ours")
    theirs = (TorchSave if tensors else TorchTree)(directory / "theirs")
    found: defaultdict[str, list[float]] = defaultdict(list)
    ours.prepare(state)
    for step in range(1, WARM_SAVES + SAMPLES + 1):
        change()
        for name, who in (("ours", ours), ("theirs", theirs)):
            gc.collect()  # else a full collection falls into one save or another
            sections.warm(spec.copy)
            saved = who.save(state, step)
            times = []
            for load in who.loads.values():
                gc.collect()
                times.append(seconds(partial(load, target, step)))
                check()
            if step > WARM_SAVES:
                found[f"{name}_stall_seconds"].append(saved.blocked_seconds)
                found[f"{name}_durable_seconds"].append(saved.durable_seconds)
                found[f"{name}_load_seconds"].append(min(times))
    ours.close()
    return dict(found)


def frozen_session(sections: Sections, spec: CheckpointSpec) -> Found:
    """Bytes stored for saves in which nine tensors of ten are as they were, and for a first one."""
    numel = int(FROZEN_BYTES * share_of_full(spec)) // FROZEN_TENSORS // 4
    state = {f"w{n:03}": torch.randn(max(1, numel)) for n in range(FROZEN_TENSORS)}
    found: Found = {"changed_bytes": []}
    pool = open_or_make(spec.directory / spec.contender)
    with pool, make_checkpointer(pool, keep_last=2) as checkpointer:
        found["full_bytes"] = checkpointer.save(1, state).result().bytes
        for step in range(2, 2 + SAMPLES):
            for tensor in list(state.values())[:TRAINED]:
                tensor.add_(1)
            found["changed_bytes"].append(checkpointer.save(step, state).result().bytes)
    return found


def stand_ins_session(sections: Sections, spec: CheckpointSpec) -> Found:
    """What names, plan, manifest and listing cost: a 7B model with AdamW, 16 bytes a tensor."""
    state: Tree = {"model": {}, "optimizer": {}}
    for name in _names_of_7b():
        weight = torch.ones(STAND_IN_ELEMENTS, dtype=torch.bfloat16)
        state["model"][name] = weight
        state["optimizer"][name] = {
            "step": torch.tensor(1.0),
            "exp_avg": weight.clone(),
            "exp_avg_sq": weight.clone(),
        }
    found: defaultdict[str, list[float]] = defaultdict(list)
    directory = spec.directory / spec.contender
    pool = open_or_make(directory)
    with pool, make_checkpointer(pool, keep_last=STAND_IN_STEPS) as checkpointer:
        for step in range(1, STAND_IN_STEPS + 1):
            began = time.perf_counter()
            handle = checkpointer.save(step, state)
            found["stall_seconds"].append(time.perf_counter() - began)
            found["durable_seconds"].append(handle.result().durable_seconds)
    for _ in range(SAMPLES):
        _opened_anew(directory, state, found)
    return dict(found) | {"tensors": 4 * len(state["model"])}


def _names_of_7b() -> list[str]:
    parts = [f"self_attn.{name}_proj.weight" for name in "qkvo"]
    parts += [f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
    parts += ["input_layernorm.weight", "post_attention_layernorm.weight"]
    layers = [f"model.layers.{n}.{part}" for n in range(STAND_IN_LAYERS) for part in parts]
    return ["model.embed_tokens.weight", *layers, "model.norm.weight", "lm_head.weight"]


def _opened_anew(directory: Path, state: Tree, found: defaultdict[str, list[float]]) -> None:
    """What a new run does first: list the steps, restore the newest."""
    with open_or_make(directory) as pool, make_checkpointer(pool) as checkpointer:
        found["listing_seconds"].append(seconds(lambda: checkpointer.steps.list()))
        found["restore_seconds"].append(seconds(lambda: checkpointer.restore(state)))
