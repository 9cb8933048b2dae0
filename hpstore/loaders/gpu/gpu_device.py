"""What the loader asks of a GPU: page-locked memory, a stream beside the step, direct reads.

`CudaGpu` is NVIDIA's by torch. Tests have a stand-in with the same calls
(`hpstore.testing.fake_gpu`).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import torch

from hpstore.codec.galois import Bytes
from hpstore.errors import ConfigError

if TYPE_CHECKING:  # imported when they are used: most loaders never read directly
    from hpstore.loaders.gpu.direct.cufile_queue import DirectDriver
    from hpstore.loaders.gpu.direct.gpu_checksums import Blocks
    from hpstore.loaders.gpu.direct.gpu_decode import DecodeJobs


class Mark(Protocol):
    """A point in the side stream: everything that was enqueued on it before."""

    def done(self) -> bool:
        """Whether the GPU is past it. Does not wait."""

    def wait_on_host(self) -> None:
        """Block the calling thread until the GPU is past it."""

    def seconds(self) -> float:
        """What the GPU took from the start() that it was made with, else 0; of one that is done."""

    def order(self, tensors: Iterable[torch.Tensor]) -> None:
        """What is enqueued on the caller's stream from now on comes after it.

        `tensors` were made on the side stream; their memory is not used again before the caller's
        stream is done with them.
        """


class Gpu(Protocol):
    """One GPU, as the loader uses it. Thread-safe."""

    device: torch.device

    def begin(self) -> None:
        """On the thread that iterates, before other threads use it: "cuda" is that thread's GPU."""

    def pin(self, memory: Bytes) -> None:
        """Page-lock host memory until unpin(), which must come before it is freed. ConfigError."""

    def unpin(self, address: int) -> None:
        """Undo pin() of the memory that begins there. Raises RuntimeError."""

    def side(self) -> AbstractContextManager[object]:
        """Inside, what the calling thread enqueues goes to the side stream."""

    def upload(self, tensor: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        """Inside side(): the tensor on the GPU, its copy enqueued; itself when it is there.

        Its host memory must not change before a mark() behind it is done. `into`: a tensor of the
        same kind there, which it is copied to.
        """

    def is_there(self, tensor: torch.Tensor) -> bool:
        """Whether upload() would return the tensor itself."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Inside side(): uint8 memory of the GPU, contents undefined, for the side stream first."""

    def lend(self, memory: torch.Tensor, gone: Callable[[], object]) -> torch.Tensor:
        """Contiguous uint8 memory as a tensor with a storage of its own, which keeps it alive.

        gone() is called when the last tensor over it has gone, on any thread, at any time.
        """

    def fence(self) -> Mark:
        """A mark behind what was enqueued on the caller's stream so far."""

    def behind(self, fence: Mark) -> None:
        """Inside side(): what is enqueued from now on comes after the fence."""

    def start(self) -> object:
        """Inside side(): what mark() takes to know the time of what is enqueued in between."""

    def mark(self, started: object = None) -> Mark:
        """Inside side(): a mark behind what was enqueued so far."""

    def obstacle(self, directory: str) -> str | None:
        """Why files of a directory cannot be read straight to this GPU; None when they can.

        Makes sure by trying, which may take a minute the first time. Raises OSError.
        """

    def driver(self) -> DirectDriver:
        """What reads files straight into memory of this GPU, not yet open."""

    def decode(self, memory: torch.Tensor, jobs: DecodeJobs) -> None:
        """As loaders.direct.decode."""

    def verify(self, memory: torch.Tensor, blocks: Blocks) -> torch.Tensor:
        """As loaders.direct.verify."""


# Any below: torch.cuda's streams and events are untyped
class _Event:
    def __init__(self, started: Any, event: Any, device: torch.device) -> None:
        self._started, self._event, self._device = started, event, device

    def done(self) -> bool:
        return bool(self._event.query())

    def wait_on_host(self) -> None:
        self._event.synchronize()

    def seconds(self) -> float:
        if self._started is None:
            return 0.0
        return float(self._started.elapsed_time(self._event)) / 1e3  # it tells milliseconds

    def order(self, tensors: Iterable[torch.Tensor]) -> None:
        stream: Any = torch.cuda.current_stream(self._device)
        stream.wait_event(self._event)
        for tensor in tensors:
            if tensor.is_cuda:
                tensor.record_stream(stream)


class _Lent:
    """Part of a tensor's memory, as the CUDA array interface (version 2) tells of it."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory  # kept
        self.__cuda_array_interface__ = {
            "shape": (memory.numel(),),
            "typestr": "|u1",
            "version": 2,
            "data": (memory.data_ptr(), False),
        }


class CudaGpu:
    """A Gpu by torch.cuda, cuFile and Triton. Touches nothing of CUDA before its first use."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: Any = None
        self._launch = threading.Lock()  # guards Triton's launcher, which compiles at first use

    def begin(self) -> None:
        # a new thread's current GPU is the first one, whatever torch.cuda.set_device() chose
        self.device = torch.device("cuda", self._number)

    def pin(self, memory: Bytes) -> None:
        with torch.cuda.device(self.device):
            error = int(_runtime().cudaHostRegister(memory.ctypes.data, memory.nbytes, 0))
        if error:
            raise ConfigError(
                f"{memory.nbytes} bytes of batch memory could not be page-locked "
                f"(cudaHostRegister: CUDA error {error}); lower LoaderMemory.prefetch_bytes"
            )

    def unpin(self, address: int) -> None:
        with torch.cuda.device(self.device):  # a finalizer may run on any thread
            error = int(_runtime().cudaHostUnregister(address))
        if error:
            raise RuntimeError(f"cudaHostUnregister: CUDA error {error}")

    def side(self) -> AbstractContextManager[object]:
        if self._stream is None:  # two threads may make two; one of them is kept
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        made: AbstractContextManager[object] = torch.cuda.stream(self._stream)
        return made

    def upload(self, tensor: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        if into is None:
            return tensor.to(self.device, non_blocking=True)
        return into.copy_(tensor, non_blocking=True)

    def is_there(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda and tensor.device == self.device

    def allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def lend(self, memory: torch.Tensor, gone: Callable[[], object]) -> torch.Tensor:
        lent = _Lent(memory)
        weakref.finalize(lent, gone).atexit = False
        # a storage with a deleter that holds `lent`, as from_numpy() has on the host
        return torch.as_tensor(lent, device=self.device)

    def fence(self) -> Mark:
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return _Event(None, event, self.device)

    def behind(self, fence: Mark) -> None:
        fence.order(())  # the side stream is the current one

    def start(self) -> object:
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def mark(self, started: object = None) -> Mark:
        return _Event(started, self.start(), self.device)

    @property
    def _number(self) -> int:
        return torch.cuda.current_device() if self.device.index is None else self.device.index

    def obstacle(self, directory: str) -> str | None:
        from hpstore.loaders.gpu.direct.detect import process_detector

        found = process_detector().detect(directory, self._number)
        return None if found.direct else f"{found.route}: {found.reason}"

    def driver(self) -> DirectDriver:
        from hpstore.loaders.gpu.direct.cufile import CuFile

        return CuFile(self._number)

    def decode(self, memory: torch.Tensor, jobs: DecodeJobs) -> None:
        from hpstore.loaders.gpu.direct.gpu_decode import decode

        with self._launch:
            decode(memory, jobs)

    def verify(self, memory: torch.Tensor, blocks: Blocks) -> torch.Tensor:
        from hpstore.loaders.gpu.direct.gpu_checksums import verify

        with self._launch:
            return verify(memory, blocks)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch's


def gpu_of(device: str | torch.device | Gpu | None) -> Gpu | None:
    """The GPU that batches go to; None for the CPU. Raises ConfigError for other devices."""
    if device is None:
        return None
    if not isinstance(device, str | torch.device):
        if not hasattr(device, "begin"):
            raise ConfigError(f"device {device!r}: give cpu, cuda or cuda:1")
        return device
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device {device!r}: give cpu, cuda or cuda:1") from error
    if found.type == "cpu":
        return None
    if found.type != "cuda":
        raise ConfigError(f"device {str(found)!r}: batches are sent to cpu or cuda")
    return CudaGpu(found)
