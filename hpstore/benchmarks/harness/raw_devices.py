"""put and get against what the same directories take raw through O_DIRECT in the same run."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np

import hpstore
from hpstore.benchmarks.harness.measure import Options, interleave, rates, ratio, seconds
from hpstore.codec.galois import Bytes
from hpstore.config import Settings, load_config
from hpstore.runtime.buffers import aligned_array
from hpstore.units import GIB, MIB, div_ceil, round_up

DATA, PARITY = 4, 2
BLOCK_BYTES = 4 * MIB
MANY_OBJECTS = 10_000


@contextmanager
def workspace(options: Options) -> Iterator[Path]:
    """A directory that is removed afterwards."""
    if options.directory is not None:
        options.directory.mkdir(parents=True, exist_ok=True)
    path = Path(tempfile.mkdtemp(prefix="hpstore-bench-", dir=options.directory))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


class RawFiles:
    """The devices without hpstore: one file a directory, O_DIRECT, fallocate, fdatasync."""

    def __init__(self, directories: list[Path], file_bytes: int, threads: int) -> None:
        self._paths = [directory / "raw" for directory in directories]
        self._bytes, self._threads = file_bytes, threads

    def _each_block(self, act: Callable[[int, int, int], object], fds: list[int]) -> None:
        jobs = [
            (fd, file, offset)
            for offset in range(0, self._bytes, BLOCK_BYTES)
            for file, fd in enumerate(fds)
        ]
        with ThreadPoolExecutor(self._threads) as pool:
            list(pool.map(lambda job: act(*job), jobs))

    def write(self, source: Bytes, *, new: bool) -> float:
        """Seconds to write and sync all files, into new ones or over the old ones."""
        if new:
            self.remove()
        began = time.perf_counter()
        flags = os.O_WRONLY | os.O_CREAT | os.O_DIRECT
        fds = [os.open(path, flags, 0o600) for path in self._paths]

        def act(fd: int, file: int, offset: int) -> None:
            count = min(BLOCK_BYTES, self._bytes - offset)
            at = (file * self._bytes + offset) % (len(source) - BLOCK_BYTES) // 4096 * 4096
            if os.pwrite(fd, source[at : at + count].data, offset) != count:
                raise OSError("short write")

        for fd in fds:
            os.posix_fallocate(fd, 0, self._bytes)
        self._each_block(act, fds)
        for fd in fds:
            os.fdatasync(fd)
            os.close(fd)
        return time.perf_counter() - began

    def read(self, target: Bytes, count: int) -> float:
        """Seconds to read the first `count` files."""
        began = time.perf_counter()
        fds = [os.open(path, os.O_RDONLY | os.O_DIRECT) for path in self._paths[:count]]

        def act(fd: int, file: int, offset: int) -> None:
            size = min(BLOCK_BYTES, self._bytes - offset)
            at = (file * self._bytes + offset) % (len(target) - BLOCK_BYTES) // 4096 * 4096
            if os.preadv(fd, [target[at : at + size].data], offset) != size:
                raise OSError("short read")

        self._each_block(act, fds)
        for fd in fds:
            os.close(fd)
        return time.perf_counter() - began

    def remove(self) -> None:
        """Delete the files."""
        for path in self._paths:
            path.unlink(missing_ok=True)


def bench_devices(options: Options) -> dict[str, object]:
    """put new and recycled, get healthy and degraded, into memory that is there and as bytes, open
    with many objects."""
    with workspace(options) as root:
        results = bench_put_get(root / "large", options)
        results |= bench_open(root / "many")
    return results


def bench_put_get(root: Path, options: Options) -> dict[str, object]:
    """Large objects on a 4+2 pool of six directories."""
    root.mkdir(parents=True)
    size = round_up(options.size_bytes, BLOCK_BYTES)
    source, target = aligned_array(size, populate=True), aligned_array(size, populate=True)
    rng = np.random.default_rng(0)
    for at in range(0, size, 64 * MIB):
        chunk = source[at : at + 64 * MIB]
        chunk[:] = np.frombuffer(rng.bytes(len(chunk)), np.uint8)
    fresh = make_pool(root / "fresh", recycle_bytes=0)
    reused = make_pool(root / "reused", recycle_bytes=64 * GIB)
    file_bytes = round_up(div_ceil(size, DATA), 4096)
    threads = fresh.config.settings.workers_per_device * (DATA + PARITY)
    places = [root / "fresh" / f"d{i}" for i in range(DATA + PARITY)]
    raw = RawFiles(places, file_bytes, threads)
    writes = time_writes(raw, fresh, reused, source, options.repeats)
    raw.write(source, new=True)
    degraded = degraded_pool(root / "fresh")
    reads = interleave(
        {
            "raw read": lambda: raw.read(target, DATA),
            "get": lambda: seconds(lambda: fresh.read_into("object", target.data)),
            "get degraded": lambda: seconds(lambda: degraded.read_into("object", target.data)),
            "get as bytes": lambda: seconds(lambda: fresh.get("object")),
        },
        options.repeats,
    )
    if not np.array_equal(source, target):
        raise AssertionError("degraded get returned other bytes")
    pools = (fresh, reused, degraded)
    peak = max(pool._store.buffers.budget.peak_bytes for pool in pools)
    for pool in pools:
        pool.close()
    spread = file_bytes * (DATA + PARITY)
    nbytes = {"raw new files": spread, "raw overwrite": spread, "put": size, "put recycled": size}
    return {
        "object_bytes": size,
        "threads": threads,
        "rates": rates(writes, nbytes) | rates(reads, dict.fromkeys(reads, size)),
        "put_to_raw_new": ratio(writes["put"], writes["raw new files"]),
        "put_recycled_to_raw_overwrite": ratio(writes["put recycled"], writes["raw overwrite"]),
        "put_recycled_to_put_new": ratio(writes["put recycled"], writes["put"]),
        "get_to_raw_read": ratio(reads["get"], reads["raw read"]),
        "get_degraded_to_get": ratio(reads["get degraded"], reads["get"]),
        "get_as_bytes_to_get": ratio(reads["get as bytes"], reads["get"]),
        "memory_peak_bytes": peak,
        "memory_budget_bytes": fresh.config.settings.memory_bytes,
    }


def time_writes(
    raw: RawFiles, fresh: hpstore.Pool, reused: hpstore.Pool, source: Bytes, repeats: int
) -> dict[str, list[float]]:
    """Seconds of raw writes and puts, into new files and over old ones."""

    def put(pool: hpstore.Pool) -> float:
        if pool.exists("object"):
            pool.delete("object")
        return seconds(lambda: pool.put("object", source.data))

    put(reused)  # so that there is something to recycle
    return interleave(
        {
            "raw new files": lambda: raw.write(source, new=True),
            "put": lambda: put(fresh),
            "raw overwrite": lambda: raw.write(source, new=False),
            "put recycled": lambda: put(reused),
        },
        repeats,
    )


def make_pool(root: Path, *, recycle_bytes: int) -> hpstore.Pool:
    """A 4+2 pool over six directories."""
    root.mkdir(parents=True)
    return hpstore.create(
        [str(root / f"d{i}") for i in range(DATA + PARITY)],
        data=DATA,
        parity=PARITY,
        config=root / "pool.toml",
        settings=Settings(recycle_bytes=recycle_bytes),
    )


def degraded_pool(root: Path) -> hpstore.Pool:
    """The same pool as seen by one to whom m of its devices are missing."""
    held = [d for d in sorted(root.glob("d[0-9]")) if next(d.glob("objects/object/@*.c0[01].*"), 0)]
    config = linked_pool(root, [d.name for d in held[:PARITY]])
    return hpstore.open(config, read_only=True)


def linked_pool(root: Path, lost: Sequence[str]) -> Path:
    """pool.toml of the pool in `root` without the devices `lost` (links, no copies)."""
    other = root / "-".join(["without", *lost])
    other.mkdir(exist_ok=True)
    lines = []
    for directory in sorted(root.glob("d[0-9]")):
        link = other / directory.name
        if directory.name not in lost and not link.is_symlink():
            link.symlink_to(directory)
        lines.append(f'"{link}"')
    config = other / "pool.toml"
    key = load_config(root / "pool.toml").key
    line = "" if key is None else f'key = "{key.text}"\n'
    config.write_text(f'name = "degraded"\n{line}devices = [{", ".join(lines)}]\n')
    return config


def bench_open(root: Path) -> dict[str, object]:
    """Opening a pool that holds many small objects."""
    with make_pool(root, recycle_bytes=0) as pool, ThreadPoolExecutor(8) as threads:
        began = time.perf_counter()
        list(
            threads.map(
                lambda i: pool.put(f"many/{i % 100:02d}/{i:06d}", b"x" * 100), range(MANY_OBJECTS)
            )
        )
        puts = MANY_OBJECTS / (time.perf_counter() - began)
    times = []
    for _ in range(5):
        began = time.perf_counter()
        opened = hpstore.open(root / "pool.toml")
        times.append(time.perf_counter() - began)
        opened.close()
    return {
        "open_seconds_10000_objects": round(sorted(times)[2], 4),
        "small_puts_per_second_8_threads": round(puts, 1),
    }
