"""A permutation of 0 .. length - 1 that is evaluated anywhere, without a table of its length. Pure.

A number x < length is a pair (x // columns, x % columns) of a grid with rows ~ columns ~
sqrt(length); round by round one half gets a random function of the other added to it, modulo its
own size: the generalised Feistel network of J. Black and P. Rogaway, "Ciphers with arbitrary
finite domains" (CT-RSA 2002, section "Method 3"). What falls outside 0 .. length - 1 goes through
again (their cycle walking); the grid exceeds the length by less than a row, so that this concerns
less than one number in sqrt(length).

The round functions are tables of uniform random numbers, one per round and epoch: truly random
functions, which is what the theorems on Feistel networks are about (M. Luby and C. Rackoff 1988;
J. Patarin, "Security of random Feistel schemes with 5 or more rounds", CRYPTO 2004). Why 8
rounds: docs/decisions/0011.
"""

from __future__ import annotations

import math
from typing import Self

import numpy as np

from hpstore.loaders.sampling.random_draws import Indices, Purpose, below, words
from hpstore.units import div_ceil

ROUNDS = 8
MAX_LENGTH = 1 << 40
"""Tables are rounds x sqrt(length) x 8 bytes: 2 MB at 1e9, 64 MiB here."""


class Feistel:
    """One permutation. Immutable; any number of threads."""

    def __init__(self, length: int, tables: tuple[Indices, ...], *, columns: int) -> None:
        self._length, self._columns, self._tables = length, columns, tables
        self._rows = div_ceil(length, columns)

    @classmethod
    def of(cls, length: int, *, seed: int, epoch: int, rounds: int = ROUNDS) -> Self:
        """The permutation of (seed, epoch), 1 <= length <= MAX_LENGTH."""
        columns = math.isqrt(length - 1) + 1
        rows = div_ceil(length, columns)
        tables = []
        for number in range(rounds):
            size, limit = (columns, rows) if number % 2 == 0 else (rows, columns)
            drawn = words(Purpose.FEISTEL, seed=seed, epoch=epoch, part=number, count=size)
            tables.append(below(limit, drawn))
        return cls(length, tuple(tables), columns=columns)

    def images(self, start: int, stop: int) -> Indices:
        """Where positions start .. stop - 1 go: int64[stop - start], distinct, the caller's."""
        out = self._pass(np.arange(start, stop, dtype=np.int64))
        outside = np.flatnonzero(out >= self._length)
        while len(outside):  # ends: a number inside returns to the inside along its cycle
            out[outside] = self._pass(out[outside])
            outside = outside[out[outside] >= self._length]
        return out

    def _pass(self, numbers: Indices) -> Indices:
        """Once through all rounds: a permutation of the grid."""
        row, column = np.divmod(numbers, self._columns)
        change = np.empty_like(row)
        for number, table in enumerate(self._tables):
            even = number % 2 == 0
            half, other, size = (row, column, self._rows) if even else (column, row, self._columns)
            np.take(table, other, out=change, mode="clip")  # clip: numpy buffers `out` otherwise
            half += change
            # half mod size for half < 2 size: as unsigned, half - size is huge where half < size
            np.subtract(half, size, out=change)
            np.minimum(half.view(np.uint64), change.view(np.uint64), out=half.view(np.uint64))
        row *= self._columns
        row += column
        return row
