"""Many ranges of memory, of a file, or many small files by one call of C each (decision 0153).

Without the library (hpstore installed without a C compiler) the same is done one by one.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import logging
import os
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hpstore.codec import address_of
from hpstore.codec.galois import Bytes
from hpstore.loaders.dataset.value_rows import Int64s, UInt64s, ValueRows

_log = logging.getLogger(__name__)
_LIBRARY = "hpstore._ranges"  # of many_ranges.c; an extension to be installed, not to import
_FUNCTIONS = ("copy_ranges", "read_ranges", "read_files", "jpegs_end", "decimals")


@functools.cache
def ranges_library() -> ctypes.CDLL | None:
    """The library; None where hpstore was installed without a C compiler, said once."""
    spec = importlib.util.find_spec(_LIBRARY)
    try:
        if spec is None or spec.origin is None:
            raise OSError("it was not built")
        library = ctypes.CDLL(spec.origin)
        for name in _FUNCTIONS:
            getattr(library, f"hpstore_{name}_1").restype = None
        library.hpstore_tar_headers_2.restype = ctypes.c_int64
        library.hpstore_tar_samples_1.restype = ctypes.c_int64
        library.hpstore_keys_ascend_1.restype = ctypes.c_int64
    except (OSError, AttributeError) as error:
        _log.warning(
            "records are ingested one by one, which is slower: no compiled reads (%s). With a C "
            "compiler there (gcc, libc6-dev), install hpstore again",
            error,
        )
        return None
    return library


def copy_rows(rows: ValueRows, out: Bytes, starts: Int64s) -> None:
    """Copy row i to byte `starts[i]` of `out`, uint8 (bytes,). Any thread, without
    the GIL; targets do not overlap. Raises IndexError for what is outside of memory.
    """
    _require_inside(out, starts, rows.lengths)
    sources, library = rows.addresses(), ranges_library()
    if library is None:
        view = out.data
        for start, row in zip(starts.tolist(), rows.views(), strict=True):
            view[start : start + len(row)] = row
        return
    to, lengths = _addresses(out, starts), np.ascontiguousarray(rows.lengths, np.int64)
    _call(library.hpstore_copy_ranges_1, to, sources, lengths, count=len(rows))


def read_ranges(file: int, offsets: Int64s, out: Bytes, starts: Int64s, lengths: Int64s) -> None:
    """Read `lengths[i]` bytes from byte `offsets[i]` of an open file to byte `starts[i]` of `out`.

    Any thread, without the GIL. Raises OSError, and EOFError where the file ends
    before a range does.
    """
    _require_inside(out, starts, lengths)
    if len(offsets) != len(starts):
        raise ValueError(f"{len(offsets)} offsets for {len(starts)} ranges")
    library = ranges_library()
    if library is None:
        got = _read_one_by_one(file, offsets, out, starts, lengths)
    else:
        got = np.empty(len(starts), np.int64)
        to, offsets = _addresses(out, starts), np.ascontiguousarray(offsets, np.int64)
        arrays = (offsets, np.ascontiguousarray(lengths, np.int64), to, got)
        _call(library.hpstore_read_ranges_1, *arrays, count=len(starts), first=file)
    if (got < 0).any():
        error = -int(got[got < 0][0])
        raise OSError(error, os.strerror(error))
    if (got != lengths).any():
        raise EOFError("the file ends before a range does")


def _read_one_by_one(
    file: int, offsets: Int64s, out: Bytes, starts: Int64s, lengths: Int64s
) -> Int64s:
    got = np.zeros(len(starts), np.int64)
    for row, (offset, start, length) in enumerate(
        zip(offsets.tolist(), starts.tolist(), lengths.tolist(), strict=True)
    ):
        while got[row] < length:
            done = int(got[row])
            read = os.preadv(file, [out.data[start + done : start + length]], offset + done)
            if not read:
                break
            got[row] += read
    return got


def read_files(paths: Sequence[str], out: Bytes, starts: Int64s, rooms: Int64s) -> Int64s:
    """Read files whole, the i-th to byte `starts[i]` of `out`, `rooms[i]` bytes at most.

    Any thread, without the GIL. Returns how many bytes there were of each; of one
    that cannot be read, its errno below zero.
    """
    _require_inside(out, starts, rooms)
    got = np.zeros(len(paths), np.int64)
    if not paths:
        return got
    library = ranges_library()
    if library is None:
        for row, path in enumerate(paths):
            try:
                got[row] = _read_file(path, out[starts[row] : starts[row] + rooms[row]])
            except OSError as error:
                got[row] = -(error.errno or 1)
        return got
    names = os.fsencode("\0".join(paths)) + b"\0"
    raw = np.frombuffer(names, np.uint8)
    ends = np.flatnonzero(raw == 0)
    if len(ends) != len(paths):
        raise ValueError("a path holds a zero byte")
    begins = np.concatenate([[0], ends[:-1] + 1]).astype(np.int64)
    arrays = (raw, begins, np.ascontiguousarray(rooms, np.int64), _addresses(out, starts), got)
    _call(library.hpstore_read_files_1, *arrays, count=len(paths))
    return got


def _read_file(path: str, out: Bytes) -> int:
    done = 0
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # waits at no FIFO
    try:
        while done < len(out) and (read := os.preadv(file, [out.data[done:]], done)):
            done += read
    finally:
        os.close(file)
    return done


def jpegs_end(rows: ValueRows) -> npt.NDArray[np.bool_] | None:
    """Whether the markers of each JPEG, of two bytes at least, lead to its end; None: there is no
    library."""
    library = ranges_library()
    if library is None:
        return None
    ends = np.zeros(len(rows), np.uint8)
    lengths = np.ascontiguousarray(rows.lengths, np.int64)
    _call(library.hpstore_jpegs_end_1, rows.addresses(), lengths, ends, count=len(rows))
    return ends.astype(np.bool_)


def decimals(rows: ValueRows) -> Int64s | None:
    """Parse these texts as whole numbers. None without the library, or where a text is anything but
    a number of at most 18 digits."""
    library = ranges_library()
    if library is None:
        return None
    values, plain = np.empty(len(rows), np.int64), np.empty(len(rows), np.uint8)
    lengths = np.ascontiguousarray(rows.lengths, np.int64)
    _call(library.hpstore_decimals_1, rows.addresses(), lengths, values, plain, count=len(rows))
    return values if plain.all() else None


def _require_inside(out: Bytes, starts: Int64s, lengths: Int64s) -> None:
    if not (out.flags.writeable and out.flags.c_contiguous and out.dtype == np.uint8):
        raise ValueError("out is writable, contiguous and uint8")
    if len(starts) != len(lengths):
        raise ValueError(f"{len(starts)} places for {len(lengths)} ranges")
    if ((starts < 0) | (lengths < 0) | (lengths > len(out) - starts)).any():
        raise IndexError(f"a range is outside of its memory of {len(out)} bytes")


def _addresses(out: Bytes, starts: Int64s) -> UInt64s:
    base = address_of(out) if len(out) else 0
    return starts.astype(np.uint64) + np.uint64(base)


def _call(
    function: ctypes._NamedFuncPointer,
    *arrays: npt.NDArray[np.generic],
    count: int,
    first: int = -1,
) -> None:
    places = [ctypes.c_void_p(array.ctypes.data) for array in arrays]
    leading = [ctypes.c_int(first)] if first >= 0 else []
    function(*leading, *places, ctypes.c_int64(count))
