"""torch.save files: written with one tensor in memory at a time, read through a memory map.

torch writes the file with holes where the tensors belong (torch.serialization.skip_data); they are
filled afterwards, and the ZIP's CRCs, which other readers check, are put right.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch

from hpstore.checkpoint.state.plain_tensors import is_plain_tensor
from hpstore.errors import CheckpointError, HpstoreError, MalformedFile
from hpstore.format.untrusted_bytes import MALFORMED, brief, most_inflated
from hpstore.units import MIB

_DESCRIPTOR = b"PK\x07\x08"
_ENTRY = b"PK\x01\x02"
_PIECE_BYTES = 16 * MIB
_ENTRY_SHARE = 64  # bytes of memory for an entry: a pickle has one byte of it at least
_MOST_LEVELS = 256  # of nested containers; a state that is saved has 64


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    """One file in a ZIP: where its data are, and its CRC in the central directory."""

    start: int
    size: int
    crc_at: int


# Any: nested values of a training state
def write_torch_file(path: Path, state: Any, tensor: Callable[[int], torch.Tensor]) -> None:
    """As write_torch_stream, into a new file."""
    with path.open("w+b") as out:
        write_torch_stream(out, state, tensor)


def write_torch_stream(out: BinaryIO, state: Any, tensor: Callable[[int], torch.Tensor]) -> None:
    """torch.save(state), where the n-th tensor in it, in order, is `tensor(n)`.

    The tensors in `state` are placeholders of the same shapes and dtypes, whose memory is never
    touched; each has its own. `out` is empty, and can be read, written and sought.
    """
    with torch.serialization.skip_data():
        torch.save(state, out)
    count = sum(1 for _ in tensors_in(state))
    records = _records(out)
    if len(records) != count:
        raise CheckpointError(f"torch wrote {len(records)} storages for {count} tensors")
    for number in range(count):
        _fill(out, records[number], tensor(number))


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Tensors in nested dicts, lists and tuples, in the order in which they are pickled."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for child in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(child)


def _records(file: BinaryIO) -> dict[int, _Record]:
    """The storages of a file by number."""
    found = {}
    with zipfile.ZipFile(file) as archive:
        entry_at = archive.start_dir
        for info in archive.infolist():
            file.seek(entry_at)
            fixed = file.read(46)
            if fixed[:4] != _ENTRY:
                raise CheckpointError("torch wrote a file that is no plain ZIP")
            folder, _, name = info.filename.rpartition("/")
            if folder.endswith("/data") and name.isdigit():
                file.seek(info.header_offset + 26)
                name_bytes, extra_bytes = struct.unpack("<HH", file.read(4))
                start = info.header_offset + 30 + name_bytes + extra_bytes
                found[int(name)] = _Record(start=start, size=info.file_size, crc_at=entry_at + 16)
            entry_at += 46 + sum(struct.unpack("<HHH", fixed[28:34]))
    return found


def _fill(out: BinaryIO, record: _Record, tensor: torch.Tensor) -> None:
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
    if len(data) != record.size:
        raise CheckpointError(f"torch left {record.size} bytes for a tensor of {len(data)}")
    if not record.size:
        return
    out.seek(record.start)
    sum32 = 0
    for at in range(0, record.size, _PIECE_BYTES):
        piece = data[at : at + _PIECE_BYTES]
        out.write(piece)
        sum32 = zlib.crc32(piece, sum32)
    crc = struct.pack("<I", sum32)
    if out.read(4) != _DESCRIPTOR:
        raise CheckpointError("torch wrote a ZIP without data descriptors")
    out.write(crc)
    out.seek(record.crc_at)
    out.write(crc)


def read_torch_file(path: Path, *, allow_pickle: bool) -> Any:
    """What torch.save wrote, mapped where the file allows it: one that was compressed since is
    read into memory.

    Raises CheckpointError for what is no such file, and, unless `allow_pickle`, for what only
    pickle can read (unpickling runs code that the file's writer chose) and for tensors that repeat
    a few bytes without end.
    """
    try:
        zipped = zipfile.is_zipfile(path)
        mapped = zipped and not packed_members(path)
    except (zipfile.BadZipFile, *MALFORMED) as error:
        raise MalformedFile(f"{path} is not a torch.save file: {brief(error)}") from error
    if zipped and not allow_pickle:
        with open(path, "rb") as file:
            require_bounded(file, str(path))
    try:
        if allow_pickle:
            return torch.load(path, map_location="cpu", mmap=mapped, weights_only=False)
        if zipped:
            found = torch.load(path, map_location="cpu", mmap=mapped, weights_only=True)
        else:
            found = _read_old_file(path)
        require_bounded_state(found, path.stat().st_size, str(path))
        return found
    except (MemoryError, HpstoreError):
        raise
    except Exception as error:
        first = str(error).strip().split("\n")[0]
        if "Weights only load failed" in first and zipped:
            raise MalformedFile(
                f"{path} holds objects that only pickle can read, which runs code that its writer "
                "chose. Nothing was imported. If you trust the file: --allow-pickle "
                "(allow_pickle=True)"
            ) from error
        raise MalformedFile(
            f"{path} cannot be read as a torch.save file (cut, or another format): {first[:120]}"
        ) from error


def require_bounded(file: BinaryIO, where: str) -> None:
    """Raise MalformedFile for a ZIP that would take far more memory than it has bytes: torch
    inflates members whole, and writes none that are compressed. The file is at its beginning
    afterwards."""
    size = file.seek(0, io.SEEK_END)
    try:
        with zipfile.ZipFile(file) as archive:
            total = sum(member.file_size for member in archive.infolist())
    except HpstoreError:
        raise
    except (zipfile.BadZipFile, OSError, *MALFORMED) as error:
        raise MalformedFile(f"{where} is not a torch.save file: {brief(error)}") from error
    most = most_inflated(size)
    if total > most:
        raise MalformedFile(f"{where} would take {total} bytes of memory; at most {most} are read")
    file.seek(0)


def require_bounded_state(state: Any, stored_bytes: int, where: str) -> None:
    """Raise MalformedFile for what repeats a few bytes without end: a copy of a tensor such as
    torch.ones(1).expand(1 << 40) takes all memory, and so does a walk through lists that hold
    another list twice, which holds another one twice."""
    entries, total = _unfolded(state, where)
    most = most_inflated(stored_bytes)
    if total > most:
        raise MalformedFile(
            f"{where} has {stored_bytes} bytes and tensors of {total}: at most {most} are read"
        )
    if entries > most // _ENTRY_SHARE:
        raise MalformedFile(
            f"{where} has {stored_bytes} bytes and lists and dicts that hold one another again and "
            f"again, {entries} entries in all: at most {most // _ENTRY_SHARE} are read"
        )


def _unfolded(state: Any, where: str) -> tuple[int, int]:
    """Entries of nested dicts, lists and tuples and bytes of tensors, of those that are there more
    than once each time; each is looked at once. Raises MalformedFile for a state without end."""
    known: dict[int, tuple[int, int]] = {}  # of containers, by id
    above: set[int] = set()

    def measure(value: Any, depth: int) -> tuple[int, int]:
        if isinstance(value, torch.Tensor):
            return 1, _tensor_bytes(value)
        if not isinstance(value, (dict, list, tuple)):
            return 1, 0
        if id(value) in known:
            return known[id(value)]
        if id(value) in above or depth > _MOST_LEVELS:
            raise MalformedFile(f"{where} is nested deeper than {_MOST_LEVELS}, or holds itself")
        above.add(id(value))
        entries, nbytes = 1, 0
        for child in value.values() if isinstance(value, dict) else value:
            more = measure(child, depth + 1)
            entries, nbytes = entries + more[0], nbytes + more[1]
        above.remove(id(value))
        known[id(value)] = entries, nbytes
        return known[id(value)]

    return measure(state, 0)


def _tensor_bytes(found: torch.Tensor) -> int:
    """Bytes of a copy; 0 for sparse, nested and quantised ones, of which no copy is made."""
    if not is_plain_tensor(found):
        return 0
    return prod(found.shape) * found.element_size()


def packed_members(file: BinaryIO | Path) -> list[str]:
    """Names of the members of a ZIP that are compressed. torch writes none, and maps the file as
    if there were none."""
    with zipfile.ZipFile(file) as archive:
        return [member.filename for member in archive.infolist() if member.compress_type]


def _read_old_file(path: Path) -> Any:
    """What torch before 1.6 wrote. Its reader takes the memory that the file says; here no read
    asks for more than is there, and a tensor larger than the file is refused before it is used."""
    size = path.stat().st_size

    def checked(storage: Any, _: str) -> Any:  # Any: torch gives an untyped storage
        if storage.nbytes() > size:
            raise ValueError(f"a tensor of {storage.nbytes()} bytes in a file of {size}")
        return storage

    with path.open("rb") as file:
        bounded: Any = _Bounded(file, size)  # Any: as far as torch's reader uses a file
        return torch.load(bounded, map_location=checked, weights_only=True)


class _Bounded:
    """A file for torch whose reads never allocate more than is left of it."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size = file, size
        self.seek, self.tell, self.readline = file.seek, file.tell, file.readline
        self.readinto = file.readinto  # type: ignore[attr-defined]  # of a buffered reader

    def read(self, count: int = -1) -> bytes:
        """As of the file."""
        left = max(0, self._size - self._file.tell())
        return self._file.read(left if count < 0 else min(count, left))
