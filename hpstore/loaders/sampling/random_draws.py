"""Random words, shuffles and seeds that are equal on every machine and numpy. Pure.

Everything comes from `PCG64(SeedSequence(words)).random_raw`: numpy guarantees PCG64's integers for
a seed in every version, and guarantees nothing of the kind for the methods of `Generator`
(NEP 19). No result depends on which sort numpy picks, on libm, or on the order of calls.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from numpy.random import PCG64, SeedSequence  # here: numpy loads it at its first use

from hpstore.errors import ConfigError
from hpstore.units import whole_argument

Indices: TypeAlias = npt.NDArray[np.int64]
Words: TypeAlias = npt.NDArray[np.uint64]

DRAWS_VERSION = 1
"""Changes when the same seed would mean other samples. Part of what an order says of itself."""

_LOW = 0xFFFF_FFFF


class Purpose(IntEnum):
    """What words are drawn for: one seed gives unrelated words to each. Never renumber."""

    PERMUTATION = 1
    FEISTEL = 2
    STRIPES = 3
    WINDOW = 4
    WEIGHTED = 5
    MIX = 6
    SEED = 7


def check_seed(seed: int) -> int:
    """The seed as a plain int. Raises ConfigError for anything but 0 <= seed < 2**64."""
    value = whole_argument("seed", seed, least=0)
    if not 0 <= value < 1 << 64:
        raise ConfigError(f"seed {value} is outside 0 .. 2**64 - 1: nothing was started")
    return value


def words(
    purpose: Purpose, *, seed: int, epoch: int, part: int = 0, start: int = 0, count: int
) -> Words:
    """`count` uniform 64-bit words from word `start` of the stream (purpose, seed, epoch, part).

    seed, epoch and part are below 2**64. Seeking costs the same anywhere: PCG64 jumps ahead in
    O(log start). About 16 us and 1 ns a word.
    """
    key = [DRAWS_VERSION, int(purpose)]
    for number in (seed, epoch, part):
        key += [number & _LOW, number >> 32]
    generator = PCG64(SeedSequence(key))
    if start:
        generator.advance(start)
    drawn: Words = generator.random_raw(count)
    return drawn


def shuffled(purpose: Purpose, *, seed: int, epoch: int, part: int = 0, count: int) -> Indices:
    """A permutation of 0 .. count - 1, int64[count], the caller's.

    Random keys with the number in their low bits, sorted: keys are distinct, so any sort gives
    the same. Two numbers draw equal random bits with probability 2**(bits of count - 64); then
    the smaller goes first, which at 2e6 happens to 0.2 pairs in an epoch.
    """
    low = np.uint64((1 << max(0, count - 1).bit_length()) - 1)
    keys = words(purpose, seed=seed, epoch=epoch, part=part, count=count)
    keys &= ~low
    keys |= np.arange(count, dtype=np.uint64)
    keys.sort()
    keys &= low
    return keys.view(np.int64)


def below(limit: int, drawn: Words) -> Indices:
    """Words made uniform in 0 .. limit - 1, for limits up to 2**24.

    Multiply and shift (D. Lemire, "Fast random integer generation in an interval", 2019) with 40
    bits; without his rejection the bias is at most limit / 2**40.
    """
    return ((drawn >> np.uint64(24)) * np.uint64(limit) >> np.uint64(40)).view(np.int64)


def derive_seed(seed: int, number: int) -> int:
    """Seed `number` of a family: for the components of a mixture, so that they do not agree."""
    return int(words(Purpose.SEED, seed=check_seed(seed), epoch=number, count=1)[0])
