"""Every erasure back end gives the bytes of the numpy reference and recovers what may be lost."""

from __future__ import annotations

import itertools
import logging
import math
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from hpstore import codec
from hpstore.codec import BACKENDS, Backend, Coder, ErasureCode, choose_backend, open_backend
from hpstore.codec.backends import Columns, NumpyBackend, row_at, self_test
from hpstore.codec.galois import Bytes, cauchy_matrix, inverse, invert, matmul, multiply
from hpstore.format.geometry import Code
from tests.thorough import LONG

FAST = "isal-pyeclib"  # bundled with pyeclib's wheel: must be there
SLOW = [name for name in BACKENDS if name not in (FAST, "numpy")]
PATTERNS_PER_GEOMETRY = 5000 if LONG else 300
ROW_BYTES = 64
GEOMETRIES = [(k, m) for k in range(1, 17) for m in range(1, 5)]
WIDE = [(1, 8), (2, 8), (8, 8), (16, 8), (24, 8), (31, 1), (28, 4), (27, 5), (20, 7), (25, 6)]
SAMPLE = [
    (1, 1),
    (1, 2),
    (2, 1),
    (3, 3),
    (4, 2),
    (5, 4),
    (8, 3),
    (10, 4),
    (16, 4),
    (24, 8),
    (31, 1),
]
ODD_LENGTHS = [1, 15, 16, 17, 63, 80, 4097]


def need(name: str) -> ErasureCode:
    """A back end, or a skip with the reason: only the bundled one must be on every machine."""
    try:
        return ErasureCode(open_backend(name))
    except (OSError, ImportError) as error:
        if name == FAST:
            raise
        pytest.skip(f"{name} is not on this machine: {error}")


def random_rows(data: int, length: int, seed: int) -> list[Bytes]:
    rng = np.random.default_rng(seed)
    return list(rng.integers(0, 256, (data, length), dtype=np.uint8))


def blank(count: int, length: int) -> list[Bytes]:
    """Targets full of something that is not the answer."""
    return [np.full(length, 0xA5, np.uint8) for _ in range(count)]


REFERENCE = ErasureCode(NumpyBackend())


def encode(code: ErasureCode, parity: int, rows: Sequence[Bytes]) -> list[Bytes]:
    """The parity rows that a back end makes."""
    made = blank(parity, len(rows[0]))
    code.encode(Code.RS_CAUCHY, parity, rows, made)
    return made


def reconstruct(
    code: ErasureCode, parity: int, columns: Sequence[Bytes], have: Columns, want: Columns
) -> list[Bytes]:
    """Columns `want`, made from `have` alone."""
    made = blank(len(want), len(columns[0]))
    sources = [columns[c] for c in have]
    code.reconstruct(Code.RS_CAUCHY, len(columns) - parity, parity, have, want, sources, made)
    return made


def same(ours: Sequence[Bytes], theirs: Sequence[Bytes]) -> bool:
    return [row.tobytes() for row in ours] == [row.tobytes() for row in theirs]


def loss_patterns(data: int, parity: int, limit: int) -> Iterator[tuple[int, ...]]:
    """All sets of 1 to m lost columns; above `limit` a seeded sample that holds the single ones."""
    width = data + parity
    total = sum(math.comb(width, lost) for lost in range(1, parity + 1))
    if total <= limit:
        for lost in range(1, parity + 1):
            yield from itertools.combinations(range(width), lost)
        return
    rng = random.Random(1000 * data + parity)
    yield from ((column,) for column in range(width))
    for _ in range(limit - width):
        yield tuple(sorted(rng.sample(range(width), rng.randint(1, parity))))


def check_losses(code: ErasureCode, parity: int, rows: list[Bytes], limit: int) -> int:
    """Lose, reconstruct, compare with what there was; returns how many patterns were tried."""
    data = len(rows)
    columns = [*rows, *encode(REFERENCE, parity, rows)]
    rng, tried = random.Random(parity), 0
    for lost in loss_patterns(data, parity, limit):
        left = [c for c in range(data + parity) if c not in lost]
        have = tuple(sorted(rng.sample(left, data)))
        made = reconstruct(code, parity, columns, have, lost)
        assert same(made, [columns[c] for c in lost]), (data, parity, have, lost)
        tried += 1
    return tried


