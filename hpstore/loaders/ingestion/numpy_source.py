"""Arrays whose first axis is the sample: .npy, .npz, memory maps, arrays in memory."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from hpstore.errors import ConfigError
from hpstore.format.numpy_files import mapped_npy, npz_arrays
from hpstore.loaders.dataset.fields import DTYPES, Array, Field, require_unmasked
from hpstore.loaders.ingestion.sample_source import IndexedSource, digest_of
from hpstore.loaders.ingestion.source_paths import file_facts
from hpstore.loaders.ingestion.source_rows import SourceItem

NUMPY = (".npy", ".npz")
_EDGE = 8  # samples at each end that a fingerprint of memory is made of


class Arrays(IndexedSource):
    """Arrays of equal length, one a field; sample i is row i of each.

    `files`: what they come from; their paths, sizes and times are the fingerprint. Without files it
    is the arrays' types and their first and last rows.
    """

    kind = "numpy"

    def __init__(
        self, arrays: Mapping[str, Array], *, where: str = "arrays", files: Sequence[Path] = ()
    ) -> None:
        self.where, self._files = where, files
        for name, whole in arrays.items():
            try:
                require_unmasked(whole)
            except ConfigError as error:
                raise ConfigError(f"{where}: {name!r} {error}") from None
        self.by_files = bool(files)
        self._arrays = {
            part: array
            for name, whole in arrays.items()
            for part, array in _columns(name, whole).items()
        }
        lengths = {name: _length(name, array, where) for name, array in self._arrays.items()}
        if len(set(lengths.values())) != 1:
            said = ", ".join(f"{name} {count}" for name, count in lengths.items())
            raise ConfigError(
                f"{where}: the arrays are not equally long: {said or 'there is none'}"
            )
        self.length = next(iter(lengths.values()))
        self.total_bytes = sum(array.nbytes for array in self._arrays.values())

    def restrict(self, names: Sequence[str], types: Mapping[str, Field]) -> None:
        del types  # the source has its own
        self._arrays = {name: a for name, a in self._arrays.items() if name in names}
        self.total_bytes = sum(array.nbytes for array in self._arrays.values())

    @property
    def fields(self) -> dict[str, Field]:
        return {name: Field(a.dtype.name, a.shape[1:]) for name, a in self._arrays.items()}

    def fingerprint(self) -> str:
        """Over the files' paths, sizes and times; of arrays in memory over types and end rows."""
        if self._files:
            return digest_of([self.kind, *file_facts(self._files)])
        rows: list[object] = [self.kind]
        for name, a in self._arrays.items():
            ends = hashlib.blake2b(a[:_EDGE].tobytes() + a[-_EDGE:].tobytes(), digest_size=16)
            rows.append([name, a.dtype.str, a.shape, ends.hexdigest()])
        return digest_of(rows)

    def name_of(self, index: int) -> str:
        return f"{self.where}[{index}]"

    def load(self, index: int) -> SourceItem:
        sample = {name: np.asarray(array[index]) for name, array in self._arrays.items()}
        return SourceItem(name=self.name_of(index), origin=index, sample=sample)


def numpy_files(where: str | os.PathLike[str]) -> Arrays:
    """A .npy file (field `data`), a .npz, or a folder of .npy files (a field each, by their names).

    .npy files are mapped, arrays of a .npz read into memory. Object arrays are refused: they are
    pickles. Raises ConfigError.
    """
    path = Path(where)
    if path.is_dir():
        files = sorted(path.glob("*.npy"))
        if not files:
            raise ConfigError(f"{path} holds no .npy file")
        return Arrays({f.stem: mapped_npy(f) for f in files}, where=path.name, files=files)
    if not path.is_file():
        raise ConfigError(f"{path} does not exist")
    if path.suffix.lower() == ".npz":
        return Arrays(npz_arrays(path), where=path.name, files=[path])
    return Arrays({"data": mapped_npy(path)}, where=path.name, files=[path])


def _columns(name: str, array: Array) -> dict[str, Array]:
    """An array, or the fields of a structured one."""
    if array.dtype.names is None:
        return {name: array}
    return {part: array[part] for part in array.dtype.names}


def _length(name: str, array: Array, where: str) -> int:
    if array.ndim < 1:
        raise ConfigError(f"{where}: array {name!r} has no first axis to take samples from")
    if array.dtype.name not in DTYPES:
        raise ConfigError(
            f"{where}: array {name!r} has dtype {array.dtype}, which no field can hold"
        )
    return len(array)
