"""safetensors files and Hugging Face folders: written as a stream, read through a memory map.

The format is 8 bytes of header length, a JSON header, raw little-endian bytes; it needs no library.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from hpstore.errors import CheckpointError, MalformedFile
from hpstore.format.untrusted_bytes import MALFORMED, brief
from hpstore.units import MIB, round_up

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    **({"F8_E8M0": torch.float8_e8m0fnu} if hasattr(torch, "float8_e8m0fnu") else {}),  # torch 2.7
}
NAMES = {str(dtype).removeprefix("torch."): name for name, dtype in DTYPES.items()}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_HEADER_BYTES = 100 * MIB  # as the library has it


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor to be written: its name in the file, our dtype and shape."""

    name: str
    source: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def is_ours(name: str) -> bool:
    """Whether a file of this name is part of an export."""
    return name == INDEX or (name.startswith("model") and name.endswith(".safetensors"))


def sharded(entries: Sequence[TensorEntry], max_bytes: int) -> list[list[TensorEntry]]:
    """Entries by file, in order, at most `max_bytes` each unless one alone is larger. Pure."""
    shards: list[list[TensorEntry]] = [[]]
    total = 0
    for entry in entries:
        if shards[-1] and total + entry.nbytes > max_bytes:
            shards.append([])
            total = 0
        shards[-1].append(entry)
        total += entry.nbytes
    return [aligned(shard) for shard in shards]


def aligned(entries: Sequence[TensorEntry]) -> list[TensorEntry]:
    """Wide dtypes first, so that every tensor starts at a multiple of its width."""
    return sorted(entries, key=lambda e: -DTYPES[NAMES[e.dtype]].itemsize)


def shard_names(count: int) -> list[str]:
    """File names as transformers expects them."""
    if count == 1:
        return [SINGLE]
    return [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]


def index_of(shards: Sequence[Sequence[TensorEntry]], names: Sequence[str]) -> dict[str, Any]:
    """What model.safetensors.index.json holds."""
    total = sum(entry.nbytes for shard in shards for entry in shard)
    where = {e.name: name for name, shard in zip(names, shards, strict=True) for e in shard}
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}


def header(entries: Sequence[TensorEntry], metadata: Mapping[str, str]) -> bytes:
    """The beginning of a file whose tensors follow in this order."""
    body: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for entry in entries:
        if entry.name == "__metadata__":
            raise CheckpointError("a safetensors file cannot hold a tensor called '__metadata__'")
        body[entry.name] = {
            "dtype": NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [at, at + entry.nbytes],
        }
        at += entry.nbytes
    text = json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(round_up(len(text), 8))
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointError(f"{len(entries)} tensors are too many for one safetensors file")
    return len(text).to_bytes(8, "little") + text


def write_tensor(out: BinaryIO, tensor: torch.Tensor) -> None:
    """Raw bytes of a tensor."""
    out.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """Tensors of a file or Hugging Face folder, mapped: pages are read when they are used.

    The map is private, the file is never changed. Raises CheckpointError for what is malformed.
    """
    if path.is_file():
        return dict(_read_file(path))
    found: dict[str, torch.Tensor] = {}
    for name, wanted in _files_of(path).items():
        inside = dict(_read_file(path / name))
        lacking = sorted(set(wanted or ()) - set(inside))
        if lacking:
            raise CheckpointError(f"{path / name} holds no {lacking[:4]}, which the index names")
        found.update({n: t for n, t in inside.items() if wanted is None or n in wanted})
    return found


def _files_of(folder: Path) -> dict[str, set[str] | None]:
    """Files of a folder with the tensors to take from each (None: all)."""
    indexes = sorted(folder.glob("*.safetensors.index.json"))
    if len(indexes) == 1:
        try:
            text = indexes[0].read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise MalformedFile(f"{indexes[0]} is no index: {brief(error)}") from error
        return read_index(text, str(indexes[0]))
    single = sorted(path.name for path in folder.glob("*.safetensors"))
    if len(single) != 1 or indexes:
        raise CheckpointError(
            f"{folder} holds {len(single)} .safetensors files and {len(indexes)} index files; "
            "wanted are one file, or files with one index"
        )
    return {single[0]: None}


