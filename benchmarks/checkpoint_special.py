"""Checkpoint figures that have no peer: many small tensors, memory over many saves, partial reads,
what a save in the background costs the training beside it, staging that overlaps with it.

Each is a session. What this version of hpstore cannot do yet is skipped, with the reason.
"""

from __future__ import annotations

import gc
import math
import time
from pathlib import Path
from typing import Any

import torch

from hpstore.benchmarks.checkpoint_ours import (
    Copy,
    accepts,
    make_checkpointer,
    open_or_make,
)
from hpstore.benchmarks.checkpoint_sessions import Spec, resident_bytes
from hpstore.benchmarks.checkpoint_state import FULL_BYTES, Content, State, empty_state, map_state
from hpstore.benchmarks.sessions import Found, Sections
from hpstore.checkpoint import Checkpointer, SaveHandle
from hpstore.units import KIB, MIB

MANY_TENSORS, SMALL_TENSOR_BYTES = 10_000, 4 * KIB
GROWTH_SAVES, GROWTH_WARM, GROWTH_STATE_BYTES = 50, 10, 16 * MIB
SLICE_BYTES, SLICED_TENSOR_BYTES = 4 * MIB, 32 * MIB
BACKGROUNDS = ("fast", "gentle")
_STEP_SECONDS = 0.07  # of the training that is disturbed
_QUIET_STEPS = 40


def skipped(reason: str) -> Found:
    """A figure that cannot be had."""
    return {"skipped": reason}