@pytest.mark.parametrize("parity", range(1, 5))
def test_isal_encodes_like_the_reference(parity: int) -> None:
    """Every k up to 16: byte for byte the parity of pure numpy."""
    fast = need(FAST)
    for data in range(1, 17):
        rows = random_rows(data, ROW_BYTES, data)
        assert same(encode(fast, parity, rows), encode(REFERENCE, parity, rows)), data


@pytest.mark.parametrize("parity", range(1, 5))
def test_isal_recovers_every_loss_of_up_to_m(parity: int) -> None:
    """Every k up to 16, every pattern of losses up to a number for each geometry, from any k
    survivors."""
    fast = need(FAST)
    for data in range(1, 17):
        tried = check_losses(
            fast, parity, random_rows(data, ROW_BYTES, data), PATTERNS_PER_GEOMETRY
        )
        every = sum(math.comb(data + parity, lost) for lost in range(1, parity + 1))
        assert tried == min(every, PATTERNS_PER_GEOMETRY)


@pytest.mark.parametrize(("data", "parity"), WIDE)
def test_isal_works_at_the_widest_stripes(data: int, parity: int) -> None:
    """m up to 8 and k + m up to 32: encode equals the reference, 200 loss patterns come back."""
    fast, rows = need(FAST), random_rows(data, ROW_BYTES, 7)
    assert same(encode(fast, parity, rows), encode(REFERENCE, parity, rows))
    check_losses(fast, parity, rows, 200)


@pytest.mark.parametrize("name", SLOW)
def test_other_back_ends_encode_like_the_reference(name: str) -> None:
    """Every geometry with k up to 16 and m up to 4, and the widest."""
    code = need(name)
    for data, parity in [*GEOMETRIES, *WIDE]:
        rows = random_rows(data, ROW_BYTES, data)
        assert same(encode(code, parity, rows), encode(REFERENCE, parity, rows)), (data, parity)


@pytest.mark.parametrize("name", [*SLOW, "numpy"])
def test_other_back_ends_recover_losses(name: str) -> None:
    """A sample of geometries and of loss patterns, from any k survivors."""
    code = need(name)
    for data, parity in SAMPLE:
        check_losses(code, parity, random_rows(data, ROW_BYTES, data), 60)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("length", ODD_LENGTHS)
def test_rows_of_any_length_are_coded(name: str, length: int) -> None:
    """No back end needs a multiple of its word, and none writes past a row."""
    code = need(name)
    for data, parity in [(1, 2), (4, 2), (10, 4)]:
        rows = random_rows(data, length, length)
        guarded = [np.full(length + 64, 0x5A, np.uint8) for _ in range(parity)]
        code.encode(Code.RS_CAUCHY, parity, rows, [row[:length] for row in guarded])
        assert same([row[:length] for row in guarded], encode(REFERENCE, parity, rows))
        assert all((row[length:] == 0x5A).all() for row in guarded)
        check_losses(code, parity, rows, 10)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("writeable", [True, False])
def test_rows_may_begin_anywhere(name: str, writeable: bool) -> None:
    """Slices at odd addresses, also of read-only memory; the sources are left as they are."""
    code = need(name)
    big = np.random.default_rng(0).integers(0, 256, 100_000, dtype=np.uint8)
    kept = big.copy()
    big.flags.writeable = writeable
    rows = [big[i * 5001 + i : i * 5001 + i + 4096] for i in range(4)]
    assert same(encode(code, 2, rows), encode(REFERENCE, 2, rows))
    assert np.array_equal(big, kept)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_subset_of_the_lost_columns_can_be_wanted(name: str) -> None:
    """One parity column alone, and data and parity together, in the order asked for."""
    code, rows = need(name), random_rows(4, 128, 3)
    columns = [*rows, *encode(REFERENCE, 3, rows)]
    for have, want in [
        ((0, 1, 2, 3), (5,)),
        ((1, 3, 4, 6), (0, 2, 5)),
        ((2, 4, 5, 6), (1,)),
        ((0, 1, 2, 3), (6, 4)),
    ]:
        assert same(reconstruct(code, 3, columns, have, want), [columns[c] for c in want])


