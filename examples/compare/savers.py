"""Four ways to save a checkpoint every few steps: not at all, inline, asynchronously, hpstore."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rows import SAVERS
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)

from hpstore.checkpoint import Checkpointer, SaveHandle, SaveOptions
from hpstore.pool.pool import Pool
from hpstore.trainers import PipelineHooks

NONE, HPSTORE, INLINE, DCP = SAVERS
KEPT = 2  # checkpoints of a run; older ones go
DRAIN_SECONDS = 5.0  # that a rank which is told to end waits for its save
State = Mapping[str, Any]  # Any: modules, optimizers, loaders


class Saver:
    """No checkpoints. What the others have in common."""

    def __init__(self) -> None:
        self.count = 0
        self.stall_seconds = 0.0
        self.nbytes = 0
        self._written: list[tuple[float, float]] = []  # in background: stall, and until durable

    def save(self, step: int, state: State) -> float:
        """Begin to save; seconds for which training stood still."""
        began = time.perf_counter()
        self._save(step, state)
        stall = time.perf_counter() - began
        self.stall_seconds += stall
        return stall

    def _save(self, step: int, state: State) -> None:
        return

    def restore(self, state: State) -> int:
        """Fill the state from the newest checkpoint; its step, 0 when there is none."""
        return 0

    @property
    def checkpointer(self) -> Checkpointer | None:
        """What hooks of a pipeline save with."""
        return None

    def through(self, hooks: PipelineHooks) -> None:
        """From now on let these begin to save, where they have the checkpointer."""

    def wait(self) -> None:
        """Until what was begun is durable."""

    def close(self) -> None:
        """Wait, and let go of everything."""
        self.wait()

    def counted(self) -> dict[str, Any]:
        """For the storage block of a results file."""
        stalled = sum(stall for stall, _ in self._written)
        durable = sum(seconds for _, seconds in self._written)
        return {
            "ckpt_count": self.count,
            "ckpt_bytes": self.nbytes,
            "ckpt_stall_s": self.stall_seconds,
            "ckpt_hidden_share": max(0.0, 1 - stalled / durable) if durable else None,
        }


class Inline(Saver):
    """torch.save, synced, while everybody waits: by rank 0, or by all where each has a part."""

    def __init__(self, directory: Path, *, replicated: bool) -> None:
        super().__init__()
        self._directory, self._rank = directory, dist.get_rank()
        self._writes = not replicated or self._rank == 0
        directory.mkdir(parents=True, exist_ok=True)
        self._kept: list[Path] = []

    def _save(self, step: int, state: State) -> None:
        self.count += 1
        if self._writes:
            self._kept.append(self._write(step, state))
            for old in self._kept[:-KEPT]:
                old.unlink()
            self._kept = self._kept[-KEPT:]
        dist.barrier()

    def _write(self, step: int, state: State) -> Path:
        values = {
            name: part.state_dict() if hasattr(part, "state_dict") else part
            for name, part in state.items()
        }
        path = self._directory / f"step-{step}-rank-{self._rank}.pt"
        partial = path.with_suffix(".partial")
        with open(partial, "wb") as file:
            torch.save(values, file)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)
        self.nbytes += path.stat().st_size
        return path


class Dcp(Saver):
    """torch.distributed.checkpoint in a thread, over a process group of its own."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory, self._leads = directory, dist.get_rank() == 0
        self._group = dist.new_group(backend="gloo")
        self._flying: Future[Any] | None = None
        self._kept: list[Path] = []

    def _save(self, step: int, state: State) -> None:
        self.wait()
        began = time.perf_counter()
        path = self._directory / f"step-{step}"
        found = dcp.async_save(_flat(state), checkpoint_id=path, process_group=self._group)
        assert isinstance(found, Future)
        self.count += 1
        stall = time.perf_counter() - began
        found.add_done_callback(
            lambda _: self._written.append((stall, time.perf_counter() - began))
        )
        self._flying = found
        self._kept.append(path)

    def wait(self) -> None:
        flying, self._flying = self._flying, None
        if flying is None:
            return
        flying.result()
        if self._leads:
            self.nbytes += sum(file.stat().st_size for file in self._kept[-1].iterdir())
            for old in self._kept[:-KEPT]:
                shutil.rmtree(old)
        self._kept = self._kept[-KEPT:]


def _flat(state: State) -> dict[str, Any]:
    """Model and optimizer by the names of the whole model, as DCP wants them."""
    found = {name: part for name, part in state.items() if name not in ("model", "optimizer")}
    found = {n: p.state_dict() if hasattr(p, "state_dict") else p for n, p in found.items()}
    if "model" in state:
        flat = StateDictOptions(flatten_optimizer_state_dict=True)
        model, optimizer = state["model"], state["optimizer"]
        found["model"] = get_model_state_dict(model)
        found["optimizer"] = get_optimizer_state_dict(model, optimizer, options=flat)
    return found


class Hpstore(Saver):
    """Staged in one copy, erasure-coded and committed in the background."""

    def __init__(self, pool: Pool, prefix: str) -> None:
        super().__init__()
        self._checkpointer = Checkpointer(
            pool, prefix, keep_last=KEPT, rng=False, save=SaveOptions(drain_seconds=DRAIN_SECONDS)
        )
        self._handles: list[SaveHandle] = []
        self._hooks: PipelineHooks | None = None

    @property
    def checkpointer(self) -> Checkpointer:
        return self._checkpointer

    def through(self, hooks: PipelineHooks) -> None:
        self._hooks = hooks

    def _save(self, step: int, state: State) -> None:
        hooks = self._hooks
        handle = self._checkpointer.save(step, state) if hooks is None else hooks.save()
        self._handles.append(handle)
        self.count += 1

    def restore(self, state: State) -> int:
        return self._checkpointer.restore(state) or 0

    def wait(self) -> None:
        self._checkpointer.wait()

    def close(self) -> None:
        self._checkpointer.close()

    def counted(self) -> dict[str, Any]:
        reports = [handle.result() for handle in self._handles]
        self._written = [(report.staged_seconds, report.durable_seconds) for report in reports]
        if dist.get_rank() == 0:  # a report tells of all ranks
            self.nbytes = sum(report.bytes for report in reports)
        return super().counted()


def saver(kind: str, *, pool: Pool, directory: Path, name: str, replicated: bool) -> Saver:
    """The one of that kind, for a run of that name; collective."""
    if kind == HPSTORE:
        return Hpstore(pool, f"runs/{name}")
    if kind == DCP:
        return Dcp(directory / "checkpoints" / name)
    if kind == INLINE:
        return Inline(directory / "checkpoints" / name, replicated=replicated)
    return Saver()
