"""What the stages of a GPU measure: one JSON line a figure, on standard output.

Stages 0, 2, 4, 5, 6 and 7 of the plan in docs/gpu.md; gpu_stages.py runs each in a process of its
own. No speed is too slow: a stage fails when bytes are wrong, or something raises. Each is given a
directory of its own on the drive to measure, and returns what is to stand beside its verdict.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hpstore.checkpoint.save.accelerator import CudaStaging
from hpstore.codec import ErasureCode, choose_backend
from hpstore.errors import HpstoreError
from hpstore.format.checksum import block_digests, block_seeds
from hpstore.format.geometry import BLOCK_BYTES, Code
from hpstore.loaders.gpu.direct.cufile import CuFile
from hpstore.loaders.gpu.direct.cufile_queue import DirectArena, DirectEngine, DirectFile
from hpstore.loaders.gpu.direct.detect import Route, process_detector
from hpstore.loaders.gpu.direct.gpu_checksums import Blocks, verify
from hpstore.loaders.gpu.direct.gpu_decode import DecodeJobs, decode
from hpstore.loaders.gpu.direct.path_choice import ChoiceConfig, PathChoice, Way
from hpstore.runtime.buffers import aligned_array
from hpstore.units import GIB, KIB, MIB

FILE_BYTES = 2 * GIB
REPEATS = 7
CODES = ((4, 2), (6, 3), (8, 3), (10, 4))
CHECKED_UNIT = 64 * KIB + 520  # the last program of the kernel has little to do
SETS = 64  # of lost columns, for each number of them
CHECKED_BLOCKS = 64


class NotHere(HpstoreError):
    """A stage cannot run on this machine; the message says why."""


class WrongBytes(HpstoreError):
    """The GPU's bytes are not those that they must be."""


def write_line(record: dict[str, object]) -> None:
    """One line of JSON, out at once: the process may not live long. What libraries print without
    an end of line stays a line of its own.
    """
    sys.stdout.write("\n" + json.dumps(record, default=str) + "\n")
    sys.stdout.flush()


def say(stage: int, what: str, **figures: object) -> None:
    """A figure; rates in GB/s."""
    write_line({"stage": stage, "what": what, **figures})


def cut(tensor: torch.Tensor, part: int) -> tuple[torch.Tensor, ...]:
    """Views of `part` bytes each."""
    return torch.split(tensor, part)


def gpu_rate(nbytes: int, work: Callable[[], object]) -> float:
    """GB/s by events: the median of several, after two that do not count."""
    rates: list[float] = []
    for repeat in range(REPEATS + 2):
        # Any: torch.cuda's events are untyped
        began: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        ended: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        began.record()
        work()
        ended.record()
        ended.synchronize()
        if repeat >= 2:
            rates.append(nbytes / began.elapsed_time(ended) / 1e6)
    return round(median(rates), 2)


def wall_rate(nbytes: int, work: Callable[[], object], repeats: int = 3) -> float:
    """GB/s by the clock on the wall, the median; work() leaves nothing under way."""
    rates = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        rates.append(nbytes / (time.perf_counter() - began) / 1e9)
    return round(median(rates), 2)