def test_isal_keeps_its_tables_right_when_many_patterns_alternate() -> None:
    """More patterns than are kept, some again before and after they were dropped."""
    code, rows = need(FAST), random_rows(12, ROW_BYTES, 5)
    columns = [*rows, *encode(REFERENCE, 4, rows)]
    patterns = list(itertools.combinations(range(16), 4))[:1100]
    for lost in [*patterns[::40], *patterns, *patterns[::-40]]:
        have = tuple(c for c in range(16) if c not in lost)
        assert same(reconstruct(code, 4, columns, have, lost), [columns[c] for c in lost])


def test_threads_share_a_coder() -> None:
    """Eight threads encode other rows with one back end; each gets its own parity."""
    code = need(FAST)
    rows = [random_rows(4, 8192, seed) for seed in range(8)]
    expected = [encode(REFERENCE, 2, row) for row in rows]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(20):
            made = list(pool.map(lambda row: encode(code, 2, row), rows))
            assert all(same(a, b) for a, b in zip(made, expected, strict=True))


@pytest.mark.parametrize("name", BACKENDS)
def test_rows_of_different_lengths_are_refused(name: str) -> None:
    """Writing by address past a shorter row would corrupt what lies behind it."""
    code, rows = need(name), random_rows(4, 64, 0)
    with pytest.raises(ValueError, match="one length"):
        code.encode(Code.RS_CAUCHY, 2, rows, [np.zeros(64, np.uint8), np.zeros(63, np.uint8)])
    with pytest.raises(ValueError, match="one length"):
        code.encode(Code.RS_CAUCHY, 2, [*rows[:3], rows[3][:60]], blank(2, 64))
    with pytest.raises(ValueError, match="contiguous"):
        code.encode(Code.RS_CAUCHY, 1, rows, [np.zeros(128, np.uint8)[::2]])


@pytest.mark.parametrize("name", BACKENDS)
def test_too_few_or_too_many_rows_are_refused(name: str) -> None:
    """A row too few would be read from whatever address comes next."""
    code, rows = need(name), random_rows(4, 64, 0)
    for sources, targets in [(rows[:3], 1), (rows, 2), (rows, 0)]:
        with pytest.raises(ValueError):
            code.reconstruct(Code.RS_CAUCHY, 4, 2, (0, 1, 2, 3), (5,), sources, blank(targets, 64))


class _Broken:
    """The reference, but one bit is flipped in row `row` of its answer number `call`."""

    name = "broken"

    def __init__(self, call: int, row: int) -> None:
        self._calls = itertools.count()
        self._call, self._row = call, row

    def coder(self, data: int, parity: int, have: Columns, want: Columns) -> Coder:
        right = NumpyBackend().coder(data, parity, have, want)

        def run(sources: Sequence[int], targets: Sequence[int], length: int) -> None:
            right(sources, targets, length)
            if next(self._calls) == self._call:
                row_at(targets[self._row], length)[length - 1] ^= 1

        return run


class _Idle:
    """Touches nothing."""

    name = "idle"

    def coder(self, data: int, parity: int, have: Columns, want: Columns) -> Coder:
        return lambda sources, targets, length: None


@pytest.mark.parametrize("call", [0, 1])
@pytest.mark.parametrize("row", [0, 1])
def test_self_test_catches_one_wrong_bit(call: int, row: int) -> None:
    """In encode and in decode, in each row: RuntimeError with the name."""
    with pytest.raises(RuntimeError, match="broken disagrees"):
        self_test(_Broken(call, row))
    self_test(NumpyBackend())


def test_self_test_catches_a_back_end_that_does_nothing() -> None:
    """Untouched targets are not taken for answers."""
    with pytest.raises(RuntimeError, match="idle"):
        self_test(_Idle())


