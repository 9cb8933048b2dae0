"""The samples of the loader benchmark: A, fixed records of 12 KiB, and B, ragged ones of 150 KiB.

Every record begins with its number, 8 bytes little-endian, which is its label too: batches of any
contender can be checked. The rest is noise, so that no filesystem or format gains by it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hpstore.codec.galois import Bytes
from hpstore.units import KIB, MIB

BATCH = 256
FIXED_BYTES = 12 * KIB
RAGGED_BYTES = (100 * KIB, 200 * KIB)  # evenly from here to there
_RAGGED_SHARE = 10  # times fewer records than of A, as 20k to 200k
_NOISE_BYTES = 8 * MIB + 4099
_STEP = 4099  # a prime: records begin at different places of the noise

Batch = tuple[Any, Any]
"""(values, labels). Values: a tensor (rows, bytes), or something that iterates over the records."""


@dataclass(frozen=True)
class Data:
    """One dataset: `kind` A or B, as many records as a set A of `size_bytes` bytes calls for."""

    kind: str
    size_bytes: int

    def __reduce__(self) -> tuple[type[Data], tuple[str, int]]:
        return Data, (self.kind, self.size_bytes)  # what is computed is not sent to sessions

    @property
    def ragged(self) -> bool:
        """Whether the records have different lengths."""
        return self.kind == "B"

    @property
    def rows(self) -> int:
        """Records."""
        fixed = max(4 * BATCH, self.size_bytes // FIXED_BYTES)
        return max(2 * BATCH, fixed // _RAGGED_SHARE) if self.ragged else fixed

    @cached_property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Bytes of each record, (rows,)."""
        if not self.ragged:
            return np.full(self.rows, FIXED_BYTES, np.int64)
        return np.random.default_rng(1).integers(*RAGGED_BYTES, self.rows, endpoint=True)

    @cached_property
    def starts(self) -> npt.NDArray[np.int64]:
        """Where each record begins when they lie back to back, (rows + 1,)."""
        return np.concatenate([[0], np.cumsum(self.lengths)])

    @property
    def nbytes(self) -> int:
        """Bytes of all records."""
        return int(self.starts[-1])

    @cached_property
    def _noise(self) -> Bytes:
        return np.frombuffer(np.random.default_rng(2).bytes(_NOISE_BYTES), np.uint8)

    def record(self, index: int) -> Bytes:
        """One record, a copy."""
        length = int(self.lengths[index])
        at = index * _STEP % (_NOISE_BYTES - length)
        made = self._noise[at : at + length].copy()
        made[:8] = np.frombuffer(np.int64(index).tobytes(), np.uint8)
        return made

    def records(self) -> Iterator[Bytes]:
        """All of them in order."""
        return map(self.record, range(self.rows))

    def check(self, batch: Batch, who: str) -> None:
        """RuntimeError unless each row is the record that its label says."""
        values, labels = batch[0], torch.as_tensor(batch[1]).reshape(-1).tolist()
        heads = (
            values[:, :8].cpu().numpy()
            if isinstance(values, torch.Tensor)
            else np.stack([np.asarray(value[:8].cpu()) for value in values])
        )
        found = np.ascontiguousarray(heads).view(np.int64).reshape(-1).tolist()
        if found != labels:
            raise RuntimeError(f"{who} returned other values than were written")
        last = -1 if isinstance(values, torch.Tensor) else len(labels) - 1
        row = torch.as_tensor(values[last] if last < 0 else list(values)[last]).cpu().numpy()
        wanted = self.record(labels[last])
        if not np.array_equal(row[: len(wanted)], wanted):  # padded by some
            raise RuntimeError(f"{who} returned other values than were written")
