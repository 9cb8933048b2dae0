"""Checkpoint figures that have no peer: many small tensors, memory over many saves, partial reads,
what a save in the background costs the training beside it, staging that overlaps with it.

Each is a session that runs once per benchmark and takes its samples itself, interleaved: no figures
are compared across sessions here. What this version of hpstore cannot do yet is skipped, with the
reason.
"""

from __future__ import annotations

import gc
import math
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hpstore.benchmarks.checkpoint.checkpoint_ours import Copy, make_checkpointer, open_or_make
from hpstore.benchmarks.checkpoint.checkpoint_sessions import CheckpointSpec
from hpstore.benchmarks.checkpoint.checkpoint_state import (
    FULL_BYTES,
    State,
    TensorContents,
    empty_state,
    leaves,
    map_state,
    state_bytes,
)
from hpstore.benchmarks.harness.memory_use import resident_bytes
from hpstore.benchmarks.harness.sessions import Found, Sections
from hpstore.checkpoint import Checkpointer, SaveHandle, SaveOptions
from hpstore.units import KIB, MIB

MANY_TENSORS, SMALL_TENSOR_BYTES = 10_000, 4 * KIB
GROWTH_SAVES, GROWTH_WARM, GROWTH_STATE_BYTES = 50, 10, 16 * MIB
SLICE_BYTES, SLICED_TENSOR_BYTES = 4 * MIB, 32 * MIB
WARM_SAVES, SAMPLES = 2, 5
PACES = {"fast": (3, 1.0), "gentle": (5, 0.25)}  # samples, and how much of the state
_STEP_SECONDS = 0.07  # of the training that is disturbed
_QUIET_STEPS = 50


def skipped(reason: str) -> Found:
    """A figure that cannot be had."""
    return {"skipped": reason}


