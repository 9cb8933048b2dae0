"""Token files: Megatron's .bin with its .idx, and one array of uint16 as nanoGPT writes it.

Both are arrays that numpy maps. Counts and places of an .idx are checked before anything is
allocated or read by them.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hpstore.errors import ConfigError, MalformedFile
from hpstore.loaders.dataset.fields import Array, Field
from hpstore.loaders.ingestion.sample_source import IndexedSource, Source, digest_of, printable
from hpstore.loaders.ingestion.source_paths import file_facts, local_files
from hpstore.loaders.ingestion.source_rows import SourceItem
from hpstore.units import div_ceil, whole_argument

TOKENS = (".bin", ".idx")
RECORD_TOKENS = 1024
_MAGIC = b"MMIDIDX\0\0"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
# of the bins with a header that llm.c and modded-nanogpt write: 256 int32, then uint16
_LLMC_MAGIC, _LLMC_VERSION, _LLMC_BYTES = 20240520, 1, 1024


def token_files(
    where: str | os.PathLike[str], *, dtype: str = "uint16", record_tokens: int = RECORD_TOKENS
) -> Source:
    """The token files of a path, folder or pattern: Megatron's where an .idx lies beside each .bin.

    `dtype`, `record_tokens`: of flat files. Raises ConfigError, MalformedFile.
    """
    files = [file.with_suffix(".bin") for file in local_files(where, TOKENS)]
    files = list(dict.fromkeys(files))
    for file in files:
        if not file.is_file():
            raise ConfigError(f"{file} does not exist, which {file.with_suffix('.idx').name} needs")
    indexed = [file for file in files if file.with_suffix(".idx").is_file()]
    if indexed and len(indexed) < len(files):
        flat = next(file for file in files if file not in indexed)
        raise ConfigError(f"{flat} has no .idx, {indexed[0].name} has one: name those of one kind")
    if indexed:
        return MegatronTokens(str(where), files)
    return FlatTokens(str(where), files, dtype=dtype, record_tokens=record_tokens)


@dataclass(frozen=True, slots=True)
class MegatronIndex:
    """What an .idx says: of each sequence the length, the first byte in the .bin, the document."""

    dtype: np.dtype[Any]
    lengths: Array  # tokens, int32
    starts: Array  # bytes, int64
    documents: Array  # number of the document, int64

    @classmethod
    def decode(cls, data: Array, bin_bytes: int, where: str) -> MegatronIndex:
        """Of the bytes of a file (uint8). Raises MalformedFile where they do not fit the .bin."""
        if len(data) < _HEADER.size:
            raise MalformedFile(f"{where} is cut short: it has {len(data)} bytes")
        magic, version, code, sequences, ends = _HEADER.unpack(data[: _HEADER.size].tobytes())
        if magic != _MAGIC or version != 1 or code not in _DTYPES:
            raise MalformedFile(
                f"{where} is no index of Megatron: version {version}, type {code}, {magic!r}"
            )
        plain = _HEADER.size + 12 * sequences + 8 * ends
        if len(data) not in (plain, plain + sequences):  # with a mode for each sequence
            raise MalformedFile(
                f"{where} has {len(data)} bytes, {sequences} sequences and {ends} ends of "
                f"documents take {plain}"
            )
        body = data[_HEADER.size :]
        lengths = body[: 4 * sequences].view("<i4")
        starts = body[4 * sequences : 12 * sequences].view("<i8")
        bounds = body[12 * sequences : 12 * sequences + 8 * ends].view("<i8")
        dtype = np.dtype(_DTYPES[code])
        if sequences:
            nbytes = lengths.astype(np.int64) * dtype.itemsize
            if lengths.min() < 0 or starts.min() < 0 or (starts > bin_bytes - nbytes).any():
                raise MalformedFile(f"{where} names tokens that are not in the .bin")
        if ends == 0:
            bounds = np.arange(sequences + 1)
        if bounds[0] != 0 or bounds[-1] != sequences or (np.diff(bounds) < 0).any():
            raise MalformedFile(f"{where}: its documents are not all the {sequences} sequences")
        documents = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
        return cls(dtype, lengths, starts, documents)


class MegatronTokens(IndexedSource):
    """Sequences of Megatron's files: `tokens`; and `document`, its number, where documents have
    several sequences."""

    kind = "tokens"
    by_files = True

    def __init__(self, where: str, files: list[Path]) -> None:
        self.where, self._files = printable(where), files
        self._indices = [self._opened(file) for file in files]
        dtypes = {index.dtype for index in self._indices}
        if len(dtypes) > 1:
            raise ConfigError(
                f"{self.where}: tokens are of several types, {sorted(map(str, dtypes))}"
            )
        self._tokens = [_mapped(file) for file in files]
        counts = [len(index.lengths) for index in self._indices]
        self._firsts = np.cumsum([0, *counts])
        found = [
            int(index.documents[-1]) + 1 if len(index.documents) else 0 for index in self._indices
        ]
        self._documents = np.cumsum([0, *found])
        self._numbered = any(
            len(index.documents) > len(np.unique(index.documents)) for index in self._indices
        )
        self.length = int(self._firsts[-1])
        self.total_bytes = sum(map(len, self._tokens))

    def _opened(self, file: Path) -> MegatronIndex:
        index = file.with_suffix(".idx")
        return MegatronIndex.decode(_mapped(index), file.stat().st_size, printable(str(index)))

    @property
    def fields(self) -> dict[str, Field]:
        number = {"document": Field("int64")} if self._numbered else {}
        return {"tokens": Field(self._indices[0].dtype.name, (None,)), **number}

    def fingerprint(self) -> str:
        """Over the path, size and time of change of every .idx and .bin."""
        files = [part for file in self._files for part in (file.with_suffix(".idx"), file)]
        return digest_of([self.kind, *file_facts(files)])

    def _place(self, index: int) -> tuple[int, int]:
        """File and number in the file."""
        file = int(np.searchsorted(self._firsts, index, side="right")) - 1
        return file, index - int(self._firsts[file])

    def name_of(self, index: int) -> str:
        file, number = self._place(index)
        return f"{printable(self._files[file].name)}: sequence {number}"

    def bytes_of(self, index: int) -> int:
        file, number = self._place(index)
        found = self._indices[file]
        return int(found.lengths[number]) * found.dtype.itemsize

    def load(self, index: int) -> SourceItem:
        file, number = self._place(index)
        found = self._indices[file]
        first = int(found.starts[number])
        raw = self._tokens[file][first : first + self.bytes_of(index)]
        sample: dict[str, object] = {"tokens": np.frombuffer(raw.tobytes(), found.dtype)}
        if self._numbered:
            sample["document"] = int(self._documents[file] + found.documents[number])
        return SourceItem(name=self.name_of(index), origin=index, sample=sample)


class FlatTokens(IndexedSource):
    """Files that are one array of tokens, in records of `record_tokens`; the last one is shorter.

    Where documents begin such a file does not say: packing the records in their order gives the
    array again.
    """

    kind = "tokens"
    by_files = True

    def __init__(self, where: str, files: list[Path], *, dtype: str, record_tokens: int) -> None:
        self.where, self._files = printable(where), files
        self._each = whole_argument("record_tokens", record_tokens, least=1)
        if dtype not in ("uint16", "int32", "uint32", "int64"):
            raise ConfigError(f"tokens are uint16, int32, uint32 or int64, not {dtype!r}")
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._tokens = [self._opened(file) for file in files]
        self._firsts = np.cumsum([0, *(div_ceil(len(part), self._each) for part in self._tokens)])
        self.length = int(self._firsts[-1])
        self.total_bytes = sum(part.nbytes for part in self._tokens)

    def _opened(self, file: Path) -> Array:
        raw = _mapped(file)
        head = raw[:12].tobytes()
        if len(raw) >= _LLMC_BYTES:
            magic, version, count = struct.unpack("<3i", head)
            if (magic, version) == (_LLMC_MAGIC, _LLMC_VERSION):
                if len(raw) != _LLMC_BYTES + 2 * count:
                    raise MalformedFile(
                        f"{file} has {len(raw)} bytes, {count} tokens behind its header take "
                        f"{_LLMC_BYTES + 2 * count}"
                    )
                return raw[_LLMC_BYTES:].view("<u2").astype(self._dtype, copy=False)
        if len(raw) % self._dtype.itemsize:
            raise MalformedFile(
                f"{file} has {len(raw)} bytes, which are no {self._dtype.name} tokens: cut short, "
                "or of another type (source_options={'dtype': ...}, --option dtype=...)"
            )
        return raw.view(self._dtype)

    @property
    def fields(self) -> dict[str, Field]:
        return {"tokens": Field(self._dtype.name, (None,))}

    def fingerprint(self) -> str:
        """Over type and length of records, and the path, size and time of change of every file."""
        return digest_of([self.kind, self._dtype.name, self._each, *file_facts(self._files)])

    def _place(self, index: int) -> tuple[int, int]:
        """File and first token."""
        file = int(np.searchsorted(self._firsts, index, side="right")) - 1
        return file, (index - int(self._firsts[file])) * self._each

    def name_of(self, index: int) -> str:
        file, first = self._place(index)
        return f"{printable(self._files[file].name)}: token {first}"

    def bytes_of(self, index: int) -> int:
        return self._each * self._dtype.itemsize

    def load(self, index: int) -> SourceItem:
        file, first = self._place(index)
        tokens = np.array(self._tokens[file][first : first + self._each])
        return SourceItem(name=self.name_of(index), origin=index, sample={"tokens": tokens})


def _mapped(file: Path) -> Array:
    """The bytes of a file, mapped; uint8 (n,)."""
    if not file.stat().st_size:
        return np.empty(0, np.uint8)
    try:
        return np.memmap(file, np.uint8, "r")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
