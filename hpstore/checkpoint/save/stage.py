"""Stage slices in the arena, at once or behind the training's back, and hand them to a save."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hpstore.checkpoint.format.pack import Segment
from hpstore.checkpoint.format.segment_plan import Slice
from hpstore.checkpoint.ranks.forked_child import calm_torch
from hpstore.checkpoint.save.accelerator import Accelerator
from hpstore.checkpoint.save.arena import Arena
from hpstore.checkpoint.save.copy_gate import CopyGate
from hpstore.checkpoint.save.host_copy import Copier
from hpstore.checkpoint.save.process_job import AnyJob
from hpstore.checkpoint.save.rank_plan import Prepared
from hpstore.checkpoint.save.staging_memory import Staging
from hpstore.checkpoint.state.optimizers import local_part
from hpstore.checkpoint.state.targets import State, objects_in
from hpstore.codec.galois import Bytes
from hpstore.errors import CheckpointError
from hpstore.runtime.collector_pause import collector_allowed

_log = logging.getLogger(__name__)
STAGING = ("copy", "overlap")


class SaveStage:
    """The arena and what is in it. The training thread calls begin() and finish(), the saving
    thread write(); the arena is the save's from begin() to the end of write()."""

    def __init__(self, mode: str, accelerator: Accelerator | None, *, shared: bool = False) -> None:
        calm_torch()
        self.arena = Arena(accelerator, shared=shared)
        self._copier = Copier()
        self._accelerator = accelerator
        self.mode, self.gate = mode, CopyGate(blocks=False)  # of the next staging
        self._current: tuple[Staging, Slice] | None = None
        self._warm: dict[Segment, Bytes] = {}
        self.hooked: weakref.WeakKeyDictionary[Optimizer, Any] = weakref.WeakKeyDictionary()
        self._others: Any = None  # hook of steps of optimizers that are not in the state
        self._warned = False
        self._turn = 0  # stagings so far

    def begin(
        self,
        prepared: Prepared,
        state: State,
        counters: dict[str, int],
        write_part: Callable[[int], None],
    ) -> Callable[[], float]:
        """Stage the last slice; those before it are staged and given to `write_part` one by one.

        Returns what tells how long finish() has kept the training thread so far.
        """
        self.release_tensors()  # after an error: of a save that did not come to write()
        if not prepared.slices:
            return lambda: 0.0
        if prepared.largest_bytes > self.arena.capacity_bytes:
            self._warm = {}  # it would keep the memory that is replaced
        self.arena.reserve(prepared.largest_bytes)
        if len(prepared.slices) > 1:
            counters["sliced_saves_total"] += 1
            _log.warning(
                "the state of %d bytes is larger than the memory for staging: it is staged in %d "
                "slices, and the trainer waits for all but the last to be written",
                prepared.total_bytes,
                len(prepared.slices),
            )
        for part, piece in enumerate(prepared.slices[:-1]):
            self._stage(piece, frozenset())
            with collector_allowed():  # the trainer waits, for as long as storage takes
                write_part(part)
        deferrable = frozenset[int]()
        if self.mode == "overlap":
            deferrable = self._hooked_storages(state, counters)
        staging = self._stage(prepared.slices[-1], deferrable)
        return lambda: staging.visible_seconds

    def _stage(self, piece: Slice, deferrable: frozenset[int]) -> Staging:
        self._warm = {}  # what is staged here overwrites it, an earlier slice of this save too
        staging = Staging(
            piece,
            self.arena.targets(piece),
            deferrable,
            self._accelerator,
            self._copier,
            self.gate,
            self._turn,
        )
        self._turn += 1
        self._current = (staging, piece)
        staging.start()
        return staging

    def _hooked_storages(self, state: State, counters: dict[str, int]) -> frozenset[int]:
        """Storages that only the step of an optimizer in the state changes; hooks that step."""
        optimizers = list(objects_in(state, Optimizer))
        if not optimizers:
            counters["overlap_without_optimizer_total"] += 1
            if not self._warned:
                self._warned = True
                _log.warning('staging="overlap" found no optimizer in the state: plain copies')
            return frozenset()
        for optimizer in optimizers:
            if optimizer not in self.hooked:
                self.hooked[optimizer] = optimizer.register_step_pre_hook(self._before_step)
        if self._others is None:
            # one may update the same parameters, and fused ones move no version counter
            self._others = register_optimizer_step_pre_hook(_before_any_step(self))
        return deferrable_storages(optimizers, objects_in(state, torch.nn.Module))

    def _before_step(self, *_: object) -> None:
        self.finish()

    def finish(self) -> None:
        """Let deferred copies end: tensors may change after the return."""
        current = self._current
        if current is not None:
            current[0].finish()

    def write(self, job: AnyJob, part: int, begin: Callable[[], None] = lambda: None) -> None:
        """Give the staged slice to a save, on its thread. What goes wrong is the job's to raise.

        `begin` is called when all of it is in the arena: what it does in the interpreter would
        hold up a training that has gone on beside the copies. What it raises is raised.
        """
        current = self._current
        if current is None:
            raise CheckpointError("nothing is staged")
        staging, piece = current
        failed: BaseException | None = None
        try:
            staging.wait()
        except BaseException as error:  # noqa: BLE001 (raised by the job's commit)
            failed = error
        begin()
        if failed is not None:
            job.fail(failed)
            return
        segment = job.write(self.arena.view(piece.size), piece.items, part=part)
        if segment is not None:
            self._warm[segment] = self.arena.view(segment.size)

    def warm(self, segment: Segment) -> Bytes | None:
        """Memory that still holds a segment as it was written. Compare hashes before use."""
        return self._warm.get(segment)

    def release_tensors(self) -> None:
        """Forget the tensors of the save that is over; the arena keeps their bytes.

        Waits for copies that a failed save has left: the arena is not free before they end.
        """
        current = self._current
        if current is not None:
            current[0].settle()
        self._current = None

    def close(self) -> None:
        """Remove the hooks, give the memory back."""
        for handle in list(self.hooked.values()):
            handle.remove()
        self.hooked.clear()
        if self._others is not None:
            self._others.remove()
        self._warm = {}
        self.release_tensors()  # no device may still write into memory that is given back
        self._copier.close()
        self.arena.release()


def _before_any_step(stage: SaveStage) -> Callable[..., None]:
    """A hook of all optimizers of the process, which does not keep the stage alive."""
    reference = weakref.ref(stage)

    def before(optimizer: Optimizer, *_: object) -> None:
        alive = reference()
        if alive is not None and optimizer not in alive.hooked:
            alive.finish()

    return before


def deferrable_storages(
    optimizers: Iterable[Optimizer], models: Iterable[torch.nn.Module]
) -> frozenset[int]:
    """Addresses of the storages of parameters and moments, but for parameters that the forward
    changes (embeddings with max_norm)."""
    found: set[int] = set()
    for optimizer in map(local_part, optimizers):
        for group in optimizer.param_groups:
            found.update(map(_address, group["params"]))
        for slots in optimizer.state.values():
            found.update(_address(v) for v in slots.values() if isinstance(v, torch.Tensor))
    for model in models:
        for module in model.modules():
            if getattr(module, "max_norm", None) is not None:
                found -= {_address(p) for p in module.parameters(recurse=False)}
    return frozenset(found)


def _address(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return int(local.untyped_storage().data_ptr())
