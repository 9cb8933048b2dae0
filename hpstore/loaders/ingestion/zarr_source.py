"""zarr arrays whose first axis is the sample, from any path, URL or store."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zarr
from zarr.errors import BaseZarrError

from hpstore.errors import ConfigError
from hpstore.format.untrusted_bytes import MALFORMED
from hpstore.loaders.dataset.fields import BFLOAT16, DTYPES, Array, Field
from hpstore.loaders.dataset.zarr_attributes import is_bfloat16, masks_of
from hpstore.loaders.ingestion.compressed_files import STREAM_ERRORS
from hpstore.loaders.ingestion.sample_source import BLOCK_SHIFT, BlockwiseSource, digest_of
from hpstore.loaders.ingestion.source_rows import SourceItem
from hpstore.units import MIB, div_ceil

BLOCK_BYTES = 64 * MIB
_ERRORS = (BaseZarrError, RuntimeError, *STREAM_ERRORS, *MALFORMED)  # of what cannot be read


class ZarrArrays(BlockwiseSource):
    """An array (field `data`, or its name), or the arrays directly in a group, equally long.

    A block is as many rows as the largest chunk (or shard) has, fewer where that passes 64 MiB. Of
    a dataset that is seen through zarr, bfloat16 and None are what they were.
    """

    kind = "zarr"

    def __init__(self, where: str | os.PathLike[str] | zarr.Array[Any] | zarr.Group | Any) -> None:
        self.where = str(getattr(where, "store_path", where))
        self._path = Path(where) if isinstance(where, str | os.PathLike) else None
        self.by_files = self._path is not None and self._path.is_dir()
        self._arrays = _arrays(where, self.where)
        masks = masks_of(self._arrays)
        self._masks = {name: self._arrays[mask] for name, mask in masks.items()}
        lengths = {name: array.shape[0] for name, array in self._arrays.items()}
        if len(set(lengths.values())) != 1:
            said = ", ".join(f"{name} {count}" for name, count in lengths.items())
            raise ConfigError(
                f"{self.where}: the arrays are not equally long: {said or 'there is none'}"
            )
        self.length = next(iter(lengths.values()))
        self.restrict([name for name in self._arrays if name not in masks.values()], {})

    def restrict(self, names: Sequence[str], types: Mapping[str, Field]) -> None:
        del types  # the source has its own
        self._arrays = {name: a for name, a in self._arrays.items() if name in names}
        self._masks = {name: a for name, a in self._masks.items() if name in names}
        total = sum(a.nbytes for a in self._arrays.values())
        chunk = max((a.shards or a.chunks)[0] for a in self._arrays.values()) if self._arrays else 1
        row = max(1, total // max(1, self.length or 1))
        self._rows = max(1, min(chunk, BLOCK_BYTES // row))
        self.total_bytes = total
        self.blocks = div_ceil(self.length or 0, self._rows)

    @property
    def fields(self) -> dict[str, Field]:
        return {
            name: Field(
                BFLOAT16 if is_bfloat16(a) else a.dtype.name,
                a.shape[1:],
                optional=name in self._masks,
            )
            for name, a in self._arrays.items()
        }

    def fingerprint(self) -> str:
        """Over metadata, first and last rows; of a local folder also sizes and times of files."""
        rows: list[object] = [self.kind]
        for name, a in sorted(self._arrays.items()):
            ends = hashlib.blake2b(digest_size=16)
            for end in (slice(1), slice(-1, None)) if a.shape[0] else ():
                try:
                    ends.update(np.asarray(a[end]).tobytes())
                except _ERRORS as error:  # a bad record, once it is read
                    ends.update(type(error).__name__.encode())
            rows.append([name, a.shape, str(a.dtype), a.chunks, ends.hexdigest()])
        if self._path is not None and self.by_files:
            rows += sorted(
                (str(file.relative_to(self._path)), (s := file.stat()).st_size, s.st_mtime_ns)
                for file in self._path.rglob("*")
                if file.is_file()
            )
        return digest_of(rows)

    def read_block(self, block: int, start: int) -> Iterator[SourceItem]:
        first = block * self._rows
        stop = min(first + self._rows, self.length or 0)
        try:
            parts = {name: _values(a, first, stop) for name, a in self._arrays.items()}
            masks = {name: np.asarray(a[first:stop]) for name, a in self._masks.items()}
        except _ERRORS as error:
            problem = f"it cannot be read: {error or type(error).__name__}"
            item = SourceItem(
                name=f"{self.where}[{first}:{stop}]", origin=block << BLOCK_SHIFT, problem=problem
            )
            yield from [item][start:]
            return
        for row in range(start, stop - first):
            yield SourceItem(
                name=f"{self.where}[{first + row}]",
                origin=block << BLOCK_SHIFT | row,
                sample={
                    name: part[row] if name not in masks or masks[name][row] else None
                    for name, part in parts.items()
                },
            )


def _values(array: zarr.Array[Any], first: int, stop: int) -> Array | torch.Tensor:
    """Rows of an array, as samples have them."""
    found = np.asarray(array[first:stop])
    if not is_bfloat16(array):
        return found
    return torch.from_numpy(np.array(found, np.uint16)).view(torch.bfloat16)


def _arrays(where: Any, said: str) -> dict[str, zarr.Array[Any]]:
    """Arrays by field name. Raises ConfigError."""
    opened = where
    if not isinstance(where, zarr.Array | zarr.Group):
        try:
            opened = zarr.open(
                os.fspath(where) if isinstance(where, os.PathLike) else where, mode="r"
            )
        except (BaseZarrError, OSError, ValueError, KeyError) as error:
            raise ConfigError(f"{said} is no zarr array or group: {error}") from error
    if isinstance(opened, zarr.Array):
        found = {opened.basename or "data": opened}
    else:
        found = dict(opened.arrays())
    for name, array in found.items():
        if array.ndim < 1:
            raise ConfigError(f"{said}: array {name!r} has no first axis to take samples from")
        if array.dtype.name not in DTYPES:
            raise ConfigError(
                f"{said}: array {name!r} has dtype {array.dtype}, which no field can hold"
            )
    return found
