"""Whatever happens to a column's bytes, its checksums see it."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hpstore.format.checksum import bad_blocks, block_digests, column_seed, digest128, table_root
from hpstore.format.geometry import BLOCK_BYTES

SEED = column_seed("pool", "key", "v1", "c4+2", 0)
lengths = st.integers(1, 3 * BLOCK_BYTES + 1).map(
    lambda n: n if n % 7 else BLOCK_BYTES * (n % 3 + 1)
)
texts = st.text(max_size=8)


def content(length: int, seed: int = 0) -> bytearray:
    return bytearray(np.random.default_rng(seed).integers(0, 256, length, np.uint8).tobytes())


@given(lengths, st.data())
def test_any_flipped_bit_is_found_in_its_block(length: int, data: st.DataObject) -> None:
    """The bad block is the one that holds the flipped bit."""
    column = content(length)
    table = block_digests(SEED, 0, memoryview(column))
    assert not bad_blocks(SEED, 0, memoryview(column), table)
    at = data.draw(st.integers(0, length - 1))
    column[at] ^= 1 << data.draw(st.integers(0, 7))
    assert bad_blocks(SEED, 0, memoryview(column), table) == (at // BLOCK_BYTES,)


@given(st.integers(0, 3), st.integers(0, 3))
def test_swapped_blocks_are_found(one: int, two: int) -> None:
    """Position is in the seed: a block in another's place is wrong, also when it is intact."""
    column = content(4 * BLOCK_BYTES)
    table = block_digests(SEED, 0, memoryview(column))
    a, b = one * BLOCK_BYTES, two * BLOCK_BYTES
    first, second = column[a : a + BLOCK_BYTES], column[b : b + BLOCK_BYTES]
    column[a : a + BLOCK_BYTES], column[b : b + BLOCK_BYTES] = second, first
    expected = () if one == two else tuple(sorted((one, two)))
    assert bad_blocks(SEED, 0, memoryview(column), table) == expected


@given(st.integers(0, 3))
def test_equal_blocks_have_different_digests(block: int) -> None:
    """A column of zeros has no two equal digests: a lost write inside it is seen."""
    table = block_digests(SEED, 0, memoryview(bytes(4 * BLOCK_BYTES)))
    assert len(set(table.tolist())) == 4
    (again,) = block_digests(SEED, block, memoryview(bytes(BLOCK_BYTES)))
    assert again == table[block]


@given(
    st.tuples(texts, texts, texts, texts),
    st.tuples(texts, texts, texts, texts),
    st.integers(0, 31),
    st.integers(0, 31),
)
def test_the_seed_binds_a_column_to_its_place(
    one: tuple[str, str, str, str], two: tuple[str, str, str, str], first: int, second: int
) -> None:
    """Another pool, key, version, layout or column is another seed (no NUL is in a key)."""
    if any("\0" in text for text in (*one, *two)):
        return
    same = column_seed(*one, first) == column_seed(*two, second)
    assert same == ((one, first) == (two, second))


def test_the_parts_of_a_seed_cannot_run_together() -> None:
    """A letter that moves from one field to its neighbour makes another seed."""
    splits = [
        ("ab", "c", "d", "e"),
        ("a", "bc", "d", "e"),
        ("a", "b", "cd", "e"),
        ("a", "b", "c", "de"),
        ("abc", "", "d", "e"),
        ("a", "b", "c", "d"),
    ]
    seeds = {column_seed(*split, 1) for split in splits} | {column_seed("a", "b", "c", "d1", 1)}
    assert len(seeds) == len(splits) + 1
    assert column_seed("a", "b", "c", "d1", 1) != column_seed("a", "b", "c", "d", 11)


@given(lengths)
def test_a_block_of_another_column_is_found(length: int) -> None:
    """The very same bytes under another seed match nowhere."""
    column = memoryview(content(length))
    table = block_digests(SEED, 0, column)
    other = column_seed("pool", "key", "v1", "c4+2", 1)
    assert bad_blocks(other, 0, column, table) == tuple(range(len(table)))
    assert not np.array_equal(block_digests(other, 0, column), table)


@given(lengths, st.data())
def test_a_part_is_checked_like_the_whole(length: int, data: st.DataObject) -> None:
    """A run that begins at block n is checked against the table from n on."""
    column = memoryview(content(length))
    table = block_digests(SEED, 0, column)
    first = data.draw(st.integers(0, len(table) - 1))
    part = column[first * BLOCK_BYTES :]
    assert not bad_blocks(SEED, first, part, table)
    assert np.array_equal(block_digests(SEED, first, part), table[first:])
    if len(part) > BLOCK_BYTES:
        assert bad_blocks(SEED, first + 1, part[: len(part) - BLOCK_BYTES], table)


@given(lengths)
def test_digests_go_where_they_are_asked(length: int) -> None:
    """`out` is filled and returned; nothing beyond it is touched."""
    column = memoryview(content(length))
    expected = block_digests(SEED, 0, column)
    space = np.zeros(len(expected) + 2, np.uint64)
    made = block_digests(SEED, 0, column, space[1:-1])
    assert np.array_equal(made, expected)
    assert np.array_equal(space[1:-1], expected)
    assert space[0] == space[-1] == 0


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=20), st.data())
def test_the_root_sees_every_change_of_the_table(values: list[int], data: st.DataObject) -> None:
    """Another digest, another order of digests, another seed."""
    table = np.array(values, np.uint64)
    root = table_root(SEED, table)
    assert len(root) == 16
    at = data.draw(st.integers(0, len(values) - 1))
    changed = table.copy()
    changed[at] ^= np.uint64(1 << data.draw(st.integers(0, 63)))
    assert table_root(SEED, changed) != root
    assert table_root(SEED + 1, table) != root
    if table[::-1].tolist() != values:
        assert table_root(SEED, table[::-1].copy()) != root


@given(st.binary(max_size=200))
def test_digest128_is_the_same_for_bytes_and_views(data: bytes) -> None:
    """Whatever holds the bytes."""
    assert digest128(data) == digest128(memoryview(bytearray(data)))
    assert digest128(data) != digest128(data + b"\0")