def output(*command: str) -> str:
    """What a command prints, or why it does not."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)


def need_triton() -> None:
    """Raises NotHere without it."""
    if importlib.util.find_spec("triton") is None:
        raise NotHere("Triton is not installed: pip install 'hpstore[gpu]'")


def machine(directory: Path) -> str:
    """Stage 0: what everything else is measured on."""
    fields = "name,driver_version,pcie.link.gen.max,pcie.link.width.max"
    versions = {}
    for name in ("torch", "triton", "cuda-bindings", "nvidia-cufile"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    say(
        0,
        "machine",
        gpu=output("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"),
        kernel=platform.release(),
        cpus=os.cpu_count(),
        versions=versions,
        drives=output("lsblk", "-d", "-n", "-o", "NAME,TRAN,ROTA,SIZE,MODEL").splitlines(),
        mount=output("findmnt", "-n", "-o", "SOURCE,FSTYPE,OPTIONS", "-T", str(directory)),
        memlock=output("bash", "-c", "ulimit -l"),
    )
    return ""


def raw_copies(directory: Path) -> str:
    """Stage 2, ceilings: pageable, pinned by torch, page-locked mmap; both directions; 64 KiB to
    256 MiB.
    """
    size = 256 * MIB
    device = torch.empty(size, dtype=torch.uint8, device="cuda")
    mapped, cuda = aligned_array(size, populate=True), CudaStaging()
    cuda.pin(mapped)
    hosts = {
        "pageable": torch.from_numpy(aligned_array(size, populate=True)),
        "pin_memory": torch.empty(size, dtype=torch.uint8, pin_memory=True),
        "host_register": torch.from_numpy(mapped),
    }
    for name, host in hosts.items():
        for part in (64 * KIB, MIB, 4 * MIB, 256 * MIB):
            pieces = min(size // part, 64)
            pairs = list(zip(cut(device, part)[:pieces], cut(host, part)[:pieces], strict=True))

            def to_device(pairs: list[Any] = pairs) -> None:
                for on_gpu, on_host in pairs:
                    on_gpu.copy_(on_host, non_blocking=True)

            def to_host(pairs: list[Any] = pairs) -> None:
                for on_gpu, on_host in pairs:
                    on_host.copy_(on_gpu, non_blocking=True)

            nbytes = pieces * part
            say(2, name, part=part, h2d=gpu_rate(nbytes, to_device), d2h=gpu_rate(nbytes, to_host))
    torch.cuda.synchronize()
    cuda.unpin(mapped.ctypes.data)
    return ""


def decoding(directory: Path) -> str:
    """Stage 4: lost units made again are equal to those that the codec lost, and at which rate."""
    need_triton()
    for data, parity in CODES:
        say(4, "equality", k=data, m=parity, sets=check_decoding(data, parity, "cuda"))
        decoding_rates(data, parity)
    return ""


def lost_sets(data: int, parity: int) -> list[tuple[int, ...]]:
    """Of each number of lost columns, 1 to m: all sets, or SETS to twice as many, evenly spread."""
    found: list[tuple[int, ...]] = []
    for count in range(1, parity + 1):
        every = list(itertools.combinations(range(data + parity), count))
        found += every[:: max(1, len(every) // SETS)]
    return found


def check_decoding(data: int, parity: int, device: str) -> int:
    """How many sets of lost columns were tried. Survivors change from set to set. Raises
    WrongBytes where a byte of the arena is not as the codec made it.
    """
    width, unit = data + parity, CHECKED_UNIT
    columns = np.random.default_rng(0).integers(0, 256, (width, unit), np.uint8)
    ErasureCode(choose_backend()).encode(
        Code.RS_CAUCHY, parity, list(columns[:data]), list(columns[data:])
    )
    sets = lost_sets(data, parity)
    for number, lost in enumerate(sets):
        left = [column for column in range(width) if column not in lost]
        have = tuple(sorted((left[number % len(left) :] + left)[:data]))
        held = columns.copy()
        held[list(lost)] ^= 0x5A
        memory = torch.from_numpy(held).to(device).view(-1)
        jobs = DecodeJobs(
            data=data,
            parity=parity,
            have=have,
            want=lost,
            length=unit,
            sources=np.array([have]) * unit,
            targets=np.array([lost]) * unit,
        )
        decode(memory, jobs)
        if not np.array_equal(memory.cpu().numpy().reshape(width, unit), columns):
            raise WrongBytes(f"columns {lost} of {data}+{parity} from {have} differ")
    return len(sets)


def decoding_rates(data: int, parity: int) -> None:
    """GB/s of survivors read, for one and for m lost columns; 64 stripes of 1 MiB units."""
    unit, stripes = MIB, 64
    width = data + parity
    memory = torch.randint(0, 256, (width * stripes * unit,), dtype=torch.uint8, device="cuda")
    for lost in (1, parity):
        have, want = tuple(range(lost, lost + data)), tuple(range(lost))
        rows = np.arange(stripes)[:, None] * width * unit
        jobs = DecodeJobs(
            data=data,
            parity=parity,
            have=have,
            want=want,
            length=unit,
            sources=rows + np.array(have) * unit,
            targets=rows + np.array(want) * unit,
        )
        rate = gpu_rate(data * stripes * unit, lambda jobs=jobs: decode(memory, jobs))  # type: ignore[misc]  # a default argument
        say(4, "decode", k=data, m=parity, lost=lost, survivors=rate)


def checksums(directory: Path) -> str:
    """Stage 5: right blocks are good and wrong ones bad; GB/s of 64 KiB blocks."""
    need_triton()
    say(5, "equality", blocks=check_checksums("cuda"))
    memory = torch.randint(0, 256, (GIB,), dtype=torch.uint8, device="cuda")
    starts = np.arange(0, GIB, 64 * KIB)
    blocks = Blocks(
        starts=starts,
        lengths=np.full(len(starts), 64 * KIB),
        seeds=np.arange(len(starts), dtype=np.uint64),
        expected=np.zeros(len(starts), np.uint64),
    )
    say(5, "xxh3 by block", rate=gpu_rate(GIB, lambda: verify(memory, blocks)))
    return ""


def check_checksums(device: str) -> int:
    """How many blocks of a column were checked, the last one short. Raises WrongBytes unless all
    are good by the host's sums, and the one alone is bad that has a wrong sum or a flipped bit.
    """
    count, seed, wrong = CHECKED_BLOCKS, 7, CHECKED_BLOCKS // 2
    nbytes = count * BLOCK_BYTES - BLOCK_BYTES // 2
    noise = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
    starts = np.arange(0, nbytes, BLOCK_BYTES)
    sums = block_digests(seed, 0, noise.data)

    def good(data: NDArray[np.uint8], expected: NDArray[np.uint64]) -> list[bool]:
        blocks = Blocks(
            starts=starts,
            lengths=np.minimum(nbytes - starts, BLOCK_BYTES),
            seeds=block_seeds(seed, 0, count),
            expected=expected,
        )
        found: list[bool] = verify(torch.from_numpy(data).to(device), blocks).tolist()
        return found

    other, flipped = sums.copy(), noise.copy()
    other[wrong] ^= np.uint64(1)
    flipped[wrong * BLOCK_BYTES + 100] ^= 1
    but_one = [block != wrong for block in range(count)]
    for what, found, wanted in (
        ("right blocks", good(noise, sums), [True] * count),
        ("a wrong sum", good(noise, other), but_one),
        ("a flipped bit", good(flipped, sums), but_one),
    ):
        if found != wanted:
            differ = [at for at in range(count) if found[at] != wanted[at]]
            raise WrongBytes(f"{what}: the GPU is wrong about blocks {differ}")
    return count


def make_file(path: Path) -> int:
    """A file of noise that is on the drive; returns a descriptor for direct reads."""
    noise = aligned_array(64 * MIB)
    noise[:] = np.random.default_rng(0).integers(0, 256, len(noise), np.uint8)
    fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_DIRECT)
    for at in range(0, FILE_BYTES, len(noise)):
        noise[:8] = np.frombuffer(at.to_bytes(8, "little"), np.uint8)
        os.pwritev(fd, [noise.data], at)
    os.fsync(fd)
    return fd


class Pinned:
    """The other path: direct reads into page-locked memory by threads, copies on a side stream."""

    def __init__(self, fd: int, threads: int, size: int) -> None:
        self.fd, self.size, self.cuda = fd, size, CudaStaging()
        self.slots = aligned_array(2 * threads * size, populate=True)
        self.cuda.pin(self.slots)
        self.host = cut(torch.from_numpy(self.slots), size)
        self.events: list[Any] = [None] * len(self.host)  # Any: CUDA events are untyped
        self.pool = ThreadPoolExecutor(threads)
        self.stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def read(self, target: torch.Tensor, first: int, nbytes: int) -> None:
        """File bytes [first, first + nbytes) into `target`; waits for them."""
        count = nbytes // self.size

        def one(lane: int) -> None:
            lanes = len(self.host) // 2
            for number in range(lane, count, lanes):
                slot = lane * 2 + number // lanes % 2
                if self.events[slot] is not None:
                    self.events[slot].synchronize()
                at = number * self.size
                os.preadv(self.fd, [self.host[slot].numpy().data], first + at)
                with torch.cuda.stream(self.stream):
                    target[at : at + self.size].copy_(self.host[slot], non_blocking=True)
                    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
                    event.record(self.stream)
                    self.events[slot] = event

        list(self.pool.map(one, range(len(self.host) // 2)))
        self.stream.synchronize()

    def close(self) -> None:
        """Threads and page locks."""
        self.pool.shutdown()
        self.cuda.unpin(self.slots.ctypes.data)


def read_direct(
    engine: DirectEngine, file: DirectFile, arena: DirectArena, first: int, nbytes: int, size: int
) -> None:
    """File bytes [first, first + nbytes) into the arena; waits for them."""
    reads = [engine.read(file, first + at, size, arena, at) for at in range(0, nbytes, size)]
    for read in reads:
        read.result()


def cufile_beside_pinned(directory: Path) -> str:
    """Stage 6: 1 MiB to 16 MiB with 1, 4 and 16 threads by both paths in turns; then the measured
    choice. By which route cuFile reads is recorded; none is no failure.
    """
    found = process_detector().detect(str(directory))
    say(6, "detection", **{k: v for k, v in found.as_dict().items() if k != "machine"})
    fd = make_file(directory / "file")
    batch = 512 * MIB
    target = torch.empty(batch, dtype=torch.uint8, device="cuda")
    for threads in (1, 4, 16):
        for size in (MIB, 4 * MIB, 16 * MIB):
            pinned = Pinned(fd, threads, size)
            rate = wall_rate(batch, lambda p=pinned: p.read(target, 0, batch))  # type: ignore[misc]  # a default argument
            pinned.close()
            if found.route is Route.OFF:
                say(6, "read", threads=threads, size=size, pinned=rate, direct=found.reason)
                continue
            with (
                DirectEngine(CuFile(), threads=threads, max_pending=1024) as engine,
                engine.register_file(fd) as file,
                engine.allocate(batch) as arena,
            ):
                before = engine.counters()
                direct = wall_rate(
                    batch,
                    lambda e=engine, f=file, a=arena, s=size: read_direct(e, f, a, 0, batch, s),  # type: ignore[misc]  # default arguments
                )
                say(
                    6,
                    "read",
                    threads=threads,
                    size=size,
                    pinned=rate,
                    direct=direct,
                    before=before,
                    after=engine.counters(),
                )
                if not torch.equal(arena.tensor, target):
                    raise WrongBytes("cuFile and pinned memory brought different bytes")
    if found.route is not Route.OFF:
        _choose(fd, batch)
    os.close(fd)
    return f"cuFile {found.route}: {found.reason}"


def _choose(fd: int, batch: int) -> None:
    """Batches of 512 MiB by whatever the policy says; its figures."""
    choice = PathChoice(ChoiceConfig(trial_batches=4, again_batches=8))
    target = torch.empty(batch, dtype=torch.uint8, device="cuda")
    pinned = Pinned(fd, 16, 4 * MIB)
    with (
        DirectEngine(CuFile()) as engine,
        engine.register_file(fd) as file,
        engine.allocate(batch) as arena,
    ):
        for number in range(24):
            first = number * batch % FILE_BYTES
            way = choice.choose("file")
            began = time.perf_counter()
            if way is Way.DIRECT:
                read_direct(engine, file, arena, first, batch, 4 * MIB)
            else:
                pinned.read(target, first, batch)
            choice.record("file", way, batch, time.perf_counter() - began)
    pinned.close()
    say(6, "choice", **choice.figures()[0].as_dict())


def torch_gds(directory: Path) -> str:
    """Stage 7: torch.cuda.gds with 1 and 4 threads: does it hold the GIL?"""
    found = process_detector().detect(str(directory))
    if not hasattr(torch.cuda, "gds"):
        raise NotHere(f"torch {torch.__version__} has no torch.cuda.gds")
    if found.route is Route.OFF:
        raise NotHere(f"cuFile is off: {found.reason}")
    os.close(make_file(directory / "file"))
    parts = [torch.empty(64 * MIB, dtype=torch.uint8, device="cuda") for _ in range(16)]
    gds = torch.cuda.gds.GdsFile(str(directory / "file"), os.O_RDONLY | os.O_DIRECT)

    def load(number: int) -> None:
        storage = parts[number].untyped_storage()
        gds.load_storage(storage, number * 64 * MIB)  # type: ignore[arg-type]  # torch's own type

    for threads in (1, 4):
        with ThreadPoolExecutor(threads) as pool:
            rate = wall_rate(GIB, lambda pool=pool: list(pool.map(load, range(16))))  # type: ignore[misc]  # a default argument
        say(7, "torch.cuda.gds", threads=threads, rate=rate)
    return ""
