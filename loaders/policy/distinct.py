"""Blocks once each: by one sort of block and place together, which numpy does with SIMD."""

from __future__ import annotations

import numpy as np

from hpstore.loaders.policy.plans import Int64s


def distinct(blocks: Int64s) -> tuple[Int64s, Int64s, Int64s]:
    """Blocks once each, rising; where each is first; how often it is there."""
    count = len(blocks)
    bits = max(count - 1, 0).bit_length()
    # block and place in one word: numpy sorts int64 with SIMD, argsort it does not
    keyed = blocks << bits
    keyed |= np.arange(count)
    keyed.sort()
    ranked = keyed >> bits
    starts = np.empty(count, np.bool_)
    starts[:1] = True
    np.not_equal(ranked[1:], ranked[:-1], out=starts[1:])
    first = keyed & ((1 << bits) - 1)
    if starts.all():
        return ranked, first, np.ones(count, np.int64)
    (at,) = starts.nonzero()
    counts = np.empty(len(at), np.int64)
    np.subtract(at[1:], at[:-1], out=counts[:-1])
    counts[-1:] = count - at[-1:]
    return ranked[at], first[at], counts


def in_order(blocks: Int64s) -> Int64s:
    """Blocks once each, in the order of their first occurrence."""
    found, first, _ = distinct(blocks)
    return found[np.argsort(first)]


__all__ = ["distinct", "in_order"]
