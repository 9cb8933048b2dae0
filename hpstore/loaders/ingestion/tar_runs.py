"""Headers of ordinary files of a tar, one behind another, many at a time.

What is in doubt (extensions, links, folders, damage) ends a run, for TarHeaders to look at.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import IO

import numpy as np

from hpstore.codec.galois import Bytes
from hpstore.loaders.dataset.record_layout import Int64s
from hpstore.loaders.ingestion.tar_headers import BLOCK_BYTES, MOST_TAR_BYTES
from hpstore.loaders.ingestion.tar_scan import PlainHeaders, tar_headers
from hpstore.units import MIB

RUN_FILES = 8192
_HEADERS_BYTES = 4 * BLOCK_BYTES  # of a file, with a pax header of times before it
_NONE: Int64s = np.empty(0, np.int64)
_CHECKSUM, _SIZE = slice(148, 156), slice(124, 136)
_KIND, _PREFIX = 156, 345


@dataclass(frozen=True, slots=True, kw_only=True)
class TarRun:
    """Files in their order. `names`: each with a zero behind it; `end`: where the header behind the
    last one begins."""

    names: bytes
    offsets: Int64s
    sizes: Int64s
    end: int

    def __len__(self) -> int:
        return len(self.sizes)


def tar_run(file: IO[bytes], at: int) -> TarRun:
    """The ordinary files from the header at byte `at` on, as many as there are, or none."""
    names = list[bytes]()
    offsets, sizes = [_NONE], [_NONE]
    window, first, count = _HEADERS_BYTES, at, 0
    memory = np.empty(MIB, np.uint8)  # read into again: fresh memory costs as much as the read
    while count < RUN_FILES:
        data = memory[: os.preadv(file.fileno(), [memory[:window].data], at)]
        most = RUN_FILES - count
        found = tar_headers(data, most) or _followed(data.tobytes(), most)
        if not len(found.places):
            break
        offsets.append(at + found.places + BLOCK_BYTES)
        sizes.append(found.sizes)
        names.append(found.names)
        count += len(found.places)
        at += found.end
        # small files are read over; of large ones only the headers are read
        small = at - first < 16 * BLOCK_BYTES * (count + 1)
        window = min(MIB, 2 * window) if small else _HEADERS_BYTES
    return TarRun(
        names=b"".join(names),
        offsets=np.concatenate(offsets),
        sizes=np.concatenate(sizes),
        end=at,
    )


def _followed(data: bytes, most: int) -> PlainHeaders:
    """As tar_headers(), without the library: sizes are followed first, then all headers that were
    met are checked together, and what lies behind one that is damaged is forgotten."""
    places: list[int] = []
    sizes: list[int] = []
    at, last = 0, len(data) - BLOCK_BYTES
    while at <= last and len(places) < most:
        try:
            size = int(data[at + 124 : at + 135], 8)
        except ValueError:
            break
        if not 0 <= size < MOST_TAR_BYTES:
            break
        places.append(at)
        sizes.append(size)
        at += BLOCK_BYTES + -(-size // BLOCK_BYTES) * BLOCK_BYTES
    blocks = b"".join([data[place : place + BLOCK_BYTES] for place in places])
    table = np.frombuffer(blocks, np.uint8).reshape(-1, BLOCK_BYTES)
    good = _intact(table)
    if good < len(places):
        at = places[good]
    return PlainHeaders(
        places=np.array(places[:good], np.int64),
        sizes=np.array(sizes[:good], np.int64),
        names=_names(table[:good]),
        end=at,
    )


def _names(table: Bytes) -> bytes:
    """The name in each header, each with a zero behind it."""
    if not len(table):
        return b""
    fields = np.ascontiguousarray(table[:, :100]).view("S100")[:, 0].tolist()
    return b"".join([one.partition(b"\0")[0] + b"\0" for one in fields])


def _intact(table: Bytes) -> int:
    """How many headers, from the first on, are plainly those of ordinary files, with the checksum
    that they say."""
    stored = table[:, _CHECKSUM]
    sums = table.sum(1, dtype=np.int64) - stored.sum(1, dtype=np.int64) + 8 * ord(" ")
    digits = stored[:, :6].astype(np.int64) - ord("0")
    octal = ((digits >= 0) & (digits < 8)).all(1) & (stored[:, 6] == 0)
    said = (digits * 8 ** np.arange(5, -1, -1)).sum(1)
    size = table[:, _SIZE]
    plain = ((size[:, :-1] >= ord("0")) & (size[:, :-1] <= ord("7"))).all(1)
    plain &= (size[:, -1] == 0) | (size[:, -1] == ord(" "))
    plain &= (table[:, 0] != 0) & (table[:, _PREFIX] == 0)
    old = table[:, _KIND] == 0  # of which a name that ends with a slash is a folder
    plain &= old | (table[:, _KIND] == ord("0"))
    slash = np.zeros(len(table), np.bool_)
    for row in np.flatnonzero(old & plain).tolist():
        slash[row] = table[row, :100].tobytes().partition(b"\0")[0].endswith(b"/")
    bad = np.flatnonzero(~octal | (said != sums) | ~plain | slash)
    return int(bad[0]) if len(bad) else len(table)
