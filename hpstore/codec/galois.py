"""GF(2^8) arithmetic and the Cauchy matrix; the slow, obvious part that the oracle stands on.

Field polynomial x^8+x^4+x^3+x^2+1 (0x11d), as ISA-L uses. The generator is systematic: k unit rows
on top of rows 1/(i xor j), i = k..k+m-1, j = 0..k-1, ISA-L's `gf_gen_cauchy1_matrix`. Every square
submatrix of a Cauchy matrix is invertible, so any k of k+m columns determine the rest (J. Blömer et
al., "An XOR-Based Erasure-Resilient Coding Scheme", 1995).
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
_POLYNOMIAL = 0x11D


@cache
def _tables() -> tuple[list[int], list[int]]:
    exp, log, value = [0] * 512, [0] * 256, 1
    for power in range(255):
        exp[power], log[value] = value, power
        value <<= 1
        if value & 0x100:
            value ^= _POLYNOMIAL
    exp[255:510] = exp[:255]
    return exp, log


def multiply(a: int, b: int) -> int:
    """Product in GF(2^8)."""
    exp, log = _tables()
    return exp[log[a] + log[b]] if a and b else 0


def inverse(a: int) -> int:
    """Multiplicative inverse in GF(2^8); a is not 0."""
    if a == 0:
        raise ZeroDivisionError("0 has no inverse in GF(2^8)")
    exp, log = _tables()
    return exp[255 - log[a]]


@cache
def product_table() -> Bytes:
    """(256, 256): row a holds a * b for every b."""
    exp, log = (np.array(table) for table in _tables())
    table: Bytes = exp[log[:, None] + log[None, :]].astype(np.uint8)
    table[0, :] = table[:, 0] = 0  # 0 has no logarithm
    return table


def cauchy_matrix(data: int, parity: int) -> Bytes:
    """Systematic generator, (k + m, k)."""
    matrix = np.zeros((data + parity, data), np.uint8)
    matrix[:data] = np.eye(data, dtype=np.uint8)
    for i in range(data, data + parity):
        for j in range(data):
            matrix[i, j] = inverse(i ^ j)
    return matrix


def matmul(left: Bytes, right: Bytes) -> Bytes:
    """Matrix product over GF(2^8)."""
    products = product_table()[left[:, :, None], right[None, :, :]]  # (rows, inner, columns)
    result: Bytes = np.bitwise_xor.reduce(products, axis=1)
    return result


def invert(matrix: Bytes) -> Bytes:
    """Inverse of a square matrix by Gauss-Jordan. Raises ValueError when singular."""
    size = len(matrix)
    table = product_table()
    work = np.concatenate([matrix.copy(), np.eye(size, dtype=np.uint8)], axis=1)
    for column in range(size):
        pivots = np.nonzero(work[column:, column])[0]
        if not len(pivots):
            raise ValueError("singular matrix")
        pivot = column + int(pivots[0])
        work[[column, pivot]] = work[[pivot, column]]
        work[column] = table[inverse(int(work[column, column]))][work[column]]
        for row in range(size):
            if row != column and work[row, column]:
                work[row] ^= table[work[row, column]][work[column]]
    return work[:, size:]


def recovery_matrix(data: int, parity: int, have: tuple[int, ...], want: tuple[int, ...]) -> Bytes:
    """(len(want), k): how to make columns `want` from the k columns `have`."""
    if len(have) != data:
        raise ValueError(f"{len(have)} columns given, {data} needed")
    generator = cauchy_matrix(data, parity)
    return matmul(generator[list(want)], invert(generator[list(have)]))
