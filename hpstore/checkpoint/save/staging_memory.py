"""Copies of one save: at once, or while the next forward and backward run.

Deferred are only tensors that an optimizer's step alone changes: its parameters and moments. The
step's pre-hook waits for their copies. A change that comes sooner moves the tensor's version
counter, or shows in a sample of what was copied: the save then fails, the training does not.

What is copied at once only another thread of the trainer can change: that moves the counter, too,
and the save fails, as it would hold parts of two steps.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import numpy as np
import torch

from hpstore.checkpoint.format.segment_plan import Slice
from hpstore.checkpoint.save.accelerator import Accelerator, Arrival
from hpstore.checkpoint.save.copy_gate import CopyGate
from hpstore.checkpoint.save.copy_samples import Samples
from hpstore.checkpoint.save.host_copy import Copier, pieces
from hpstore.errors import CheckpointError
from hpstore.runtime.threads import start_thread

MOST_SMALL = 1024  # small tensors that are looked at again: 100,000 would cost 20 ms of the stall


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copy:
    name: str
    target: torch.Tensor
    source: torch.Tensor
    version: int

    def require_unchanged(self) -> None:
        if _version(self.source) != self.version:
            raise changed(self.name)


def changed(name: str) -> CheckpointError:
    """What to raise for a tensor that was changed too soon."""
    return CheckpointError(
        f"{name!r} was changed before its deferred copy was finished, by something that is not "
        "the step of an optimizer in the state. The save is given up, the one before it is still "
        "current. Call before_update() before such a change, of the checkpointer or of the hooks "
        'of a pipeline, or use staging="copy" (snapshot="inline").'
    )


def torn(name: str) -> CheckpointError:
    """What to raise for a tensor that was changed while save() copied it."""
    return CheckpointError(
        f"{name!r} was changed by another thread while save() copied it: the checkpoint would hold "
        "parts of two states. The save is given up, the one before it is still current. Let that "
        "thread wait while save() runs, or put a copy of the tensor into the state."
    )


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


class Staging:
    """The copies of one slice into the arena. What was changed too soon is raised by wait()."""

    def __init__(
        self,
        staged: Slice,
        targets: list[torch.Tensor],
        deferrable: frozenset[int],
        accelerator: Accelerator | None,
        copier: Copier,
        gate: CopyGate,
        turn: int,
    ) -> None:
        """`deferrable`: storage addresses of tensors that only a hooked step changes.

        `gate`: what deferred copies on the host pass. `turn`: counts up, so that other tensors
        are sampled each time.
        """
        self._gate, self._turn = gate, turn
        self._now: list[int] = []  # on the host, by number
        self._before: list[tuple[int, int]] = []  # versions of what is copied at once, by number
        self._staged, self._targets = staged, targets
        self._there: list[tuple[torch.Tensor, torch.Tensor]] = []  # on a device, waited for
        self._beside: list[_Copy] = []  # on a device: enqueued behind the work that is there
        self._later: list[_Copy] = []  # on the host: copied by a thread
        self._accelerator, self._copier = accelerator, copier
        self._arrival: Arrival | None = None
        self._copied = threading.Event()  # all of _later
        self._samples: Samples | None = None  # of _beside
        self._checked = False  # nobody changed _beside before the hook or the copies' end
        self._lock = threading.Lock()  # guards _checked and _error
        self._error: BaseException | None = None
        self.visible_seconds = 0.0  # that the training thread waited in finish()
        small = staged.copies[: staged.small_count]
        for n in staged.copies[len(small) :]:
            source = staged.tensors[n]
            on_host = accelerator is None or not accelerator.holds(source)
            if deferrable and source.untyped_storage().data_ptr() in deferrable:
                copy = _Copy(
                    name=staged.items[n].name,
                    target=targets[n],
                    source=source.detach(),
                    version=_version(source),
                )
                (self._later if on_host else self._beside).append(copy)
                continue
            self._before.append((n, _version(source)))
            if on_host:
                self._now.append(n)
            else:
                self._there.append((targets[n], source))
        # small ones are copied at once: that is cheaper than to keep track of them
        self._before += [(n, _version(staged.tensors[n])) for n in small[:MOST_SMALL]]
        self._small = small  # on the host, too small to be worth a thread
        if accelerator is not None:
            there = {n: accelerator.holds(staged.tensors[n]) for n in small}
            self._small = tuple(n for n in small if not there[n])
            self._there += [(targets[n], staged.tensors[n]) for n in small if there[n]]

    @property
    def deferred_bytes(self) -> int:
        """Bytes whose copies are not finished by start()."""
        return sum(copy.source.nbytes for copy in (*self._beside, *self._later))

    def start(self) -> None:
        """Make the copies that cannot wait, begin with the others. For the training thread."""
        arrival = self._enqueue(self._there)
        if self._beside:
            self._samples = self._sampled(self._beside)
        self._arrival = self._enqueue([(copy.target, copy.source) for copy in self._beside])
        if self._later:
            samples = self._sampled(self._later)
            start_thread(
                threading.Thread(
                    target=self._copy_later, args=(samples,), name="hpstore-stage", daemon=True
                )
            )
        else:
            self._copied.set()
        targets, sources = self._targets, self._staged.tensors
        if self._now:
            self._copier.run((targets[n], sources[n]) for n in self._now)
        if self._small:
            with torch.no_grad():  # one call: 10,000 of them cost more than their bytes
                torch._foreach_copy_(
                    [targets[n] for n in self._small], [sources[n] for n in self._small]
                )
        if arrival is not None:
            arrival.wait_on_host()
        for n, version in self._before:
            if _version(sources[n]) != version:
                with self._lock:
                    self._error = self._error or torn(self._staged.items[n].name)
                break

    def _enqueue(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> Arrival | None:
        if not pairs or self._accelerator is None:
            return None
        with torch.no_grad():
            return self._accelerator.copy(pairs)

    def _sampled(self, copies: list[_Copy]) -> Samples:
        return Samples([(copy.target, copy.source) for copy in copies], self._turn)

    def _require_as_sampled(self, copies: list[_Copy], samples: Samples) -> None:
        """The copies are finished. Raises CheckpointError where one has later values."""
        number = samples.changed(self._accelerator)
        if number is not None:
            raise changed(copies[number].name)

    def _copy_later(self, samples: Samples) -> None:
        """Copy on one thread, piece by piece: torch's own threads belong to the step."""
        try:
            for copy in self._later:
                _plain_copy(copy.target, copy.source, self._gate)
                copy.require_unchanged()
            self._require_as_sampled(self._later, samples)
        except BaseException as error:  # noqa: BLE001 (raised by wait on the saving thread)
            with self._lock:
                self._error = self._error or error
        finally:
            self._copied.set()

    def _check_beside(self) -> None:
        """Once: nothing was changed between the save and now. Later changes are ordered behind."""
        with self._lock:
            if self._checked:
                return
            self._checked = True
            try:
                for copy in self._beside:
                    copy.require_unchanged()
            except CheckpointError as error:
                self._error = self._error or error

    def finish(self) -> None:
        """Let deferred copies end before the caller changes tensors. Never raises their errors."""
        began = time.perf_counter()
        self._gate.open()
        self._check_beside()
        if self._arrival is not None:
            self._arrival.order_stream()
        self._copied.wait()
        self.visible_seconds += time.perf_counter() - began

    def wait(self) -> None:
        """Wait on the saving thread until all bytes are in the arena. Raises what went wrong."""
        if self._arrival is not None:
            self._arrival.wait_on_host()
        self._check_beside()
        self._copied.wait()
        if self._error is not None:
            raise self._error
        if self._samples is not None:
            self._require_as_sampled(self._beside, self._samples)

    def settle(self) -> None:
        """Wait until no copy into the arena is under way, however they end."""
        self._gate.open()
        if self._arrival is not None:
            self._arrival.wait_on_host()
        self._copied.wait()


def _plain_copy(target: torch.Tensor, source: torch.Tensor, gate: CopyGate) -> None:
    """Through the gate piece by piece, or as a whole where the source is not contiguous."""
    left = source.nbytes
    with torch.no_grad():
        gate.enter()
        for to, piece in pieces([(target, source)]):
            np.copyto(to, piece)
            gate.copied(len(piece))
            left -= len(piece)
            if left:
                gate.enter()
        if left:  # pieces() has copied it
            gate.copied(left)
