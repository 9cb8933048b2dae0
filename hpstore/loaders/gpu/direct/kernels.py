"""Triton kernels: columns of the erasure code, checksums of blocks. Needs the `gpu` extra.

The same source runs on a CPU under TRITON_INTERPRET=1, which must be set before Triton is first
imported. Only `decode` and `verify` call them; they check what is given.
"""

# ruff: noqa: N803 (upper case: values known when the kernel is compiled)
# Triton reads annotations itself and takes no others than its own
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def combine(
    memory,
    sources,
    targets,
    factors,
    words,
    rows,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
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


@triton.jit
def digest(memory, starts, lengths, seeds, table, digests):
    """XXH3-64 of one block a program; lengths are multiples of 1 KiB.

    `memory` is int64, `starts` places in it, `lengths` bytes. `table`: the 24 words of the default
    secret, then the 8 first values of the accumulators, then the two primes of the end. The
    algorithm is that of xxHash's doc/xxhash_spec.md, "XXH3 Algorithm (for long inputs)": eight
    sums over the sixteen 64-byte stripes of 1 KiB do not depend on their order, so they are taken
    at once; the scrambling between them cannot be.
    """
    block = tl.program_id(0)
    place = tl.load(starts + block)
    length = tl.load(lengths + block)
    seed = tl.load(seeds + block).to(tl.uint64, bitcast=True)
    lane = tl.arange(0, 8)
    stripe = tl.arange(0, 16)
    words = memory + place + stripe[:, None] * 8
    # the secret's even words are raised by the seed, the odd ones lowered
    sign = 1 - 2 * ((stripe[:, None] + lane[None, :]) % 2)
    raised = sign.to(tl.int64).to(tl.uint64, bitcast=True) * seed
    secret = tl.load(table + stripe[:, None] + lane[None, :]).to(tl.uint64, bitcast=True) + raised
    even = (1 - 2 * (lane % 2)).to(tl.int64).to(tl.uint64, bitcast=True) * seed
    scrambler = tl.load(table + 16 + lane).to(tl.uint64, bitcast=True) + even
    total = tl.load(table + 24 + lane).to(tl.uint64, bitcast=True)
    prime32 = tl.load(table + 31).to(tl.uint64, bitcast=True)  # the last accumulator's first value
    low = tl.full((), 0xFFFFFFFF, tl.uint64)

    rounds = length // 1024 - 1
    for step in range(rounds):
        at = words + step * 128
        value = tl.load(at + lane[None, :]).to(tl.uint64, bitcast=True)
        crossed = tl.load(at + (lane ^ 1)[None, :]).to(tl.uint64, bitcast=True)
        key = value ^ secret
        total += tl.sum(crossed + (key & low) * (key >> 32), axis=0)
        total = ((total ^ (total >> 47)) ^ scrambler) * prime32

    # the last 1 KiB: the sixteenth stripe has the secret from byte 121 on
    before = tl.load(table + 15 + lane).to(tl.uint64, bitcast=True) - even
    ending = (before >> 8) | (scrambler << 56)
    last = (stripe == 15)[:, None]
    at = words + rounds * 128
    value = tl.load(at + lane[None, :]).to(tl.uint64, bitcast=True)
    crossed = tl.load(at + (lane ^ 1)[None, :]).to(tl.uint64, bitcast=True)
    key = value ^ tl.where(last, ending[None, :], secret)
    total += tl.sum(crossed + (key & low) * (key >> 32), axis=0)

    # fold with the secret from byte 11 on
    first = tl.load(table + 1 + lane).to(tl.uint64, bitcast=True) - even
    second = tl.load(table + 2 + lane).to(tl.uint64, bitcast=True) + even
    mixed = total ^ ((first >> 24) | (second << 40))
    left, right = tl.split(tl.reshape(mixed, (4, 2)))
    folded = tl.sum((left * right) ^ tl.umulhi(left, right), axis=0)
    prime64 = tl.load(table + 25).to(tl.uint64, bitcast=True)
    result = length.to(tl.uint64) * prime64 + folded
    result = (result ^ (result >> 37)) * tl.load(table + 32).to(tl.uint64, bitcast=True)
    result = result ^ (result >> 32)
    tl.store(digests + block, result.to(tl.int64, bitcast=True))
