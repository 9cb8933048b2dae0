"""An AsyncStager for dcp.async_save: one reused buffer, one copy, also for the process executor."""

from __future__ import annotations

import copy
import logging
import os
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.staging import AsyncStager

from hpstore.checkpoint.format.segment_plan import SMALL_ALIGNMENT, SMALL_ITEM_BYTES
from hpstore.checkpoint.state.plain_tensors import require_savable
from hpstore.errors import CheckpointError
from hpstore.format.geometry import ALIGNMENT_BYTES
from hpstore.runtime.buffers import aligned_array
from hpstore.units import MIB, round_up

_log = logging.getLogger(__name__)
# Any: a state dict holds whatever its owner puts there
_SHM = "/dev/shm"


class StagedState(dict[str, Any]):
    """A staged state dict: its tensors are views of one buffer, and it is pickled as such.

    torch would send a file descriptor for each of its tensors; this sends one.
    """

    def __init__(self, content: Mapping[str, Any], buffer: torch.Tensor) -> None:
        super().__init__(content)
        self.buffer = buffer

    def __reduce__(self) -> tuple[Any, ...]:
        if not self.buffer.is_shared():  # type: ignore[no-untyped-call]
            raise CheckpointError(
                "this state was staged for a thread; AsyncCheckpointerType.PROCESS needs "
                "Stager(shared=True)"
            )
        places: list[Any] = []

        def note(tensor: torch.Tensor) -> _Place:
            offset = tensor.data_ptr() - self.buffer.data_ptr() if tensor.numel() else 0
            places.append((offset, tensor.dtype, tuple(tensor.shape)))
            return _Place(len(places) - 1)

        return _rebuilt, (self.buffer, _mapped(dict(self), note), places)


class _Place:
    """Stands for a tensor while a StagedState is pickled."""

    def __init__(self, number: int) -> None:
        self.number = number


def _rebuilt(buffer: torch.Tensor, content: Any, places: list[Any]) -> StagedState:
    def tensor(place: _Place) -> torch.Tensor:
        offset, dtype, shape = places[place.number]
        return _view(buffer, offset, dtype, shape)

    return StagedState(_mapped(content, tensor, _Place), buffer)


def _view(
    buffer: torch.Tensor, offset: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> torch.Tensor:
    count = torch.Size(shape).numel() * dtype.itemsize
    if not count:
        return torch.empty(shape, dtype=dtype, device=buffer.device)
    return buffer[offset : offset + count].view(dtype).view(shape)


def _mapped(value: Any, make: Callable[[Any], Any], kind: type = torch.Tensor) -> Any:
    """A state with its tensors (of DTensors the local part) replaced; containers are new."""
    if kind is torch.Tensor and hasattr(value, "to_local"):
        return _Sharded(make(value.to_local()), value)
    if isinstance(value, _Sharded):
        return value.with_local(make(value.local))
    if isinstance(value, kind):
        return make(value)
    if isinstance(value, dict):
        return {name: _mapped(child, make, kind) for name, child in value.items()}
    if type(value) is list:
        return [_mapped(child, make, kind) for child in value]
    if type(value) is tuple:
        return tuple(_mapped(child, make, kind) for child in value)
    return value


class _Sharded:
    """A DTensor whose local part is replaced."""

    def __init__(self, local: Any, of: Any) -> None:
        self.local = local
        self.mesh, self.placements = of.device_mesh, of.placements
        self.shape, self.stride = of.shape, of.stride()

    def with_local(self, local: torch.Tensor) -> torch.Tensor:
        """The DTensor over other memory."""
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            local,
            self.mesh,
            self.placements,
            run_check=False,
            shape=self.shape,
            stride=self.stride,
        )


