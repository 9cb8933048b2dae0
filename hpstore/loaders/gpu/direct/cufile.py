"""NVIDIA's cuFile as a DirectDriver, by `cuda.bindings.cufile` (extra `gpu`).

Nothing is imported and no library opened before open(). Open it only where `detect` came back
clean for the directory: cuFileDriverOpen hangs when there is no libcuda, and is known to close
descriptor 0 or to crash in containers that miss its device nodes.

Traps that this module is shaped by: `read` raises for -1 alone and gives other failures back as a
negative "size"; registered memory must be deregistered before it is freed; memory of torch's
caching allocator is an offset inside a segment, which registration does not take.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpstore.errors import DirectError, DirectUnavailable

CONFIG_VARIABLE, LOG_VARIABLE = "CUFILE_ENV_PATH_JSON", "CUFILE_LOGFILE_PATH"
SYSTEM_CONFIG = "/etc/cufile.json"
STATS_LEVEL = 3  # counters by GPU and by route
_DRIVER_ALREADY_OPEN, _NOT_REGISTERED = 5026, 5027

_log = logging.getLogger(__name__)


def environment(
    present: Mapping[str, str], directory: str, *, system_config: bool, compat: bool = True
) -> dict[str, str]:
    """What to add to cuFile's environment, with files in `directory`. Pure.

    No log in the current directory; a configuration with P2PDMA where neither user nor system has
    one, and always when bouncing is to fail.
    """
    added = {}
    if LOG_VARIABLE not in present:
        added[LOG_VARIABLE] = str(Path(directory) / "cufile.log")
    if not compat or not (system_config or CONFIG_VARIABLE in present):
        added[CONFIG_VARIABLE] = str(Path(directory) / "cufile.json")
    return added


def configuration(*, compat: bool = True) -> str:
    """Our cufile.json. Without `compat`, what cannot go directly fails instead of bouncing."""
    return json.dumps({"properties": {"allow_compat_mode": compat, "use_pci_p2pdma": True}})


@contextmanager
def _configured(directory: str, *, compat: bool) -> Iterator[None]:
    """cuFile reads its environment when the driver is opened, and offers no other way."""
    (Path(directory) / "cufile.json").write_text(configuration(compat=compat), encoding="utf-8")
    present = dict(os.environ)
    known = Path(SYSTEM_CONFIG).exists()
    os.environ.update(environment(present, directory, system_config=known, compat=compat))
    try:
        yield
    finally:
        for name in (CONFIG_VARIABLE, LOG_VARIABLE):
            os.environ.pop(name, None)
            if name in present:
                os.environ[name] = present[name]


# Any below: cuda.bindings has no types
class CuFile:
    """The DirectDriver of one GPU. `gpu`: its index among the visible ones.

    With `compat=False`, files that cuFile would bounce through host memory are refused.
    """

    kind = "cufile"
    open_flags = os.O_DIRECT

    def __init__(self, gpu: int = 0, *, compat: bool = True) -> None:
        self._gpu, self._compat = gpu, compat
        self._cufile: Any = None
        self._runtime: Any = None
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._opened = False
        self._counting = False
        self._thread = threading.local()

    def open(self) -> None:
        """Raises DirectUnavailable when the packages, the GPU or the library are not there."""
        try:
            from cuda.bindings import cufile, runtime
        except ImportError as error:
            raise DirectUnavailable(
                f"cuda.bindings is not here ({error}): pip install 'hpstore[gpu]'"
            ) from error
        self._cufile, self._runtime = cufile, runtime
        self.enter_thread()
        self._cuda("cudaFree", 0)  # cuFileDriverOpen fails before the first call into CUDA
        self._directory = tempfile.TemporaryDirectory(prefix="hpstore-cufile-")
        try:
            with _configured(self._directory.name, compat=self._compat):
                self._opened = self._open_driver()
        except BaseException:
            self._directory.cleanup()
            raise
        self._counting = self._start_counting()

    def _open_driver(self) -> bool:
        try:
            self._cufile.driver_open()
        except self._cufile.cuFileError as error:
            if getattr(error, "status", None) == _DRIVER_ALREADY_OPEN:
                return False  # somebody else's in this process: left open at close
            raise DirectUnavailable(f"cuFile's driver does not open: {error}") from error
        except (RuntimeError, OSError) as error:  # the library or a symbol of it is missing
            raise DirectUnavailable(f"libcufile does not load: {error}") from error
        return True

    def _start_counting(self) -> bool:
        try:
            self._cufile.StatsLevel3()
            self._cufile.set_stats_level(STATS_LEVEL)
            self._cufile.stats_start()
        except (AttributeError, RuntimeError, self._cufile.cuFileError) as error:
            _log.warning("libcufile does not count its reads by route: %s", error)
            return False
        return True

    def _cuda(self, name: str, *arguments: object) -> Any:
        code, *results = getattr(self._runtime, name)(*arguments)
        if int(code) != 0:
            raise DirectUnavailable(f"{name} failed: CUDA error {int(code)} ({code})")
        return results[0] if results else None

    def enter_thread(self) -> None:
        if getattr(self._thread, "ready", False):
            return
        self._cuda("cudaSetDevice", self._gpu)
        self._thread.ready = True

    def register_file(self, fd: int) -> int:
        descriptor = self._cufile.Descr()
        descriptor.type = self._cufile.FileHandleType.OPAQUE_FD
        descriptor.handle.fd = fd
        descriptor.fs_ops = 0
        try:
            return int(self._cufile.handle_register(descriptor.ptr))
        except self._cufile.cuFileError as error:
            hint = unlisted(fd) if getattr(error, "status", None) == _NOT_REGISTERED else ""
            raise DirectUnavailable(
                f"cuFile does not take the file: {error}{hint}; read it over pinned memory"
            ) from error

    def release_file(self, handle: int) -> None:
        self._cufile.handle_deregister(handle)

    def allocate(self, nbytes: int) -> int:
        self.enter_thread()
        address = int(self._cuda("cudaMalloc", nbytes))
        try:
            self._cuda("cudaMemset", address, 0, nbytes)
            self._cuda("cudaDeviceSynchronize")  # else it could run after the first read
            self._cufile.buf_register(address, nbytes, 0)
        except (DirectUnavailable, self._cufile.cuFileError) as error:
            self._cuda("cudaFree", address)
            raise DirectUnavailable(
                f"{nbytes} bytes of GPU memory cannot be registered: {error}"
            ) from error
        return address

    def free(self, address: int, nbytes: int) -> None:
        self.enter_thread()
        try:
            self._cufile.buf_deregister(address)
        except self._cufile.cuFileError as error:
            # nvidia-fs can deadlock on freed memory that is registered: rather lose it
            _log.warning("%d bytes of GPU memory stay registered, not freed: %s", nbytes, error)
            return
        self._cuda("cudaFree", address)

    def view(self, address: int, nbytes: int) -> torch.Tensor:
        return torch.as_tensor(_Foreign(address, nbytes), device=f"cuda:{self._gpu}")

    def read(self, handle: int, file_offset: int, length: int, address: int, offset: int) -> int:
        try:
            return int(self._cufile.read(handle, address, length, file_offset, offset))
        except self._cufile.cuFileError as error:  # -1: errno says more, and is lost by now
            raise DirectError(
                f"cuFile read of {length} bytes at {file_offset} failed: {error}. The file is "
                "unharmed; read it over pinned memory"
            ) from error

    def describe(self, code: int) -> str:
        try:
            return str(self._cufile.op_status_error(-code))
        except (ValueError, RuntimeError, self._cufile.cuFileError):
            return os.strerror(-code) if 0 < -code < 200 else "unknown cuFile error"

    def counters(self) -> dict[str, int] | None:
        return read_counters(self._cufile) if self._counting else None

    def close(self) -> None:
        opened, self._opened = self._opened, False
        try:
            if opened:
                self._cufile.driver_close()
        except self._cufile.cuFileError as error:
            raise DirectError(f"cuFile's driver does not close: {error}") from error
        finally:
            if self._directory is not None:
                self._directory.cleanup()


def unlisted(fd: int, directory: str = "/run/udev/data") -> str:
    """What to do where udev does not list the drive of a file, which cuFile then does not take."""
    drive = os.fstat(fd).st_dev
    entry = Path(directory) / f"b{os.major(drive)}:{os.minor(drive)}"
    if os.path.exists(entry) or not os.major(drive):  # NFS and the like have no drive
        return ""
    return f" ({entry}, where cuFile looks the drive up, is not there: mount it into the container)"


class _Foreign:
    """GPU memory that torch takes as it is, by numba's array interface."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }


def read_counters(cufile: Any) -> dict[str, int]:
    """Sums over all GPUs of cuFile's level 3 statistics, as `engine.Counters` names them."""
    stats = cufile.StatsLevel3()
    cufile.get_stats_l3(stats.ptr)
    gpus = stats.per_gpu_stats

    def total(field: str) -> int:
        # the bindings give (16,), older ones (1, 16); only the first num_gpus are filled
        return int(np.ravel(getattr(gpus, field))[: int(stats.num_gpus)].sum())

    return {
        "p2p": total("n_p2p_reads"),
        "nvfs": total("n_nvfs_reads"),
        "posix": total("n_posix_reads"),
        "errors": total("n_reads_err"),
    }
