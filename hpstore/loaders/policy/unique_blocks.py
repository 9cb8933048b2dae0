"""Blocks once each: by one sort of block and place together, which numpy does with SIMD."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hpstore.loaders.policy.cache_plan import Int64s


class Distinct(NamedTuple):
    """`blocks` once each, rising; where each is `first`; how often it is there, `counts`.

    `order`: places of all requests by block: np.repeat(blocks, counts) is what is there.
    """

    blocks: Int64s
    first: Int64s
    counts: Int64s
    order: Int64s


def distinct(blocks: Int64s) -> Distinct:
    """Of blocks below 2**31, int64[n]."""
    count = len(blocks)
    bits = max(count - 1, 0).bit_length()
    # block and place in one word: numpy sorts int64 with SIMD, argsort it does not
    keyed = blocks << bits
    keyed |= np.arange(count)
    keyed.sort()
    ranked = keyed >> bits
    keyed &= (1 << bits) - 1
    starts = np.empty(count, np.bool_)
    starts[:1] = True
    np.not_equal(ranked[1:], ranked[:-1], out=starts[1:])
    if np.count_nonzero(starts) == count:
        return Distinct(ranked, keyed, np.ones(count, np.int64), keyed)
    at = starts.nonzero()[0]
    counts = np.empty(len(at), np.int64)
    np.subtract(at[1:], at[:-1], out=counts[:-1])
    counts[-1] = count - at[-1]
    return Distinct(ranked.take(at), keyed.take(at), counts, keyed)


def in_order(blocks: Int64s) -> Int64s:
    """Blocks once each, in the order of their first occurrence."""
    found = distinct(blocks)
    return found.blocks[np.argsort(found.first)]
