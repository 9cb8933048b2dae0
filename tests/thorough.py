"""What a test run goes through: all of a long row of cases with HPSTORE_LONG_TESTS=1, else samples;
what needs a drive, where the temporary directory is on one."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

LONG = bool(os.environ.get("HPSTORE_LONG_TESTS"))


def crash_points(every: int = 11) -> Iterator[int]:
    """Operations before which a crash is tried, from the first one on: all, or one in `every`.

    The caller ends when its act runs through. Eleven: devices are written in turn, in threes and
    sixes, and each is to be met.
    """
    return itertools.count(0, 1 if LONG else every)


def need_drive(path: Path) -> None:
    """Skip where files are in memory, as in a /tmp of many systems."""
    if os.major(path.stat().st_dev) == 0:
        pytest.skip(f"{path} is on no drive: set TMPDIR to a directory that is")