class Stager(AsyncStager):
    """Copies a state dict into one buffer that is kept and reused. Close it when it is done with.

    A state that is still being written is never overwritten: while the dict of an earlier stage()
    is alive, a second buffer is made (logged, counted in `buffers_total`).

    Not thread-safe; one training thread uses it.

    Parameters
    ----------
    shared
        The buffer is shared memory, for AsyncCheckpointerType.PROCESS.
    """

    _synchronize_after_execute = False

    def __init__(self, *, shared: bool = False) -> None:
        self.shared = shared
        self.buffers_total = 0
        self._free: list[torch.Tensor] = []
        self._lent: list[tuple[weakref.ref[StagedState], torch.Tensor]] = []

    def stage(self, state_dict: Mapping[str, Any], **_: Any) -> StagedState:
        """Copy a state to the host.

        Parameters
        ----------
        state_dict
            Tensors of any device, and plain values. It may change after the return.

        Returns
        -------
        StagedState
            The copy, in one of this stager's buffers, which is used again when it is gone.

        Raises
        ------
        CheckpointError
            A value is a tensor that cannot be copied as it is: a sparse one, one that is made of
            several tensors.
        """
        sizes: list[torch.Tensor] = []

        def note(tensor: torch.Tensor) -> torch.Tensor:
            require_savable(tensor, "a value of the state")
            sizes.append(tensor)
            return tensor

        plain = _mapped(dict(state_dict), note)
        offsets, total = _places(sizes)
        buffer = self._take(total)
        numbers = iter(range(len(sizes)))

        def move(tensor: torch.Tensor) -> torch.Tensor:
            target = _view(buffer, offsets[next(numbers)], tensor.dtype, tuple(tensor.shape))
            target.copy_(tensor.detach())
            return target

        staged = StagedState(_finished(plain, move), buffer)
        self._lent.append((weakref.ref(staged), buffer))
        return staged

    def _take(self, nbytes: int) -> torch.Tensor:
        """A buffer that nobody reads from."""
        lent = [(ref, buffer) for ref, buffer in self._lent if ref() is not None]
        self._free += [buffer for ref, buffer in self._lent if ref() is None]
        self._lent = lent
        fitting = [b for b in self._free if len(b) >= nbytes]
        if fitting:
            self._free = []  # one is kept
            return fitting[0]
        self._free = []
        if lent:
            _log.warning("an earlier state is still in use: another staging buffer is made")
        self.buffers_total += 1
        return _buffer(round_up(max(nbytes, 1), MIB), shared=self.shared)

    def synchronize_staging(self) -> None:
        """Nothing to wait for: stage() returns when the copy is made."""
        return

    def close(self) -> None:
        """Give the buffers back."""
        self._free, self._lent = [], []


def _places(tensors: list[torch.Tensor]) -> tuple[list[int], int]:
    """Offsets: small ones packed first, large ones on pages, so that the buffer can be written as
    it lies."""
    offsets = [0] * len(tensors)
    at = 0
    for n in sorted(range(len(tensors)), key=lambda n: tensors[n].nbytes >= SMALL_ITEM_BYTES):
        big = tensors[n].nbytes >= SMALL_ITEM_BYTES
        offsets[n] = round_up(at, ALIGNMENT_BYTES if big else SMALL_ALIGNMENT)
        at = offsets[n] + tensors[n].nbytes
    return offsets, at


def _finished(plain: Any, move: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`plain` with copies for tensors, DTensors put together again, and other values copied."""
    if isinstance(plain, _Sharded):
        return plain.with_local(move(plain.local))
    if isinstance(plain, torch.Tensor):
        return move(plain)
    if isinstance(plain, dict):
        return {name: _finished(child, move) for name, child in plain.items()}
    if type(plain) in (list, tuple):
        return type(plain)(_finished(child, move) for child in plain)
    return copy.deepcopy(plain)


def _buffer(nbytes: int, *, shared: bool) -> torch.Tensor:
    if not shared:
        return torch.from_numpy(aligned_array(nbytes, populate=True))
    stats = os.statvfs(_SHM)
    if stats.f_bavail * stats.f_frsize < nbytes:
        raise CheckpointError(
            f"{_SHM} has {stats.f_bavail * stats.f_frsize} bytes left, the state needs {nbytes}. "
            "Make it larger (containers: --shm-size), or use AsyncCheckpointerType.THREAD."
        )
    storage = torch.UntypedStorage._new_shared(nbytes)  # type: ignore[no-untyped-call]
    made = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
    return made.zero_()  # touched now, not in a copy
