"""Lost units made again on the GPU, from k others that reads have put into the same arena.

The matrices are those of hpstore.codec; only the arithmetic runs elsewhere. Worth it when the
bytes are on the GPU already: on the way over host memory the CPU decodes them faster than PCIe
carries them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from hpstore.codec.galois import recovery_matrix
from hpstore.errors import DirectUnavailable

WORD_BYTES = 4
BLOCK_WORDS = 1024  # of a program: 8 words a thread, so that 8 rows stay in registers
_WARPS = 4

Columns = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeJobs:
    """Byte ranges of one arena that are decoded by one matrix, all of one length.

    `sources` (jobs, k) and `targets` (jobs, lost) are int64 byte offsets, multiples of 4, of
    columns `have` and `want`; `length` is a multiple of 4. Targets overlap nothing.
    """

    data: int
    parity: int
    have: Columns
    want: Columns
    sources: NDArray[np.int64]
    targets: NDArray[np.int64]
    length: int

    def check(self, nbytes: int) -> None:
        """Raise ValueError unless all of it lies in `nbytes` bytes and nothing is overwritten."""
        if self.sources.shape != (len(self.sources), self.data) or self.targets.shape != (
            len(self.sources),
            len(self.want),
        ):
            raise ValueError(
                f"sources {self.sources.shape} and targets {self.targets.shape} do not fit "
                f"{self.data} given and {len(self.want)} wanted columns"
            )
        if not 1 <= len(self.want) <= self.parity or set(self.want) & set(self.have):
            raise ValueError(f"columns {self.want} cannot be made from {self.have}")
        every = np.concatenate([self.sources.ravel(), self.targets.ravel()])
        if self.length < 1 or self.length % WORD_BYTES or (every % WORD_BYTES).any():
            raise ValueError(f"offsets and length {self.length} must be multiples of {WORD_BYTES}")
        if len(every) and (every.min() < 0 or every.max() > nbytes - self.length):
            raise ValueError(f"units of {self.length} bytes are not inside {nbytes} bytes")
        starts = np.sort(every)
        is_target = np.isin(starts, self.targets)
        close = np.diff(starts) < self.length
        if (close & (is_target[1:] | is_target[:-1])).any():
            raise ValueError("a target overlaps another unit")


@lru_cache(maxsize=1024)
def _factors(data: int, parity: int, have: Columns, want: Columns) -> NDArray[np.int32]:
    """(k, rows): column j's factor in each wanted column; rows padded to a power of two."""
    matrix = recovery_matrix(data, parity, have, want)
    rows = 1 << (len(want) - 1).bit_length()
    padded = np.zeros((data, rows), np.int32)
    padded[:, : len(want)] = matrix.T
    return padded


def decode(memory: torch.Tensor, jobs: DecodeJobs) -> None:
    """Enqueue the making of the wanted columns on the current stream of `memory`'s device.

    `memory`: an arena's tensor, (nbytes,) uint8, contiguous. Sources and targets must not change,
    nor be freed, before the stream is past it. Raises ValueError, and DirectUnavailable without
    Triton.
    """
    nbytes = memory.numel()
    if memory.dtype is not torch.uint8 or memory.dim() != 1 or not memory.is_contiguous():
        raise ValueError(f"memory of {memory.dtype} {tuple(memory.shape)}, not (n,) uint8")
    if memory.data_ptr() % WORD_BYTES:
        raise ValueError("memory does not begin at a multiple of 4")
    jobs.check(nbytes)
    try:
        from hpstore.loaders.gpu.direct import kernels
    except ImportError as error:
        raise DirectUnavailable(
            f"Triton is not here ({error}): pip install 'hpstore[gpu]', or decode on the CPU"
        ) from error
    if not len(jobs.sources):
        return
    device = memory.device
    factors = _factors(jobs.data, jobs.parity, jobs.have, jobs.want)
    words = jobs.length // WORD_BYTES
    grid = (-(-words // BLOCK_WORDS), len(jobs.sources))

    def words_on_device(offsets: NDArray[np.int64]) -> torch.Tensor:
        # in rows: indexing by columns gives arrays that are stored by columns
        places = np.ascontiguousarray(offsets // WORD_BYTES)
        return torch.from_numpy(places).to(device, non_blocking=True)

    kernels.combine[grid](
        memory[: nbytes // WORD_BYTES * WORD_BYTES].view(torch.int32),
        words_on_device(jobs.sources),
        words_on_device(jobs.targets),
        torch.from_numpy(factors).to(device, non_blocking=True),
        words,
        len(jobs.want),
        K=jobs.data,
        ROWS=factors.shape[1],
        BLOCK=BLOCK_WORDS,
        num_warps=_WARPS,
    )
