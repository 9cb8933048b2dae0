"""Headers of ordinary files of a tar, one behind another, many at a time.

What is in doubt (extensions, links, folders, damage) ends a run, for TarHeaders to look at.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import IO

import numpy as np

from hpstore.loaders.ingestion.tar_headers import BLOCK_BYTES, MOST_TAR_BYTES
from hpstore.units import KIB, MIB

RUN_FILES = 8192
SMALL_BYTES = 8 * KIB
_CHECKSUM = slice(148, 156)
_KINDS = (0, ord("0"))


@dataclass(frozen=True, slots=True, kw_only=True)
class TarRun:
    """Files in their order. `end`: where the header behind the last one begins."""

    names: list[str]
    headers: list[int]
    offsets: list[int]
    sizes: list[int]
    end: int


def tar_run(file: IO[bytes], at: int) -> TarRun:
    """The ordinary files from the header at byte `at` on, as many as there are, or none."""
    names: list[bytes] = []
    headers: list[int] = []
    sizes: list[int] = []
    blocks = bytearray()
    data, base, window, first = b"", at, BLOCK_BYTES, at
    while len(names) < RUN_FILES:
        if at + BLOCK_BYTES > base + len(data):
            file.seek(at)
            base, data = at, file.read(window)
            # small files are read over; of large ones only the headers are read
            window = (
                min(MIB, 2 * window)
                if at - first < 16 * BLOCK_BYTES * (len(names) + 1)
                else BLOCK_BYTES
            )
        block = data[at - base : at - base + BLOCK_BYTES]
        size = _size(block)
        if size < 0:
            break
        names.append(block[:100].partition(b"\0")[0])
        headers.append(at)
        sizes.append(size)
        blocks += block
        at += BLOCK_BYTES + -(-size // BLOCK_BYTES) * BLOCK_BYTES
    good = _intact(blocks, len(names))
    if good < len(names):
        at = headers[good]
    texts = b"\0".join(names[:good]).decode(errors="surrogateescape").split("\0") if good else []
    return TarRun(
        names=texts,
        headers=headers[:good],
        offsets=[header + BLOCK_BYTES for header in headers[:good]],
        sizes=sizes[:good],
        end=at,
    )


def _size(block: bytes) -> int:
    """Bytes of the file that a header is of; -1 where it is not plainly one of an ordinary file."""
    if len(block) < BLOCK_BYTES or block[156] not in _KINDS or block[345] or not block[0]:
        return -1
    if block[156] == 0 and block[:100].rstrip(b"\0").endswith(b"/"):
        return -1
    digits = block[124:135]
    if block[135] not in b"\0 " or not digits.isdigit():
        return -1
    try:
        size = int(digits, 8)
    except ValueError:
        return -1
    return size if size < MOST_TAR_BYTES else -1


def _intact(blocks: bytearray, count: int) -> int:
    """How many headers, from the first on, have the checksum that they say."""
    if not count:
        return 0
    table = np.frombuffer(blocks, np.uint8).reshape(count, BLOCK_BYTES)
    stored = table[:, _CHECKSUM]
    sums = table.sum(1, dtype=np.int64) - stored.sum(1, dtype=np.int64) + 8 * ord(" ")
    digits = stored[:, :6].astype(np.int64) - ord("0")
    octal = ((digits >= 0) & (digits < 8)).all(1) & (stored[:, 6] == 0)
    said = (digits * 8 ** np.arange(5, -1, -1)).sum(1)
    bad = np.flatnonzero(~octal | (said != sums))
    return int(bad[0]) if len(bad) else count
