"""A file of known bytes, for tests of batches of reads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

SIZE = 1 << 20
BODY = np.random.default_rng(3).integers(0, 256, SIZE, dtype=np.uint8)


@contextmanager
def open_body(directory: Path) -> Iterator[int]:
    """A descriptor of a file that holds BODY."""
    path = directory / "body"
    path.write_bytes(BODY.tobytes())
    opened = os.open(path, os.O_RDONLY)
    try:
        yield opened
    finally:
        os.close(opened)