def test_an_unusable_back_end_is_passed_over_aloud(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """choose_backend takes the next one and logs why."""

    def fail(name: str) -> Backend:
        if name != "numpy":
            raise RuntimeError(f"{name} is broken today")
        return NumpyBackend()

    monkeypatch.setattr(codec, "open_backend", fail)
    with caplog.at_level(logging.WARNING, "hpstore.codec"):
        assert choose_backend().name == "numpy"
    assert [r.args[0] for r in caplog.records if isinstance(r.args, tuple)] == list(BACKENDS[:-1])


def test_the_fastest_back_end_is_chosen() -> None:
    """ISA-L is in pyeclib's wheel, so it is what a plain install uses."""
    assert choose_backend().name == FAST
    assert choose_backend() is choose_backend()  # every pool of a process has the same one
    assert choose_backend("numpy").name == "numpy"
    with pytest.raises(ValueError, match="no erasure back end"):
        open_backend("magic")


def test_copies_are_copied() -> None:
    """An object of m + 1 copies: every target is the source; nothing is encoded."""
    code = ErasureCode(NumpyBackend())
    (row,) = random_rows(1, 100, 0)
    targets = blank(3, 100)
    code.encode(Code.COPIES, 3, [row], targets)
    assert all(np.array_equal(target, row) for target in targets)
    code.reconstruct(Code.COPIES, 1, 3, (2,), (0,), [row], targets[:1])
    assert np.array_equal(targets[0], row)


def test_nothing_wanted_or_nothing_there_is_no_work() -> None:
    """Empty rows and empty wishes are answered without calling the back end."""
    code = need(FAST)
    code.reconstruct(Code.RS_CAUCHY, 4, 2, (0, 1, 2, 3), (), random_rows(4, 8, 0), [])
    code.encode(Code.RS_CAUCHY, 2, blank(4, 0), blank(2, 0))


@pytest.mark.parametrize("name", BACKENDS)
def test_the_encoder_by_address_is_the_same_code(name: str) -> None:
    """What the write pipeline calls gives what encode() gives."""
    code, rows, made = need(name), random_rows(5, 208, 1), blank(3, 208)
    code.encoder(5, 3)([r.ctypes.data for r in rows], [r.ctypes.data for r in made], 208)
    assert same(made, encode(REFERENCE, 3, rows))


def test_the_field_is_a_field() -> None:
    """Inverses, commutativity, distributivity, against carry-less multiplication by hand."""

    def by_hand(a: int, b: int) -> int:
        result = 0
        for bit in range(8):
            if b >> bit & 1:
                result ^= a << bit
        for bit in range(14, 7, -1):
            if result >> bit & 1:
                result ^= 0x11D << (bit - 8)
        return result

    for a in range(256):
        for b in range(0, 256, 7):
            assert multiply(a, b) == multiply(b, a) == by_hand(a, b)
    assert all(multiply(a, inverse(a)) == 1 for a in range(1, 256))
    with pytest.raises(ZeroDivisionError):
        inverse(0)


def test_a_matrix_times_its_inverse_is_one() -> None:
    """For random k rows of the 24+8 generator; a singular matrix is refused."""
    rng = np.random.default_rng(0)
    generator = cauchy_matrix(24, 8)
    for _ in range(10):
        rows = generator[np.sort(rng.choice(32, 24, replace=False))]
        assert np.array_equal(matmul(rows, invert(rows)), np.eye(24, dtype=np.uint8))
    with pytest.raises(ValueError, match="singular"):
        invert(np.zeros((2, 2), np.uint8))


@pytest.mark.parametrize("have", [(0, 1, 2), (0, 1, 2, 3, 4)])
def test_a_wrong_number_of_survivors_is_refused(have: Columns) -> None:
    """k columns are needed, neither fewer nor more."""
    rows = random_rows(len(have), 8, 0)
    with pytest.raises(ValueError, match="4"):
        REFERENCE.reconstruct(Code.RS_CAUCHY, 4, 2, have, (5,), rows, blank(1, 8))