def read_index(text: str, where: str) -> dict[str, set[str] | None]:
    """Files that an index names, with the tensors of each. Raises CheckpointError."""
    try:
        files = _tensors_by_file(json.loads(text)["weight_map"])
    except MALFORMED as error:
        raise MalformedFile(f"{where} is no index: {brief(error)}") from error
    if any("/" in name or name.startswith(".") for name in files):
        raise CheckpointError(f"{where} names files outside its folder")
    return files


def _tensors_by_file(where: Mapping[str, str]) -> dict[str, set[str] | None]:
    files: dict[str, set[str]] = {}
    for tensor, name in where.items():
        files.setdefault(str(name), set()).add(tensor)
    return dict(sorted(files.items()))


def _read_file(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start, rows = read_header(file.read, size, str(path))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    except ValueError as error:  # a name with a null byte
        raise MalformedFile(f"{path!r} is no name of a file: {brief(error)}") from error
    mapped = np.memmap(path, np.uint8, mode="c") if size else np.empty(0, np.uint8)
    for row in rows:
        raw = torch.from_numpy(mapped[start + row.low : start + row.high])
        yield row.name, _tensor(raw, row.dtype, row.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """One tensor of a file: its bytes are [low, high) behind the header."""

    name: str
    dtype: torch.dtype
    shape: list[int]
    low: int
    high: int


def read_header(
    read: Callable[[int], bytes], size: int, where: str
) -> tuple[int, list[StoredTensor]]:
    """Where a file's tensors begin, and what they are, in the order of the header.

    `read` gives the next bytes of the file of `size` bytes. Raises MalformedFile.
    """
    try:
        length = int.from_bytes(read(8), "little")
        if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
            raise ValueError("its header is longer than the file")
        entries = json.loads(read(length))
        entries.pop("__metadata__", None)
        rows = [_checked(name, entry) for name, entry in entries.items()]
        _require_contiguous([(row.low, row.high) for row in rows], size - 8 - length)
    except OSError:
        raise
    except MALFORMED as error:
        raise MalformedFile(f"{where} is not a safetensors file: {brief(error)}") from error
    return 8 + length, rows


def _tensor(raw: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    if raw.data_ptr() % dtype.itemsize:
        raw = raw.clone()
    return raw.view(dtype).reshape(tuple(shape))


def _checked(name: str, entry: Mapping[str, Any]) -> StoredTensor:
    """An entry of the header. Raises ValueError."""
    low, high = (int(n) for n in entry["data_offsets"])
    shape = [int(n) for n in entry["shape"]]
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"{name!r} is of dtype {entry['dtype']!r}, of which hpstore knows nothing")
    dtype = DTYPES[entry["dtype"]]
    if min(shape, default=0) < 0 or not 0 <= low <= high:
        raise ValueError(f"{name!r} has a negative shape or range")
    if prod(size or 1 for size in shape) >= 1 << 63:  # an empty one may say so
        raise ValueError(f"{name!r} has a shape that is too large, {shape}")
    name.encode()  # ValueError for half a surrogate pair
    if high - low != prod(shape) * dtype.itemsize:
        raise ValueError(f"{name!r} has {high - low} bytes for {shape} of {entry['dtype']}")
    return StoredTensor(name=name, dtype=dtype, shape=shape, low=low, high=high)


def _require_contiguous(ranges: Sequence[tuple[int, int]], size: int) -> None:
    """Raise ValueError unless ranges cover `size` bytes without hole or overlap."""
    at = 0
    for low, high in sorted(ranges):
        if low != at:
            raise ValueError(f"its tensors leave a hole or overlap at byte {min(at, low)}")
        at = high
    if at != size:
        raise ValueError(f"its tensors take {at} bytes, the file has {size}: it is cut or longer")
