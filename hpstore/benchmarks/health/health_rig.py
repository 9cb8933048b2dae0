"""Eight devices of which one can be made slow while it is in use; pools over them.

As root: ext4 images on loop devices whose images are read and written past the page cache, slow by
a blkio throttle (cgroup v1), below the file system. Otherwise directories, the slow one behind a
wrapper of hpstore's own that holds calls back. Which of the two it was stands in the results.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import statistics
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np

import hpstore
from hpstore.config import Settings, find_config
from hpstore.devices.base import Device
from hpstore.devices.opener import device_opener
from hpstore.errors import ConfigError
from hpstore.pool.pool import Pool
from hpstore.runtime.closing import Closing
from hpstore.testing.loopfs import LoopFilesystem, loop_mounts_problem
from hpstore.testing.scratch import sweep, throttle_problem
from hpstore.testing.slow_device import SlowableDevice
from hpstore.units import GIB, format_bytes

T = TypeVar("T")
DEVICES, DATA, PARITY = 8, 5, 3
SLOW_BYTES_PER_SECOND = 10_000_000
LOOP = "loop devices, slow by a blkio throttle below the file system"
WRAPPED = "directories, slow by a wrapper in hpstore"


def real_devices_problem(root: Path) -> str:
    """Why no real device whose image is under `root` can be made slow; "" where one can."""
    return loop_mounts_problem(directory=root, direct=True) or throttle_problem() or ""


class Rig(Closing):
    """Eight devices under `root`; the first can be slow. Undoes everything when it is closed.

    `problem`: why they are directories and not loop devices. One thread calls it.
    """

    def __init__(self, root: Path, *, device_bytes: int, problem: str | None = None) -> None:
        self.root, self._stack = root, ExitStack()
        self.problem = real_devices_problem(root) if problem is None else problem
        self._wrapped: weakref.WeakSet[SlowableDevice] = weakref.WeakSet()  # one for each pool
        self._slow_bytes_per_second = 0
        self._disks: list[LoopFilesystem] = []
        self.images: list[Path] = []
        _require_space(root, DEVICES * device_bytes)
        try:
            if self.problem:
                self.places = [root / f"d{number}" for number in range(DEVICES)]
                for place in self.places:
                    place.mkdir()
                return
            sweep()
            for _ in range(DEVICES):
                disk = LoopFilesystem(root, size_bytes=device_bytes, direct=True)
                self._disks.append(self._stack.enter_context(disk))
            self.places = [Path(disk.path) for disk in self._disks]
            self.images = [place.parent / "image" for place in self.places]
        except BaseException:
            self.close()
            raise

    @property
    def kind(self) -> str:
        """What the devices are, in words."""
        return WRAPPED if self.problem else LOOP

    # --- slowness ---------------------------------------------------------------------------

    def slow(self, bytes_per_second: int = SLOW_BYTES_PER_SECOND) -> None:
        """Limit reads and writes of the first device; 0 lifts the limit."""
        self._slow_bytes_per_second = bytes_per_second
        if self._disks:
            self._disks[0].throttle(bytes_per_second)
        for device in self._wrapped:
            device.throttle(bytes_per_second)

    @contextmanager
    def relieved(self) -> Iterator[None]:
        """Whatever happens inside, no device is slow afterwards."""
        try:
            yield
        finally:
            self.slow(0)

    # --- pools ------------------------------------------------------------------------------

    def directories(self, name: str) -> list[Path]:
        """A pool's place on each device."""
        return [place / name for place in self.places]

    def create(self, name: str, *, parity: int = PARITY, recycle_bytes: int = 0) -> None:
        """A pool of k = 5 over all devices; open() opens it."""
        hpstore.create(
            self.directories(name),
            data=DATA,
            parity=parity,
            config=self.config(name),
            settings=Settings(recycle_bytes=recycle_bytes, run_directory=str(self.root / "run")),
        ).close()

    def config(self, name: str) -> Path:
        """Its pool.toml."""
        return self.root / f"{name}.toml"

    def open(self, name: str, *, monitor: bool = True, read_only: bool = False) -> Pool:
        """Open it; `monitor=False` as with `health = false` in its settings."""
        config = find_config(self.config(name))
        config = replace(config, settings=replace(config.settings, health=monitor))
        opener = self._opener(config.settings) if self.problem else None
        return Pool(config, read_only=read_only, opener=opener)

    def _opener(self, settings: Settings) -> Callable[[str], Device]:
        plain, first = device_opener(settings), str(self.places[0])

        def open_url(url: str) -> Device:
            device = plain(url)
            if not url.startswith(f"{first}/"):
                return device
            wrapped = SlowableDevice(device)
            wrapped.throttle(self._slow_bytes_per_second)
            self._wrapped.add(wrapped)
            return wrapped

        return open_url

    def drop(self, name: str) -> None:
        """Remove a pool that no process has open."""
        for directory in self.directories(name):
            shutil.rmtree(directory)
        self.config(name).unlink()

    def first(self, pool: Pool) -> str:
        """The id of the device that slow() is about."""
        return next(
            d
            for d, url in pool.admin.devices.places.items()
            if url.startswith(f"{self.places[0]}/")
        )

    # --- the page cache ---------------------------------------------------------------------

    def drop_cached(self) -> None:
        """Drop what is left of the images there, such as what mkfs wrote."""
        os.sync()
        for image in self.images:
            with image.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def cached_share(self, name: str) -> float:
        """The part of a pool's bytes, and of the images below, that is in the page cache now."""
        files = [f for d in self.directories(name) for f in d.glob("objects/**/@*") if f.is_file()]
        total = sum(file.stat().st_size for file in files)
        cached = sum(map(cached_bytes, files)) + sum(map(cached_bytes, self.images))
        return cached / total if total else 0.0

    def close(self) -> None:
        """Lift the limit, unmount, detach. Idempotent."""
        try:
            self.slow(0)
        except OSError:  # the device is gone already; its limit goes with it
            self._disks.clear()
        self._stack.close()
        self._disks.clear()


