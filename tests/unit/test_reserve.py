"""What is kept of a device for deletes: bytes, inodes, spare files. Pure."""

from __future__ import annotations

import pytest

from hpstore.devices.base import Usage
from hpstore.devices.reserve import (
    SPARE_BYTES,
    plan_spares,
    reserve_bytes,
    reserve_inodes,
    shortage,
)
from hpstore.units import GIB, KIB, MIB

TIB = 1024 * GIB


@pytest.fixture(autouse=True)
def spare_files() -> None:
    """As many as ever: these tests are about them."""


def usage(free: int, free_inodes: int = 10_000) -> Usage:
    """Of a filesystem of 100 MiB with 10,000 inodes: 1 MiB and 100 inodes are the reserve."""
    return Usage(total=100 * MIB, free=free, inodes=10_000, free_inodes=free_inodes)


def test_the_reserve_is_a_hundredth_up_to_a_limit() -> None:
    """Of bytes and of inodes; tiny filesystems keep at most an eighth of their inodes."""
    assert reserve_bytes(usage(0)) == MIB
    assert reserve_bytes(Usage(total=TIB, free=0)) == GIB
    found = [reserve_inodes(Usage(total=1, free=0, inodes=n)) for n in (0, 64, 752, 10**4, 10**9)]
    assert found == [0, 8, 16, 100, 10_000]


def test_a_column_of_any_size_leaves_the_whole_reserve() -> None:
    """Also one that is large itself: what it takes is counted."""
    assert not shortage(usage(MIB))
    assert "bytes" not in shortage(usage(MIB))
    assert "1023.0 KiB of 100.0 MiB are free, of which 1.0 MiB are kept" in shortage(
        usage(MIB - KIB)
    )
    assert not shortage(usage(3 * MIB + 1), file_bytes=2 * MIB)
    assert shortage(usage(3 * MIB - 1), file_bytes=2 * MIB)


def test_a_small_column_may_take_half_of_the_reserve() -> None:
    """A manifest after the segments that have just fitted."""
    assert not shortage(usage(MIB), file_bytes=MIB // 2)
    assert shortage(usage(MIB - KIB), file_bytes=MIB // 2)


def test_inodes_are_named_where_they_are_what_is_used_up() -> None:
    """The column's directories count; where inodes are not counted, none are lacking."""
    assert not shortage(usage(50 * MIB, 104), inodes=4)
    assert shortage(usage(50 * MIB, 103), inodes=4) == (
        "103 of 10000 inodes are free, of which 100 are kept for deletes"
    )
    assert not shortage(Usage(total=100 * MIB, free=50 * MIB), inodes=1000)


@pytest.mark.parametrize(
    ("total", "inodes", "files"),
    [(MIB, 0, 4), (48 * MIB, 752, 6), (512 * MIB, 32_768, 64), (TIB, 10**8, 64), (TIB, 64, 4)],
)
def test_spares_are_a_small_part_of_the_filesystem(total: int, inodes: int, files: int) -> None:
    """From 4 files to 64, with a directory for every four."""
    found = plan_spares(total, inodes)
    assert found.files == files
    assert found.directories == max(2, files // 4)
    assert found.files * SPARE_BYTES <= max(total // 500, 64 * KIB)