def many_small_session(sections: Sections, spec: Spec) -> Found:
    """Durable seconds of 10,000 tensors of 4 KiB, and of the same bytes in ten."""
    flat = torch.arange(MANY_TENSORS * SMALL_TENSOR_BYTES // 4, dtype=torch.int32)
    states: dict[str, State] = {
        "many": {f"t{i}": t.clone() for i, t in enumerate(flat.view(MANY_TENSORS, -1))},
        "few": {f"t{i}": t.clone() for i, t in enumerate(flat.view(10, -1))},
    }
    found: Found = {}
    for name, state in states.items():
        pool = open_or_make(spec.directory / spec.contender / name)
        with pool, make_checkpointer(pool, keep_last=2, example=state) as checkpointer:
            for step in range(1, 6):
                for tensor in state.values():
                    tensor.add_(1)  # all of it: nothing may be taken from the save before
                checkpointer.wait()
                began = time.perf_counter()
                checkpointer.save(step, state).result()
                found[f"{name}_seconds"] = time.perf_counter() - began
    return found


def growth_session(sections: Sections, spec: Spec) -> Found:
    """Resident bytes gained between the tenth and the fiftieth save of a small state."""
    content, state = Content(), empty_state(min(GROWTH_STATE_BYTES, spec.size_bytes))
    content.fill(state, 0)
    pool = open_or_make(spec.directory / spec.contender)
    before = 0
    with pool, make_checkpointer(pool, keep_last=2, example=state) as checkpointer:
        for step in range(1, GROWTH_SAVES + 1):
            content.fill(state, step)
            checkpointer.save(step, state).result()
            if step == GROWTH_WARM:
                gc.collect()
                before = resident_bytes()
        gc.collect()
        return {"growth_bytes": resident_bytes() - before}


def bytes_read_so_far() -> int:
    """What this process has read from block devices; page cache hits do not count."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    return 0


def slice_session(sections: Sections, spec: Spec) -> Found:
    """Bytes read from the devices for 4 MiB out of a tensor of 32 MiB."""
    columns = SLICE_BYTES // 4 // 4
    whole = torch.arange(SLICED_TENSOR_BYTES // 4, dtype=torch.int32).view(-1, columns)
    state = {"other": torch.zeros(MIB), "sliced": whole, "more": torch.ones(MIB)}
    rows = (8, 8 + SLICE_BYTES // 4 // columns)
    pool = open_or_make(spec.directory / spec.contender)
    with pool, make_checkpointer(pool) as checkpointer:
        checkpointer.save(1, state).result()
        checkpointer.wait()
    with open_or_make(spec.directory / spec.contender) as pool, make_checkpointer(pool) as again:
        again.manifest(1)  # not what is measured: the manifest is read once
        before = bytes_read_so_far()
        got = again.open(1)["sliced"][rows[0] : rows[1]]
        found = bytes_read_so_far() - before
        if not torch.equal(got, whole[slice(*rows)]):
            raise RuntimeError("a slice holds other values than were saved")
    if not found:
        return skipped("the kernel counts no reads from this filesystem")
    return {"read_bytes": found}


class Training:
    """A small MLP trained on the CPU by two threads; the batch makes a step `seconds` long."""

    def __init__(self, width: int, layers: int, seconds: float) -> None:
        torch.manual_seed(0)
        torch.set_num_threads(2)
        blocks: list[torch.nn.Module] = []
        for _ in range(layers):
            blocks += [torch.nn.Linear(width, width), torch.nn.ReLU()]
        self.model = torch.nn.Sequential(*blocks)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self._batch = torch.randn(64, width)
        for _ in range(2):  # the second time from a step that is nearly right
            once = min(self.step() for _ in range(4))
            rows = max(64, int(len(self._batch) * seconds / once))
            self._batch = torch.randn(rows, width)
        self.step()

    def step(self) -> float:
        """Seconds of one step."""
        began = time.perf_counter()
        self.model(self._batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - began


def disturbance_session(sections: Sections, spec: Spec) -> Found:
    """Mean step seconds beside a save of the whole state, and without, for each background.

    Steps are those between the return of save() and its result; the stall is not among them.
    """
    content, state = Content(), map_state(spec.state, spec.size_bytes)
    training = Training(1024, 4, _STEP_SECONDS)
    modes = BACKGROUNDS if accepts(Checkpointer, "background") else ("default",)
    found: Found = {}
    for mode in modes:
        pool = open_or_make(spec.directory / spec.contender / mode)
        with pool, make_checkpointer(
            pool, keep_last=1, example=state, background=mode
        ) as checkpointer:  # fmt: skip
            for step in range(1, 4):
                sections.warm(spec.copies)
                checkpointer.save(step, state).result()
                content.fill(state, step)
            checkpointer.wait()
            checkpointer.forget_interval()  # these came faster than any training saves
            quiet = [training.step() for _ in range(_QUIET_STEPS)]
            disturbed = _steps_during(training, checkpointer.save(4, state))
            quiet += [training.step() for _ in range(_QUIET_STEPS)]
        found[mode] = {
            "quiet_seconds": sum(quiet) / len(quiet),
            "disturbed_seconds": sum(disturbed) / len(disturbed),
            "steps": len(disturbed),
            "lost_seconds": sum(disturbed) - len(disturbed) * sum(quiet) / len(quiet),
        }
    return found


def _steps_during(training: Training, handle: SaveHandle) -> list[float]:
    """Steps that ran while a save was under way; at least one."""
    steps = [training.step()]
    while not handle.done():
        steps.append(training.step())
    handle.result()
    return steps


def overlap_session(sections: Sections, spec: Spec) -> Found:
    """What a save with staging="overlap" holds a training up, and one copy of its state."""
    if not accepts(Checkpointer, "staging"):
        return skipped('Checkpointer takes no staging="overlap" yet')
    width = max(256, round(2048 * math.sqrt(min(1.0, spec.size_bytes / FULL_BYTES))))
    training = Training(width, 32, 0.0)  # 134 million parameters and their moments: 1.6 GB
    state: dict[str, Any] = {"model": training.model, "optimizer": training.optimizer}
    tensors = {"model": training.model.state_dict(), "optimizer": _moments(training.optimizer)}
    copy = Copy(tensors).seconds()
    pool = open_or_make(spec.directory / spec.contender)
    visible = 0.0
    with pool, make_checkpointer(pool, keep_last=1, staging="overlap") as checkpointer:
        for step in range(1, 5):
            began = time.perf_counter()
            handle = checkpointer.save(step, state)
            visible = time.perf_counter() - began
            training.step()
            if not hasattr(handle, "visible_stall_seconds"):
                return skipped("a save's handle has no visible_stall_seconds yet")
            visible = max(visible, float(handle.visible_stall_seconds))
            handle.result()
    return {"visible_seconds": visible, "copy_seconds": copy}


def _moments(optimizer: torch.optim.Optimizer) -> State:
    """The optimizer's tensors, nested by number and name."""
    return {
        str(number): {k: v for k, v in values.items() if isinstance(v, torch.Tensor)}
        for number, values in enumerate(optimizer.state.values())
    }


__all__ = ["disturbance_session", "growth_session", "many_small_session", "overlap_session",
           "slice_session"]  # fmt: skip