def _require_space(root: Path, nbytes: int) -> None:
    free = shutil.disk_usage(root).free
    if free < nbytes + GIB:
        raise ConfigError(
            f"the devices of bench health may grow to {format_bytes(nbytes)}, and {root} has "
            f"{format_bytes(free)} free. Give another --directory, or --quick. Nothing was made."
        )


def cached_bytes(path: Path) -> int:
    """Bytes of a file that are in the page cache. Raises OSError."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if not size:
            return 0
        memory = mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ)
        pages = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
        view = np.frombuffer(memory, np.uint8)
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            failed = libc.mincore(
                ctypes.c_void_p(view.ctypes.data),
                ctypes.c_size_t(size),
                ctypes.c_void_p(pages.ctypes.data),
            )
            if failed:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
        finally:
            del view
            memory.close()
    return min(size, int((pages & 1).sum()) * mmap.PAGESIZE)


def loads() -> float:
    """The machine's load of the last minute: what a figure was taken beside."""
    return round(os.getloadavg()[0], 2)


def quantile(values: list[float], share: float) -> float:
    """The value that `share` of all are not above; NaN for none."""
    return float(np.quantile(values, share, method="higher")) if values else float("nan")


def interleaved(
    runs: Mapping[str, Callable[[], T]], repeats: Mapping[str, int]
) -> Iterator[tuple[str, T]]:
    """What each run found, A B C A B C ...; those with fewer repeats are left out at the end."""
    for number in range(max(repeats.values(), default=0)):
        for name, run in runs.items():
            if number < repeats[name]:
                yield name, run()


def middle(values: list[float], digits: int = 3) -> float:
    """Median, rounded."""
    return round(statistics.median(values), digits)
