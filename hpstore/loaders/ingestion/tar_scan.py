"""Headers of a tar and samples by names of files, many by one call of C (tar_scan.c).

Without the library all of these return None, and tars are scanned file by file.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from hpstore.codec.galois import Bytes
from hpstore.loaders.dataset.many_ranges import ranges_library
from hpstore.loaders.dataset.value_rows import Int64s

NAME_BYTES = 101  # of a name in a header, or of an ending, with a zero behind it
_BLOCK_BYTES = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainHeaders:
    """Headers of ordinary files in a piece of a tar. `names`: each with a zero behind it; `end`:
    where the header behind the last file begins."""

    places: Int64s
    sizes: Int64s
    names: bytes
    end: int


def tar_headers(data: Bytes, most: int) -> PlainHeaders | None:
    """Parse up to `most` headers of a piece of a tar, which begins with one. Stops at the first
    that is cut off, or that is not of an ordinary file. None without the library."""
    library = ranges_library()
    if library is None:
        return None
    most = min(most, len(data) // _BLOCK_BYTES)
    places, sizes, reached = (np.empty(count, np.int64) for count in (most, most, 2))
    names = np.empty(most * NAME_BYTES, np.uint8)
    numbers = map(ctypes.c_int64, (len(data), 0, most))
    arrays = _at(data, places, sizes, names, reached)
    count = library.hpstore_tar_headers_2(arrays[0], *numbers, *arrays[1:])
    return PlainHeaders(
        places=places[:count],
        sizes=sizes[:count],
        names=names[: int(reached[1])].tobytes(),
        end=int(reached[0]),
    )


class KnownEndings:
    """Endings of files by number, as tar_samples() compares them; those of a header alone."""

    def __init__(self) -> None:
        self._raw = bytearray()
        self._numbers: list[int] = []

    def add(self, ending: str, number: int) -> None:
        """Of small letters."""
        raw = ending.encode(errors="surrogateescape")
        if len(raw) < NAME_BYTES:
            self._raw += raw.ljust(NAME_BYTES, b"\0")
            self._numbers.append(number)

    @property
    def texts(self) -> bytes:
        """Each with zeros behind it."""
        return bytes(self._raw)

    @property
    def numbers(self) -> Int64s:
        """Of each."""
        return np.array(self._numbers, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedSamples:
    """Samples of files. `endings`: the number of each file's; `begins`: which files are the first
    of a sample; `keys`: of these, which end at `key_ends`; `name_bytes`: of the files' names."""

    endings: npt.NDArray[np.uint16]
    begins: npt.NDArray[np.bool_]
    keys: bytes
    key_ends: Int64s
    name_bytes: int


def tar_samples(
    names: memoryview, count: int, known: KnownEndings, last: bytes | None, own: Collection[int]
) -> NamedSamples | None:
    """Group `count` files into samples by their names, which end with zero bytes. Stops at a name
    that needs the general rules, an unknown ending, or one that a sample has twice. None without
    the library.

    `last`: the key of the sample before, None: there is none; `own`: endings that it has already.
    """
    library = ranges_library()
    if library is None:
        return None
    numbers = known.numbers
    seen = np.full(1 + max([*numbers.tolist(), *own], default=0), -1, np.int64)
    seen[list(own)] = 0
    endings, begins = np.empty(count, np.uint16), np.empty(count, np.uint8)
    keys, key_ends = np.empty(len(names), np.uint8), np.empty(count, np.int64)
    reached = np.zeros(1, np.int64)
    taken = library.hpstore_tar_samples_1(
        *_at(np.frombuffer(names, np.uint8)),
        ctypes.c_int64(count),
        known.texts,
        *_at(numbers),
        ctypes.c_int64(len(numbers)),
        last or b"",
        ctypes.c_int64(-1 if last is None else len(last)),
        *_at(seen, endings, begins, keys, key_ends, reached),
    )
    fresh = begins[:taken].astype(np.bool_)
    ends = key_ends[: int(fresh.sum())]
    return NamedSamples(
        endings=endings[:taken],
        begins=fresh,
        keys=keys[: int(ends[-1]) if len(ends) else 0].tobytes(),
        key_ends=ends,
        name_bytes=int(reached[0]),
    )


def all_differ(keys: bytes, ends: Int64s) -> bool:
    """Whether no two of the keys between these places are the same. Sorted ones are compared with
    their neighbours alone."""
    library, count = ranges_library(), len(ends) - 1
    if library is not None and library.hpstore_keys_ascend_1(
        keys, *_at(ends), ctypes.c_int64(count)
    ):
        return True
    return len({keys[a:b] for a, b in pairwise(ends.tolist())}) == count


def _at(*arrays: npt.NDArray[np.generic]) -> list[ctypes.c_void_p]:
    return [ctypes.c_void_p(array.ctypes.data) for array in arrays]
