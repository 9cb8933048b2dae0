"""Triton kernels: columns of the erasure code, checksums of blocks. Needs the `gpu` extra.

The same source runs on a CPU under TRITON_INTERPRET=1, which must be set before Triton is first
imported. Only `decode` and `verify` call them; they check what is given.
"""

# ruff: noqa: N803, N806 (upper case: values known when the kernel is compiled)
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

# Any below: arguments of a kernel are Triton's own values


@triton.jit
def combine(
    memory: Any, sources: Any, targets: Any, factors: Any, words: Any, rows: Any,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """target[r] = sum over j < K of factors[j, r] * source[j] in GF(2^8), four bytes a word.

    Program (w, job): BLOCK words of every row of a job. `memory` is int32; `sources` (jobs, K) and
    `targets` (jobs, rows) are int64 places in it; `factors` (K, ROWS) int32, ROWS a power of two
    and at least rows. A word is doubled bytewise: shift, then xor 0x1d (polynomial 0x11d) where a
    byte overflowed. Each source is doubled seven times for all rows together.
    """
    job = tl.program_id(1).to(tl.int64)
    lane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < words
    row = tl.arange(0, ROWS)
    total = tl.zeros((ROWS, BLOCK), tl.int32)
    for j in range(K):
        place = tl.load(sources + job * K + j)
        value = tl.load(memory + place + lane, mask=inside, other=0)
        factor = tl.load(factors + j * ROWS + row)
        for bit in tl.static_range(8):
            chosen = 0 - ((factor >> bit) & 1)  # all ones where the factor has the bit
            total = total ^ (value[None, :] & chosen[:, None])
            carry = (value >> 7) & 0x01010101
            value = ((value & 0x7F7F7F7F) << 1) ^ (carry * 0x1D)
    place = tl.load(targets + job * rows + row, mask=row < rows, other=0)
    tl.store(
        memory + place[:, None] + lane[None, :],
        total,
        mask=(row < rows)[:, None] & inside[None, :],
    )


__all__ = ["combine"]
