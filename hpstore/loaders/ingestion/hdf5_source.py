"""HDF5 files: the datasets of a group, their first axis the sample (needs h5py, extra `hdf5`).

Nothing is read that lies in other files: links, external storage and virtual datasets are refused.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hpstore.errors import ConfigError, MalformedFile
from hpstore.format.untrusted_bytes import MALFORMED, brief, most_inflated
from hpstore.loaders.dataset.fields import DTYPES, Field
from hpstore.loaders.ingestion.optional_packages import needed
from hpstore.loaders.ingestion.sample_source import (
    BLOCK_SHIFT,
    BlockwiseSource,
    digest_of,
    printable,
)
from hpstore.loaders.ingestion.source_paths import file_facts, local_files
from hpstore.loaders.ingestion.source_rows import SourceItem
from hpstore.units import MIB, div_ceil, format_bytes

HDF5 = (".h5", ".hdf5", ".he5", ".hdf")
BLOCK_BYTES = 64 * MIB
_ERRORS = (OSError, *MALFORMED)


class Hdf5Arrays(BlockwiseSource):
    """Datasets of equal length directly in a group of one file; a field each. A block is as many
    rows as the largest chunk has, fewer where that passes 64 MiB.

    Numbers and booleans are arrays, texts of any length str, rows of any length ragged arrays.
    """

    kind = "hdf5"
    by_files = True

    def __init__(self, where: str | os.PathLike[str], *, group: str = "/") -> None:
        self._h5py = _h5py()
        files = local_files(where, HDF5)
        if len(files) > 1:
            raise ConfigError(f"{where} holds {len(files)} HDF5 files: name one of them")
        self._file, self._group = files[0], group
        self.where = printable(str(self._file))
        try:
            with self._h5py.File(self._file, "r") as opened:
                self._outline(opened)
        except _ERRORS as error:
            if isinstance(error, ConfigError):
                raise
            raise MalformedFile(f"{self.where} cannot be read: {brief(error)}") from error
        self.restrict(list(self._fields), {})

    def _outline(self, opened: Any) -> None:
        """Fields, length and rows of a block. Any: h5py is untyped. Raises ConfigError."""
        if self._group not in opened or not isinstance(opened[self._group], self._h5py.Group):
            raise ConfigError(f"{self.where} has no group {self._group!r}")
        group = opened[self._group]
        self._fields: dict[str, Field] = {}
        lengths: dict[str, int] = {}
        self._shapes: dict[str, tuple[int, int]] = {}  # rows of a chunk, bytes of a row
        for name in group:
            if not isinstance(group.get(name, getlink=True), self._h5py.HardLink):
                raise ConfigError(f"{self.where}: {name!r} is a link to somewhere else; not read")
            found = group[name]
            if not isinstance(found, self._h5py.Dataset):
                continue
            self._fields[name] = self._field(name, found)
            lengths[name] = found.shape[0]
            chunk = found.chunks[0] if found.chunks else found.shape[0]
            nbytes = found.nbytes
            if found.dtype.kind == "O":  # those are places of values of any length
                nbytes = max(nbytes, self._file.stat().st_size)
            self._shapes[name] = (chunk, nbytes // max(1, found.shape[0]))
        if len(set(lengths.values())) != 1:
            said = ", ".join(f"{name} {count}" for name, count in lengths.items())
            groups = ", ".join(name for name in group if name not in lengths)
            raise ConfigError(
                f"{self.where}: the datasets of group {self._group!r} are not equally long: "
                f"{said or 'there is none'}; groups in it: {groups or 'none'} "
                "(source_options={'group': ...}, --option group=...)"
            )
        self.length = next(iter(lengths.values()))

    def _field(self, name: str, found: Any) -> Field:
        """Of a dataset. Raises ConfigError."""
        said = f"{self.where}: dataset {name!r}"
        if found.is_virtual or found.external:
            raise ConfigError(f"{said} lies in other files, which are not read")
        if found.shape is None or not found.shape:
            raise ConfigError(f"{said} has no first axis to take samples from")
        most = most_inflated(self._file.stat().st_size)
        if found.nbytes > most:
            raise MalformedFile(f"{said} has {format_bytes(found.nbytes)}, far more than its file")
        text = self._h5py.check_string_dtype(found.dtype)
        ragged = self._h5py.check_vlen_dtype(found.dtype)
        if text is not None and found.ndim == 1:
            return Field("str")
        if ragged is not None and found.ndim == 1 and ragged.name in DTYPES:
            return Field(ragged.name, (None,))
        if found.dtype.name not in DTYPES or 0 in found.shape[1:]:
            raise ConfigError(
                f"{said} is {found.dtype} of shape {found.shape}, which no field can hold"
            )
        return Field(found.dtype.name, found.shape[1:])

    def restrict(self, names: Sequence[str], types: Mapping[str, Field]) -> None:
        del types  # the source has its own
        self._names = [name for name in self._fields if name in names]
        chunks = [self._shapes[name] for name in self._names]
        row = max(1, sum(nbytes for _, nbytes in chunks))
        self._rows = max(1, min(max((c for c, _ in chunks), default=1), BLOCK_BYTES // row))
        self.blocks = div_ceil(self.length or 0, self._rows)

    @property
    def fields(self) -> dict[str, Field]:
        return {name: self._fields[name] for name in self._names}

    def fingerprint(self) -> str:
        """Over the group, and the path, size and time of change of the file."""
        return digest_of([self.kind, self._group, *file_facts([self._file])])

    def read_block(self, block: int, start: int) -> Iterator[SourceItem]:
        first = block * self._rows
        stop = min(first + self._rows, self.length or 0)
        origin = block << BLOCK_SHIFT
        try:
            with self._h5py.File(self._file, "r") as opened:
                group = opened[self._group]
                parts = {name: group[name][first:stop] for name in self._names}
        except _ERRORS as error:
            problem = f"it cannot be read: {brief(error)}"
            name = f"{self._file.name}[{first}:{stop}]"
            yield from [SourceItem(name=name, origin=origin, problem=problem)][start:]
            return
        for row in range(start, stop - first):
            sample, problem = self._sample(parts, row)
            yield SourceItem(
                name=f"{self._file.name}[{first + row}]",
                origin=origin | row,
                sample=sample,
                problem=problem,
            )

    def _sample(self, parts: Mapping[str, Any], row: int) -> tuple[dict[str, object] | None, str]:
        """The sample of a row, or what is wrong with it."""
        sample: dict[str, object] = {}
        for name in self._names:
            value = parts[name][row]
            if self._fields[name].dtype == "str":
                try:
                    sample[name] = bytes(value).decode()
                except UnicodeDecodeError as error:
                    return None, f"{name!r} is no UTF-8: {error.reason}"
            else:
                sample[name] = np.asarray(value)
        return sample, ""


def _h5py() -> Any:
    with needed("HDF5 files need h5py", extra="hdf5"):
        import h5py
    return h5py
