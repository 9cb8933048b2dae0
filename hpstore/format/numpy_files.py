"""Arrays in .npy and .npz files that anybody may have written: headers are checked first.

numpy.load allocates what a header says before it reads, and raises whatever its parsers raise.
Nothing is unpickled.
"""

from __future__ import annotations

import ast
import lzma
import math
import os
import re
import sys
import warnings
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from hpstore.errors import MalformedFile
from hpstore.format.untrusted_bytes import MALFORMED, brief, most_inflated, whole
from hpstore.units import format_bytes

_MAGIC = b"\x93NUMPY"
_MOST_HEADER_BYTES = 10_000  # as numpy has it
_LONG = re.compile(r"(?<=\d)L\b")  # of numbers that Python 2 wrote
# beside MALFORMED, of members of a zip
_OTHERS = (RuntimeError, zipfile.BadZipFile, zlib.error, lzma.LZMAError)
# Any: arrays of every dtype
Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Header:
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran: bool
    nbytes: int  # of the header itself

    @property
    def data_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def mapped_npy(path: Path) -> Array:
    """A .npy file as a read-only map. Raises MalformedFile."""
    try:
        with path.open("rb") as file:
            header = _read_header(file)
        there = path.stat().st_size - header.nbytes
        if header.data_bytes > there:
            raise ValueError(f"{header.data_bytes} bytes of data are announced, {there} are there")
        array: Array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (*MALFORMED, *_OTHERS, OSError) as error:
        raise MalformedFile(f"{path} cannot be read as .npy: {brief(error)}") from error
    return array


def npz_arrays(path: Path, *, opener: Callable[[str, int], int] | None = None) -> dict[str, Array]:
    """The arrays of a .npz file, in memory. `opener`: as open() takes it. Raises MalformedFile,
    FileNotFoundError."""
    try:
        with open(path, "rb", opener=opener) as raw, zipfile.ZipFile(raw) as archive:
            members = archive.infolist()
            most = most_inflated(os.fstat(raw.fileno()).st_size)
            total = sum(m.file_size for m in members)
            if total > most:
                raise ValueError(
                    f"its arrays take {format_bytes(total)} of memory, far more than the file; at "
                    f"most {format_bytes(most)} are read. Save them as .npy files, which are mapped"
                )
            return {m.filename.removesuffix(".npy"): _member(archive, m) for m in members}
    except FileNotFoundError:
        raise
    except (*MALFORMED, *_OTHERS, OSError) as error:
        raise MalformedFile(f"{path} cannot be read as .npz: {brief(error)}") from error


def require_characters(flat: Array) -> None:
    """Raise ValueError where a contiguous array (n,) of text, or a field of it, holds numbers that
    are no characters: numpy itself takes them, and raises SystemError when they are looked at."""
    for name in flat.dtype.names or ():
        require_characters(np.ascontiguousarray(flat[name]).reshape(-1))
    if flat.dtype.kind == "U" and flat.nbytes:
        codes = flat.view(np.dtype(np.uint32).newbyteorder(flat.dtype.byteorder))
        if codes.max() > sys.maxunicode:
            raise ValueError(f"the text has {int(codes.max()):#x}, which is not a character")


def _member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Array:
    with archive.open(member) as file:
        header = _read_header(file)
        if header.nbytes + header.data_bytes != member.file_size:
            raise ValueError(f"{member.filename!r} has not the size that its header says")
        data = file.read(header.data_bytes)
        if len(data) != header.data_bytes or file.read(1):
            raise ValueError(f"{member.filename!r} is cut short, or longer than it says")
    flat = np.frombuffer(bytearray(data), header.dtype) if data else np.empty(0, header.dtype)
    require_characters(flat)
    return flat.reshape(header.shape, order="F" if header.fortran else "C")


def _read_header(file: IO[bytes]) -> _Header:
    """What a .npy begins with (numpy.lib.format). Raises ValueError, SyntaxError and others."""
    head = file.read(8)
    if head[:6] != _MAGIC or len(head) < 8 or head[6] not in (1, 2, 3):
        raise ValueError("it does not begin as .npy")
    width = 2 if head[6] == 1 else 4
    size = int.from_bytes(file.read(width), "little")
    text = file.read(min(size, _MOST_HEADER_BYTES + 1))
    if size > _MOST_HEADER_BYTES or len(text) < size:
        raise ValueError(f"its header of {size} bytes is cut short or too long")
    decoded = text.decode("utf-8" if head[6] == 3 else "latin1")
    try:
        with warnings.catch_warnings(action="ignore"):  # of odd literals
            body = ast.literal_eval(_LONG.sub("", decoded))
    except MemoryError:  # what the parser of Python says of 9,000 signs in a row
        raise ValueError("its header is nested too deeply") from None
    if not isinstance(body, dict) or body.keys() != {"descr", "fortran_order", "shape"}:
        raise ValueError("its header has not the entries of one")
    shape = body["shape"]
    if not isinstance(shape, tuple) or type(body["fortran_order"]) is not bool:
        raise ValueError("its header has entries of other types")
    dtype = np.lib.format.descr_to_dtype(body["descr"])
    if dtype.hasobject:
        raise ValueError("Object arrays are pickles, which are not read")
    sizes = tuple(whole(size, "a dimension") for size in shape)
    return _Header(dtype=dtype, shape=sizes, fortran=body["fortran_order"], nbytes=8 + width + size)
