"""The kernels against the codec and xxhash: `kernels.py cpu` with TRITON_INTERPRET=1, or `cuda`.

Prints one JSON object: by the name of each check, "" or what was wrong. The variable must be set
before Triton is first imported by anybody, hence a process of its own.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

import hpstore
from hpstore.codec import ErasureCode, choose_backend
from hpstore.codec.galois import Bytes
from hpstore.format.geometry import Code
from hpstore.loaders import Dataset
from hpstore.loaders.gpu.direct.gpu_checksums import Blocks, verify
from hpstore.loaders.gpu.direct.gpu_decode import DecodeJobs, decode
from hpstore.loaders.gpu.gpu_device import CudaGpu
from hpstore.testing.fake_gpu import FakeGpu
from hpstore.units import KIB
from tests.integration.direct_cases import cpu_epoch, gpu_epoch, holders, write_direct
from tests.integration.loader_cases import same

UNIT = 4096 + 520  # two programs a unit, the second one almost empty
GUARD = 64
RNG = np.random.default_rng(0)
DEVICE = sys.argv[1] if len(sys.argv) > 1 else "cpu"


def decoded(memory: Bytes, jobs: DecodeJobs) -> None:
    """decode() on the device, in place."""
    tensor = torch.from_numpy(memory).to(DEVICE)
    decode(tensor, jobs)
    memory[:] = tensor.cpu().numpy()


def checked(memory: Bytes, blocks: Blocks) -> list[bool]:
    """verify() on the device."""
    good: list[bool] = verify(torch.from_numpy(memory).to(DEVICE), blocks).tolist()
    return good


def stripe(data: int, parity: int) -> Bytes:
    """All columns of a random stripe, by the codec in use: (k + m, UNIT)."""
    columns = RNG.integers(0, 256, (data + parity, UNIT), np.uint8)
    ErasureCode(choose_backend()).encode(
        Code.RS_CAUCHY, parity, list(columns[:data]), list(columns[data:])
    )
    return columns


def lost_again(data: int, parity: int, lost: tuple[int, ...], choose: int) -> str:
    """Lose columns, decode them in place; `choose` rotates which survivors are used."""
    columns = stripe(data, parity)
    left = [i for i in range(data + parity) if i not in lost]
    have = tuple(sorted((left[choose % len(left) :] + left)[:data]))
    memory = np.full((data + parity) * UNIT + GUARD, 0xA5, np.uint8)
    held = memory[:-GUARD].reshape(data + parity, UNIT)
    held[:] = columns
    held[list(lost)] = 0x5A
    jobs = DecodeJobs(
        data=data,
        parity=parity,
        have=have,
        want=lost,
        length=UNIT,
        sources=np.array([[i * UNIT for i in have]]),
        targets=np.array([[i * UNIT for i in lost]]),
    )
    decoded(memory, jobs)
    if not (held == columns).all():
        return f"columns {lost} of {data}+{parity} from {have} differ"
    return "" if (memory[-GUARD:] == 0xA5).all() else "bytes behind the units were overwritten"


def lost_sets(data: int, parity: int, step: int) -> Iterator[tuple[int, ...]]:
    """Every `step`-th set of 1..m lost columns."""
    every = itertools.chain.from_iterable(
        itertools.combinations(range(data + parity), count) for count in range(1, parity + 1)
    )
    return itertools.islice(every, 0, None, step)


def decodes(data: int, parity: int, step: int) -> Callable[[], str]:
    """A check over lost sets."""

    def run() -> str:
        answers = (
            lost_again(data, parity, lost, number)
            for number, lost in enumerate(lost_sets(data, parity, step))
        )
        return next((answer for answer in answers if answer), "")

    return run


def several_jobs() -> str:
    """Three stripes in one call, their units scattered over the arena in any order."""
    stripes = [stripe(4, 2) for _ in range(3)]
    places = RNG.permutation(18).reshape(3, 6) * UNIT
    memory = np.zeros(18 * UNIT, np.uint8)
    for columns, at in zip(stripes, places, strict=True):
        for i in (0, 2, 3, 5):
            memory[at[i] : at[i] + UNIT] = columns[i]
    jobs = DecodeJobs(
        data=4,
        parity=2,
        have=(0, 2, 3, 5),
        want=(1, 4),
        length=UNIT,
        sources=places[:, [0, 2, 3, 5]],
        targets=places[:, [1, 4]],
    )
    decoded(memory, jobs)
    for columns, at in zip(stripes, places, strict=True):
        for i in range(6):
            if not (memory[at[i] : at[i] + UNIT] == columns[i]).all():
                return f"unit {i} differs"
    return ""


def noise_blocks() -> tuple[Bytes, Blocks]:
    """Blocks of many lengths and seeds in 600 KB of noise, with xxhash's answers.

    The last one has the length of a record of 147 KiB.
    """
    memory = RNG.integers(0, 256, 600_000, np.uint8)
    starts = np.array([0, 8, 65536, 131072 + 4096, 200000, 334464, 400000])
    lengths = np.array([1024, 4096, 65536, 2048, 65536 - 4096, 65536, 147 * 1024])
    seeds = RNG.integers(0, 2**64, 7, np.uint64)
    seeds[0], seeds[3] = 0, 2**64 - 1
    expected = [
        xxhash.xxh3_64_intdigest(memory[start : start + length].tobytes(), int(seed))
        for start, length, seed in zip(starts, lengths, seeds, strict=True)
    ]
    return memory, Blocks(
        starts=starts, lengths=lengths, seeds=seeds, expected=np.array(expected, np.uint64)
    )


def digests() -> str:
    """Good blocks are good."""
    memory, blocks = noise_blocks()
    good = checked(memory, blocks)
    return "" if all(good) else f"{good}"


def flips() -> str:
    """One flipped bit anywhere in a block makes that block bad, and no other one."""
    memory, blocks = noise_blocks()
    for number in range(len(blocks.starts)):
        start, length = int(blocks.starts[number]), int(blocks.lengths[number])
        for at in (start + length - 1, start + int(RNG.integers(length))):
            if sum(s <= at < s + n for s, n in zip(blocks.starts, blocks.lengths, strict=True)) > 1:
                continue  # the first two blocks overlap
            damaged = memory.copy()
            damaged[at] ^= 1 << int(RNG.integers(8))
            good = checked(damaged, blocks)
            if good != [n != number for n in range(7)]:
                return f"byte {at} of block {number}: {good}"
    return ""


class KernelGpu(FakeGpu):
    """The stand-in with the kernels of the GPU, which the interpreter runs one at a time."""

    one = threading.Lock()

    def decode(self, memory: torch.Tensor, jobs: DecodeJobs) -> None:
        with self.one:
            decode(memory, jobs)

    def verify(self, memory: torch.Tensor, blocks: Blocks) -> torch.Tensor:
        with self.one:
            self.verified += len(blocks.starts)
            return verify(memory, blocks)


def an_epoch() -> str:
    """Through DataLoader with a device missing: as the loader of the CPU, decoded and checked."""
    for kind, count in (("records", 22), ("blocks", 14)):  # two whole stripes of each
        with tempfile.TemporaryDirectory() as directory:
            root = Path(directory)
            places, config = [root / f"d{i}" for i in range(3)], root / "pool.toml"
            with hpstore.create(places, data=2, parity=1, config=config) as pool:
                lost = holders(root, write_direct(pool, kind, count, 64 * KIB), 1)
            lost[0].rename(root / "away")
            with hpstore.open(config) as pool:
                data = Dataset(pool, kind)
                gpu: Any = CudaGpu(torch.device("cuda")) if DEVICE == "cuda" else KernelGpu()
                found, stats = gpu_epoch(data, gpu)
                if not same(found, cpu_epoch(data)):
                    return f"an epoch of {kind} differs"
                if DEVICE != "cuda" and not (stats["units_decoded"] and gpu.verified):
                    return f"nothing of {kind} went through the kernels: {stats}"
    return ""


CHECKS: dict[str, Callable[[], str]] = {
    "decode-4+2-all": decodes(4, 2, 1),
    "decode-8+3-some": decodes(8, 3, 9),
    "decode-2+1-all": decodes(2, 1, 1),
    "decode-10+4-few": decodes(10, 4, 200),
    "decode-jobs": several_jobs,
    "digests": digests,
    "flips": flips,
    "epoch": an_epoch,
}

if __name__ == "__main__":
    json.dump({name: check() for name, check in CHECKS.items()}, sys.stdout)