def many_small_session(sections: Sections, spec: CheckpointSpec) -> Found:
    """Durable seconds of 10,000 tensors of 4 KiB, and of the same bytes in ten, save by save."""
    flat = torch.arange(MANY_TENSORS * SMALL_TENSOR_BYTES // 4, dtype=torch.int32)
    found: dict[str, list[float]] = {"many_seconds": [], "few_seconds": []}
    with ExitStack() as stack:
        savers: dict[str, tuple[State, Checkpointer]] = {}
        for name, rows in (("many", MANY_TENSORS), ("few", 10)):
            state = {f"t{i}": t.clone() for i, t in enumerate(flat.view(rows, -1))}
            pool = stack.enter_context(open_or_make(spec.directory / spec.contender / name))
            checkpointer = make_checkpointer(pool, keep_last=2, example=state)
            savers[name] = state, stack.enter_context(checkpointer)
        for step in range(1, WARM_SAVES + SAMPLES + 1):
            for name, (state, checkpointer) in savers.items():
                for tensor in state.values():
                    tensor.add_(1)  # all of it: nothing may be taken from the save before
                checkpointer.wait()
                began = time.perf_counter()
                checkpointer.save(step, state).result()
                if step > WARM_SAVES:
                    found[f"{name}_seconds"].append(time.perf_counter() - began)
    return found


def growth_session(sections: Sections, spec: CheckpointSpec) -> Found:
    """Resident bytes gained between the tenth and the fiftieth save of a small state."""
    content, state = TensorContents(), empty_state(min(GROWTH_STATE_BYTES, spec.size_bytes))
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
    for line in Path("/proc/self/io").read_text(encoding="utf-8").splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    return 0


def slice_session(sections: Sections, spec: CheckpointSpec) -> Found:
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
        again.steps.manifest(1)  # not what is measured: the manifest is read once
        before = bytes_read_so_far()
        got = again.read(1)["sliced"][rows[0] : rows[1]]
        found = bytes_read_so_far() - before
        if not torch.equal(got, whole[slice(*rows)]):
            raise RuntimeError("a slice holds other values than were saved")
    if not found:
        return skipped("the kernel counts no reads from this filesystem")
    return {"read_bytes": found}


class Training:
    """A small MLP trained on the CPU by two threads; the batch makes a step `seconds` long.

    Without `seconds` the batch has 64 rows. One step has been taken: there are moments.
    """

    def __init__(self, width: int, layers: int, seconds: float) -> None:
        torch.manual_seed(0)
        torch.set_num_threads(2)
        blocks: list[torch.nn.Module] = []
        for _ in range(layers):
            blocks += [torch.nn.Linear(width, width), torch.nn.ReLU()]
        self.model = torch.nn.Sequential(*blocks)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self._batch = torch.randn(64, width)
        for _ in range(2 if seconds else 0):  # the second time from a step that is nearly right
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


def disturbance_session(sections: Sections, spec: CheckpointSpec) -> Found:
    """Mean step seconds beside a save, and without, for each pace.

    Steps are those between the return of save() and its result; the stall is not among them.
    A sample has quiet steps before and after its save. A gentle save of the whole state takes so
    long that the machine's own drift (steps of 65 to 118 ms were seen within two minutes, without
    any save) hides what it costs: it saves a quarter, at the same rate, several times.
    """
    content, state = TensorContents(), map_state(spec.state, spec.size_bytes)
    training = Training(1024, 4, _STEP_SECONDS)
    found: Found = {}
    sections.warm(spec.copy)
    pool = open_or_make(spec.directory / spec.contender)
    with pool, make_checkpointer(pool, keep_last=1, example=state) as checkpointer:
        for step in range(1, WARM_SAVES + 1):
            content.fill(state, step)
            checkpointer.save(step, state).result()
        for pace, (samples, share) in PACES.items():
            checkpointer.saver.options = replace(checkpointer.saver.options, pace=pace)
            part = _part(state, share)
            found[pace] = []
            for _ in range(samples):
                step += 1
                content.fill(state, step)
                found[pace].append(_disturbed(training, checkpointer, part, step))
    return found


def _part(state: State, share: float) -> State:
    """The first tensors of a state, by path, that make up a share of its bytes."""
    wanted, part = share * state_bytes(state), State()
    for name, tensor in leaves(state):
        if state_bytes(part) >= wanted:
            break
        part[name] = tensor
    return part


def _disturbed(training: Training, checkpointer: Checkpointer, state: State, step: int) -> Found:
    """One sample: steps, a save with steps beside it, steps."""
    checkpointer.wait()
    checkpointer.saver.forget_interval()  # saves come faster here than in any training
    quiet = [training.step() for _ in range(_QUIET_STEPS)]
    disturbed = _steps_during(training, checkpointer.save(step, state))
    quiet += [training.step() for _ in range(_QUIET_STEPS)]
    quiet_seconds = sum(quiet) / len(quiet)
    return {
        "quiet_seconds": quiet_seconds,
        "disturbed_seconds": sum(disturbed) / len(disturbed),
        "steps": len(disturbed),
        "lost_seconds": sum(disturbed) - len(disturbed) * quiet_seconds,
    }


def _steps_during(training: Training, handle: SaveHandle) -> list[float]:
    """Steps that ran while a save was under way; at least one."""
    steps = [training.step()]
    while not handle.done():
        steps.append(training.step())
    handle.result()
    return steps


def overlap_session(sections: Sections, spec: CheckpointSpec) -> Found:
    """What saves with staging="overlap" hold a training up, and one copy of its state."""
    width = max(256, round(2048 * math.sqrt(min(1.0, spec.size_bytes / FULL_BYTES))))
    sections.warm(3 * spec.copy)  # the model with its gradients and moments, and the copy
    training = Training(width, 32, 0.0)  # 134 million parameters and their moments: 1.6 GB
    state: dict[str, Any] = {"model": training.model, "optimizer": training.optimizer}
    tensors = {"model": training.model.state_dict(), "optimizer": _moments(training.optimizer)}
    copy = Copy(tensors).seconds()
    sections.warm(spec.copy)
    pool = open_or_make(spec.directory / spec.contender)
    visible: list[float] = []
    with (
        pool,
        make_checkpointer(pool, keep_last=1, save=SaveOptions(staging="overlap")) as checkpointer,
    ):
        for step in range(1, 1 + WARM_SAVES + SAMPLES):
            began = time.perf_counter()
            handle = checkpointer.save(step, state)
            returned = time.perf_counter() - began
            training.step()
            if step > WARM_SAVES:
                visible.append(max(returned, handle.visible_stall_seconds))
            handle.result()
    return {"visible_seconds": visible, "copy_seconds": copy}


def _moments(optimizer: torch.optim.Optimizer) -> State:
    """The optimizer's tensors, nested by number and name."""
    return {
        str(number): {k: v for k, v in values.items() if isinstance(v, torch.Tensor)}
        for number, values in enumerate(optimizer.state.values())
    }
