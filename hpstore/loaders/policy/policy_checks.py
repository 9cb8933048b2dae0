"""What a cache policy refuses: sizes that cannot be, and saved state of another policy. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from hpstore.errors import ConfigError
from hpstore.loaders.policy.cache_plan import Int64s

STATE_VERSION = 3


_ALWAYS = (
    "policy",
    "residents",
    "learner_keys",
    "learner_clock",
    "phases_seen",
    "phases_made",
    "phases_length",
    "rates",
    "made",
    "period",
)


def check_sizes(sizes: int | Int64s, blocks: int, jobs: int, capacity_bytes: int) -> int:
    """Bytes of all blocks. Raises ConfigError."""
    if not 0 < blocks < 2**31:
        raise ConfigError(f"a cache policy over {blocks} blocks: 1 .. {2**31 - 1} are possible")
    if jobs < 1:
        raise ConfigError(f"a cache policy for {jobs} jobs: at least 1")
    if not isinstance(sizes, int) and sizes.shape != (blocks,):
        raise ConfigError(f"sizes have the shape {sizes.shape}, not {(blocks,)}")
    least = sizes if isinstance(sizes, int) else int(sizes.min())
    largest = sizes if isinstance(sizes, int) else int(sizes.max())
    if least < 0:
        raise ConfigError(f"a block of {least} bytes")
    if capacity_bytes < largest:
        raise ConfigError(
            f"a cache of {capacity_bytes} bytes holds no block of {largest}: give at least that"
        )
    return sizes * blocks if isinstance(sizes, int) else int(sizes.sum())


def check_arrays(arrays: Mapping[str, npt.NDArray[np.generic]], blocks: int, jobs: int) -> None:
    """Raise ConfigError unless a saved state is of a policy over so many blocks and jobs."""
    missing = sorted(set(_ALWAYS) - set(arrays))
    if missing:
        raise ConfigError(f"a saved cache policy lacks {missing}: start without it")
    odd = [name for name, array in arrays.items() if array.dtype.kind not in "biuf"]
    if odd or arrays["policy"].shape != (5,):
        raise ConfigError(f"a saved cache policy has no numbers in {odd}: start without it")
    made = tuple(arrays["policy"].astype(np.int64)[:3].tolist())
    wanted = (STATE_VERSION, blocks, jobs)
    if made != wanted:
        raise ConfigError(
            f"a saved cache policy is of (version, blocks, jobs) {made}, this one of {wanted}: "
            "start without it"
        )
