"""MDS, the shards of mosaicml-streaming (needs that package, the extra `mds`).

Its own reader finds a sample and decodes numbers, arrays and JSON; encoded images stay as they are,
and nothing is unpickled.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hpstore.errors import ConfigError
from hpstore.format.untrusted_bytes import MALFORMED, brief
from hpstore.loaders.dataset.fields import Field
from hpstore.loaders.ingestion.optional_packages import needed
from hpstore.loaders.ingestion.sample_source import IndexedSource, digest_of, printable
from hpstore.loaders.ingestion.shard_index import (
    INDEX,
    believing,
    index_folder,
    named_file,
    read_index,
    whole_of,
)
from hpstore.loaders.ingestion.source_paths import file_facts
from hpstore.loaders.ingestion.source_rows import SourceItem

_ENCODED = ("bytes", "jpeg", "png", "tiff")
_FIELDS = {
    **dict.fromkeys(_ENCODED, "bytes"),
    "str": "str",
    "json": "json",
    "int": "int64",
    **{f"{kind}{bits}": f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"float{bits}" for bits in (16, 32, 64)},
}
_UNSAFE = ("pkl",)
_COUNT_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _Column:
    name: str
    encoding: str
    nbytes: int  # of every value; 0: each has its own size

    @property
    def is_unsafe(self) -> bool:
        return self.encoding.partition(":")[0] in _UNSAFE


class MdsShards(IndexedSource):
    """Samples of MDS shards by number, in the order of the index.

    `where`: the folder with index.json. Columns of numbers, text, JSON, bytes and encoded images
    have fields by the index; where there are others, fields are inferred. Columns of pickles are
    refused unless they are left out. Shards that are there compressed alone are refused.
    """

    kind = "mds"
    by_files = True
    threads = 4

    def __init__(self, where: str | os.PathLike[str]) -> None:
        reader, self._decode = _package()
        folder = index_folder(where)
        self.where, self._index = printable(str(where)), folder / INDEX
        found = read_index(folder)
        self._readers: list[Any] = []  # Any: the package's
        self._files: list[Path] = []
        counts: list[int] = []
        with believing(f"{self.where} is no MDS"):
            if found.get("version") != 2:
                raise ValueError(f"version {str(found.get('version'))[:20]!r}, not 2")
            shards = found["shards"]
            self._columns = _columns(shards[0])
            for shard in shards:
                if _columns(shard) != self._columns:
                    raise ValueError("its shards have not the same columns")
                self._files.append(_shard_file(folder, shard))
                counts.append(_checked_count(self._files[-1], whole_of(shard, "samples")))
                self._readers.append(reader.from_json(str(folder), "", shard))
        self._ends = np.cumsum(counts)
        self.length = int(self._ends[-1])
        self.total_bytes = sum(file.stat().st_size for file in self._files)
        self._names = [column.name for column in self._columns]
        self._types: Mapping[str, Field] = {}

    def restrict(self, names: Sequence[str], types: Mapping[str, Field]) -> None:
        self._names = [column.name for column in self._columns if column.name in names]
        self._types = types

    @property
    def fields(self) -> dict[str, Field] | None:
        wanted = [column for column in self._columns if column.name in self._names]
        for column in wanted:  # before any sample is read to tell the fields of others
            if column.is_unsafe:
                others = [one.name for one in self._columns if not one.is_unsafe]
                raise ConfigError(
                    f"{self.where}: column {column.name!r} holds pickles, and loading them may run "
                    f"any code: leave it out with fields={others}. Nothing was written"
                )
        found: dict[str, Field] = {}
        for column in wanted:
            made = _field(column.encoding)
            if made is None and column.name not in self._types:
                return None
            found[column.name] = self._types.get(column.name) or made or Field("bytes")
        return found

    def fingerprint(self) -> str:
        """Over the path, size and time of change of the index and of every shard."""
        return digest_of([self.kind, *file_facts([self._index, *self._files])])

    def _place(self, index: int) -> tuple[int, int]:
        shard = int(np.searchsorted(self._ends, index, "right"))
        return shard, index - (int(self._ends[shard - 1]) if shard else 0)

    def name_of(self, index: int) -> str:
        shard, number = self._place(index)
        return printable(f"{self._files[shard].name} sample {number}")

    def bytes_of(self, index: int) -> int:
        return int(self.total_bytes or 0) // self.length

    def load(self, index: int) -> SourceItem:
        name = self.name_of(index)
        shard, number = self._place(index)
        try:
            sample = self._sample(self._readers[shard].get_sample_data(number))
        except (OSError, *MALFORMED) as error:
            return SourceItem(name=name, origin=index, problem=brief(error))
        return SourceItem(name=name, origin=index, sample=sample)

    def _sample(self, data: bytes) -> dict[str, object]:
        """The values of a sample. Raises one of MALFORMED."""
        own = [column for column in self._columns if not column.nbytes]
        at = _COUNT_BYTES * len(own)
        sizes = iter(np.frombuffer(data, "<u4", len(own)).tolist())
        sample: dict[str, object] = {}
        for column in self._columns:
            nbytes = column.nbytes or next(sizes)
            if column.name in self._names:
                if column.is_unsafe:
                    raise ValueError(f"column {column.name!r} holds a pickle, which is not loaded")
                raw = data[at : at + nbytes]
                plain = column.encoding in _ENCODED
                sample[column.name] = raw if plain else self._decode(column.encoding, raw)
            at += nbytes
        if at != len(data):
            raise ValueError(f"its columns say {at} bytes, {len(data)} are there")
        return sample


def _package() -> tuple[Any, Callable[[str, bytes], object]]:  # Any: the package's reader
    """The reader of shards, and what decodes a value. Raises ConfigError."""
    with needed("MDS needs mosaicml-streaming", extra="mds"):
        from streaming.base.format.mds.encodings import mds_decode
        from streaming.base.format.mds.reader import MDSReader
    return MDSReader, mds_decode


def _field(encoding: str) -> Field | None:
    """The field of a column; None where that depends on its values."""
    if encoding in _FIELDS:
        return Field(_FIELDS[encoding])
    kind, *rest = encoding.split(":")
    shape = rest[1].split(",") if kind == "ndarray" and len(rest) == 2 else []
    if shape and all(map(str.isdecimal, shape)):
        return Field(rest[0], tuple(map(int, shape)))
    return None


def _columns(shard: Mapping[str, Any]) -> list[_Column]:
    """The columns that an index says a shard has. Raises one of MALFORMED."""
    if shard["format"] != "mds":
        raise ValueError(f"a shard is {str(shard['format'])[:20]!r}, not mds")
    lists = (shard["column_names"], shard["column_encodings"], shard["column_sizes"])
    found = [
        _Column(name=str(name), encoding=str(encoding), nbytes=_size_of(size))
        for name, encoding, size in zip(*lists, strict=True)
    ]
    if not found or len({column.name for column in found}) < len(found):
        raise ValueError("it has no columns, or two of one name")
    return found


def _size_of(size: object) -> int:
    return 0 if size is None else whole_of({"column_sizes": size}, "column_sizes", most=1 << 31)


def _shard_file(folder: Path, shard: Mapping[str, Any]) -> Path:
    """Raises ConfigError for a shard that is there compressed alone, else one of MALFORMED."""
    raw = shard["raw_data"]
    packed = shard.get("zip_data")
    if packed and not (folder / str(raw["basename"])).exists():
        raise ConfigError(
            f"{folder}: the shards are compressed ({str(shard.get('compression'))[:20]}): read "
            "them once by StreamingDataset(local=..., keep_zip=True), which unpacks them, or give "
            "that data set in their place. Nothing was written"
        )
    return named_file(folder, raw["basename"], raw["bytes"])


def _checked_count(file: Path, samples: int) -> int:
    """How many samples a shard has, whose places are in order and inside of it. ValueError."""
    size = file.stat().st_size
    if _COUNT_BYTES * (samples + 2) > size:
        raise ValueError(f"{file.name} has no room for {samples} samples")
    places = np.fromfile(file, "<u4", samples + 2).astype(np.int64)
    if places[0] != samples or (np.diff(places[1:]) < 0).any() or places[-1] > size:
        raise ValueError(f"{file.name}: places of samples are damaged")
    return samples
