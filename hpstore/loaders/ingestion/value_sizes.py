"""About how much memory values take: what windows and parts are measured in. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch


def sample_bytes(sample: Mapping[str, object]) -> int:
    """About how much memory a sample takes."""
    return sum(value_bytes(value) for value in sample.values())


def value_bytes(value: object) -> int:
    """About how much memory a value takes: 8 for a number, and for None."""
    if isinstance(value, np.ndarray | torch.Tensor):
        return int(value.nbytes)
    if isinstance(value, str | bytes | bytearray | memoryview):
        return len(value)
    if isinstance(value, dict):
        return 8 + sum(len(str(key)) + value_bytes(one) for key, one in value.items())
    if isinstance(value, list):
        return 8 + sum(map(value_bytes, value))
    return 8
