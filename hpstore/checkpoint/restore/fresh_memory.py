"""Memory for tensors that a read fills."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from hpstore.runtime.buffers import HUGE_BYTES, aligned_array


def fresh(shape: Sequence[int], dtype: torch.dtype, device: torch.device | None) -> torch.Tensor:
    """Memory for a tensor. On the host large ones get huge pages, touched at once: faults of
    4 KiB pages would cost more than the read."""
    count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if (device is not None and device.type != "cpu") or count < HUGE_BYTES:
        return torch.empty(tuple(shape), dtype=dtype, device=device or "cpu")
    return torch.from_numpy(aligned_array(count, populate=True)).view(dtype).view(tuple(shape))
