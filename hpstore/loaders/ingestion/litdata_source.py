"""LitData, the chunks that litdata.optimize writes (needs litdata, the extra `litdata`).

They are read by litdata's own Cache. Encoded images, audio, video and files stay as they are, and
nothing is unpickled.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hpstore.errors import ConfigError
from hpstore.format.untrusted_bytes import brief
from hpstore.loaders.ingestion.optional_packages import needed
from hpstore.loaders.ingestion.python_source import as_sample
from hpstore.loaders.ingestion.sample_source import (
    BLOCK_SHIFT,
    BlockwiseSource,
    digest_of,
    printable,
)
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

_ENCODED = ("audio", "file", "image", "jpeg", "mesh", "nifti", "pdf", "tifffile", "video")
_VALUES = ("bool", "bytes", "float", "int", "json", "str", "text")
_ARRAYS = ("no_header_numpy", "no_header_tensor", "numpy", "tensor")
_TREES = ("builtins.dict", "builtins.list", "builtins.tuple", "collections.OrderedDict")
_DEEPEST = 100


class LitDataChunks(BlockwiseSource):
    """Samples of LitData chunks; a block is a chunk. `names`: of the fields of tuples.

    Fields are inferred from the first samples. What litdata would unpickle, compressed and
    encrypted chunks, and streams of tokens are refused, with what to do.
    """

    kind = "litdata"
    by_files = True

    def __init__(
        self, where: str | os.PathLike[str], *, names: Sequence[str] | None = None
    ) -> None:
        folder = index_folder(where)
        self.where, self._names_given = printable(str(where)), names
        found = read_index(folder)
        self._files: list[Path] = []
        self._counts: list[int] = []
        with believing(f"{self.where} is no LitData"):
            config = found["config"]
            self._refuse(config)
            for chunk in found["chunks"]:
                self._files.append(named_file(folder, chunk["filename"], chunk["chunk_bytes"]))
                self._counts.append(whole_of(chunk, "chunk_size", most=1 << 31))
            _check_tree(config["data_spec"])
        self._named = [folder / INDEX, *self._files]
        self._cache, self._index = _opened(folder)
        self.blocks, self.length = len(self._files), sum(self._counts)

    def _refuse(self, config: Mapping[str, Any]) -> None:
        """Raise ConfigError for what is not read, with what to do."""
        kinds = [str(kind).partition(":")[0] for kind in config["data_format"]]
        odd = [kind for kind in kinds if kind not in (*_ENCODED, *_VALUES, *_ARRAYS)]
        problem = (
            f"it holds values of kind {odd[0][:40]!r}, which litdata unpickles or decodes"
            if odd
            else f"its chunks are compressed by {str(config['compression'])[:20]}"
            if config.get("compression")
            else "its chunks are encrypted"
            if config.get("encryption")
            else f"it is read by a {str(config['item_loader'])[:40]}"
            if config.get("item_loader", "PyTreeLoader") != "PyTreeLoader"
            else ""
        )
        if problem:
            raise ConfigError(
                f"{self.where}: {problem}. Where you trust it, give litdata.StreamingDataset(...) "
                "in its place. Nothing was written"
            )

    def fingerprint(self) -> str:
        """Over the names given, and the path, size and time of change of all files."""
        return digest_of([self.kind, self._names_given or [], *file_facts(self._named)])

    def read_block(self, block: int, start: int) -> Iterator[SourceItem]:
        before = sum(self._counts[:block])
        for number in range(start, self._counts[block]):
            name = printable(f"{self._files[block].name} sample {number}")
            origin = block << BLOCK_SHIFT | number
            try:
                value = self._cache[self._index(index=before + number, chunk_index=block)]
                sample = {n: _owned(v) for n, v in as_sample(value, self._names_given).items()}
            except Exception as error:  # noqa: BLE001 (litdata raises bare ones)
                yield SourceItem(name=name, origin=origin, problem=brief(error))
                continue
            yield SourceItem(name=name, origin=origin, sample=sample)


def _opened(folder: Path) -> tuple[Any, Any]:  # Any: litdata's
    """litdata's Cache over a folder, and its way of naming a sample. Raises ConfigError."""
    with needed("LitData needs litdata", extra="litdata"):
        from litdata.streaming import Cache
        from litdata.streaming.sampler import ChunkedIndex
        from litdata.streaming.serializers import BytesSerializer
    encoded = {kind: BytesSerializer() for kind in _ENCODED}
    # it could write, too, and wants to know how: nothing is
    return Cache(str(folder), serializers=encoded, chunk_size=1), ChunkedIndex


def _owned(value: object) -> object:
    """A value that keeps no chunk mapped."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    return bytes(value) if isinstance(value, memoryview | bytearray) else value


def _check_tree(spec: object) -> None:
    """Raise ValueError unless samples are dicts, lists and tuples: of other types litdata imports
    what the index names."""
    if spec is None:
        return
    if not isinstance(spec, str):
        raise ValueError("data_spec is no text")
    _, tree = json.loads(spec)
    left = [(tree, 0)]
    while left:
        node, depth = left.pop()
        kind = node["type"]
        if kind not in (None, *_TREES) or depth > _DEEPEST:
            raise ValueError(f"samples hold a {str(kind)[:40]}")
        left += [(child, depth + 1) for child in node["children_spec"]]
