"""The device without any loader: sequential and random direct reads, and one copy of a batch."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from hpstore.benchmarks.loader.loader_data import BATCH, Data
from hpstore.benchmarks.loader.loader_peers import write_flat
from hpstore.runtime.buffers import aligned_array
from hpstore.units import GIB, MIB, round_up

BLOCK_BYTES = 4 * MIB
FIO_SECONDS = 60.0
THREADS = 32
SECONDS, SMALL_SECONDS = 3.0, 0.5  # that random reads are measured: of much and of few data


class Raw:
    """One file with all records of a dataset, read through O_DIRECT."""

    def __init__(self, path: Path, data: Data) -> None:
        self._path, self._data = path, data
        self._seconds = SECONDS if data.nbytes >= GIB else SMALL_SECONDS
        mean = data.nbytes // data.rows
        self.record_bytes = round_up(mean, 4096)

    def write(self) -> None:
        """Make the file; it may be there, as a peer's."""
        if not self._path.exists():
            self._path.parent.mkdir(exist_ok=True)
            write_flat(self._path, self._data)
            os.sync()

    def sequential(self) -> float:
        """Return bytes per second: blocks of 4 MiB in order, 8 threads."""
        size = self._path.stat().st_size // BLOCK_BYTES * BLOCK_BYTES or BLOCK_BYTES
        blocks = range(0, size, BLOCK_BYTES)
        memory = threading.local()

        def read(fd: int, at: int) -> int:
            if not hasattr(memory, "block"):
                memory.block = aligned_array(BLOCK_BYTES, populate=True)
            return os.preadv(fd, [memory.block.data], at)

        with self._opened() as fd, ThreadPoolExecutor(8) as threads:
            began = time.perf_counter()
            total = sum(threads.map(lambda at: read(fd, at), blocks))
            return total / (time.perf_counter() - began)

    def random(self) -> float:
        """Return reads per second of one record's bytes each, at random places, by 32 threads."""
        end = time.perf_counter() + self._seconds
        places = max(1, self._path.stat().st_size // self.record_bytes)

        def read(fd: int, seed: int) -> int:
            block = aligned_array(self.record_bytes, populate=True)
            at = np.random.default_rng(seed).integers(0, places, 100_000) * self.record_bytes
            count = 0
            while time.perf_counter() < end:
                os.preadv(fd, [block.data], int(at[count % len(at)]))
                count += 1
            return count

        with self._opened() as fd, ThreadPoolExecutor(THREADS) as threads:
            began = time.perf_counter()
            total = sum(threads.map(lambda seed: read(fd, seed), range(THREADS)))
            return total / (time.perf_counter() - began)

    def fio(self) -> tuple[float | None, str]:
        """Measure the same by fio, io_uring at depth 32: reads per second, or None and why not."""
        program = shutil.which("fio")
        if program is None:
            return None, "fio is not installed: the figure of 32 threads stands in"
        try:
            done = subprocess.run(
                [
                    program,
                    "--name=read",
                    f"--filename={self._path}",
                    "--rw=randread",
                    "--direct=1",
                    f"--bs={self.record_bytes}",
                    "--ioengine=io_uring",
                    "--iodepth=32",
                    "--time_based",
                    f"--runtime={max(1, round(self._seconds))}",
                    "--readonly",
                    "--allow_file_create=0",
                    "--norandommap",
                    "--output-format=json",
                ],
                capture_output=True,
                text=True,
                timeout=FIO_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return None, f"fio did not end within {FIO_SECONDS:g} s"
        try:
            found = json.loads(done.stdout[done.stdout.index("{") :])
            return float(found["jobs"][0]["read"]["iops"]), ""
        except (ValueError, KeyError, IndexError):
            words = (done.stderr or done.stdout).strip().splitlines()
            return None, f"fio failed: {words[0] if words else done.returncode}"

    def copy(self) -> float:
        """Return samples per second of one copy of a batch, memory to memory, one thread."""
        source = aligned_array(self.record_bytes * BATCH, populate=True)
        target = aligned_array(self.record_bytes * BATCH, populate=True)
        times = []
        for _ in range(9):
            began = time.perf_counter()
            np.copyto(target, source)
            times.append(time.perf_counter() - began)
        return BATCH / sorted(times)[4]

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        fd = os.open(self._path, os.O_RDONLY | os.O_DIRECT)
        try:
            yield fd
        finally:
            os.close(fd)
