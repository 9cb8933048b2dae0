"""Blocks checked on the GPU, so that bytes that never pass the CPU are no less verified.

The checksums are those of the column files (docs/format.md): XXH3-64, one for each 64 KiB block.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from hpstore.errors import DirectUnavailable

STEP_BYTES = 1024  # lengths are multiples: all blocks of a column are, of 4 KiB
MAX_LENGTH_BYTES = 64 << 20  # of a unit, and with it of a record; blocks of a column are smaller
_WORD_BYTES = 8

# xxHash's default secret, XXH3_kSecret, and its primes (doc/xxhash_spec.md)
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_STARTS = (
    0xC2B2AE3D,
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x85EBCA77,
    0x27D4EB2F165667C5,
    0x9E3779B1,
)
_END = 0x165667919E3779F9


def _table() -> NDArray[np.int64]:
    secret = np.frombuffer(_SECRET, "<u8")
    return np.concatenate([secret, np.array([*_STARTS, _END], np.uint64)]).view(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Ranges of one arena with what their checksums must be; arrays of one length.

    `starts` int64 byte offsets, multiples of 8; `lengths` int64, multiples of 1 KiB up to 64 MiB
    (records of a dataset are checked like blocks of a column, with seed 0); `seeds` and
    `expected` uint64.
    """

    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    seeds: NDArray[np.uint64]
    expected: NDArray[np.uint64]

    def check(self, nbytes: int) -> None:
        """Raise ValueError unless all blocks lie in `nbytes` bytes."""
        if len({len(self.starts), len(self.lengths), len(self.seeds), len(self.expected)}) != 1:
            raise ValueError("starts, lengths, seeds and expected differ in length")
        if not len(self.starts):
            return
        if (self.starts % _WORD_BYTES).any() or (self.lengths % STEP_BYTES).any():
            raise ValueError("blocks begin at multiples of 8 and are multiples of 1 KiB long")
        if self.lengths.min() < STEP_BYTES or self.lengths.max() > MAX_LENGTH_BYTES:
            raise ValueError(f"blocks have from {STEP_BYTES} to {MAX_LENGTH_BYTES} bytes")
        if self.starts.min() < 0 or (self.starts + self.lengths).max() > nbytes:
            raise ValueError(f"blocks are not inside {nbytes} bytes")


def verify(memory: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """Enqueue the check on the current stream; (n,) bool on the device, True where a block is good.

    `memory`: an arena's tensor, (nbytes,) uint8, contiguous; its bytes must not change before the
    stream is past it. Raises ValueError, and DirectUnavailable without Triton.
    """
    if memory.dtype is not torch.uint8 or memory.dim() != 1 or not memory.is_contiguous():
        raise ValueError(f"memory of {memory.dtype} {tuple(memory.shape)}, not (n,) uint8")
    if memory.data_ptr() % _WORD_BYTES:
        raise ValueError("memory does not begin at a multiple of 8")
    blocks.check(memory.numel())
    try:
        from hpstore.loaders.gpu.direct import kernels
    except ImportError as error:
        raise DirectUnavailable(
            f"Triton is not here ({error}): pip install 'hpstore[gpu]', or read over pinned memory"
        ) from error
    device, count = memory.device, len(blocks.starts)
    digests = torch.empty(count, dtype=torch.int64, device=device)
    if not count:
        return digests.bool()
    whole = memory.numel() // _WORD_BYTES * _WORD_BYTES

    def on_device(array: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)

    kernels.digest[(count,)](
        memory[:whole].view(torch.int64),
        on_device(blocks.starts // _WORD_BYTES),
        on_device(blocks.lengths),
        on_device(blocks.seeds.view(np.int64)),
        on_device(_table()),
        digests,
        num_warps=1,
    )
    return digests == on_device(blocks.expected.view(np.int64))
