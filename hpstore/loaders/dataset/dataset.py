"""A dataset in a pool as a torch map-style dataset."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.utils.data

from hpstore.codec.galois import Bytes
from hpstore.errors import ConfigError, IntegrityError
from hpstore.loaders.dataset.assemble_fields import field_bytes
from hpstore.loaders.dataset.class_names import class_names
from hpstore.loaders.dataset.dataset_manifest import DatasetManifest
from hpstore.loaders.dataset.dataset_versions import read_manifest, version_with
from hpstore.loaders.dataset.fields import Array, FieldKind, Value, mask_name
from hpstore.loaders.dataset.image_decode import Decode, checked_decode
from hpstore.loaders.dataset.record_layout import Int64s
from hpstore.loaders.dataset.record_reader import StoredData
from hpstore.loaders.dataset.stored_manifests import require_pool
from hpstore.loaders.dataset.value_decoder import ValueDecoder
from hpstore.pool.pool import Pool
from hpstore.runtime.forks import call_in_children

Sample = dict[str, Value]


def sample_numbers(indices: object, count: int) -> Int64s:
    """Indices of samples as they are given, negative ones counted from the end, in their shape.

    numpy makes floats and unsigned numbers of large ones, ints of floats and bools. Raises
    ConfigError unless all are whole numbers, IndexError for what no int64 holds.
    """
    given = np.asarray(indices)
    kind = given.dtype.kind if given.size else "i"
    if kind == "u" and isinstance(indices, np.ndarray) and given.max() <= np.iinfo(np.int64).max:
        given, kind = given.astype(np.int64), "i"
    try:
        if kind in "uOf":
            each = np.asarray(indices, object).reshape(-1).tolist()
            given = np.array([operator.index(one) for one in each], np.int64).reshape(given.shape)
        elif kind != "i":
            raise ConfigError(f"indices of samples are whole numbers, not {given.dtype}")
    except OverflowError as error:
        raise IndexError(f"a sample of {repr(indices)[:60]}, of {count}") from error
    except TypeError as error:
        raise ConfigError(f"indices of samples are whole numbers: {error}") from error
    rows = given.astype(np.int64, copy=False)
    if not rows.size or rows.min() >= 0:
        return rows
    return np.where((rows < 0) & (rows >= -count), rows + count, rows)


class Dataset(StoredData, torch.utils.data.Dataset[Sample]):
    """A published dataset. Thread-safe; survives fork and spawn (it pickles as pool and name).

    Parameters
    ----------
    pool
        An open pool. It stays the caller's, and open while the dataset is read.
    name
        Name of the dataset.
    fields
        Names of the fields to read, all unless given. Each sample is a dict of them in that order.
    version
        Name of the version, such as "v1" (list_versions). Default: the newest. What is opened stays
        as it is, whatever the dataset is changed to, until its version is deleted.
    decode
        Which images are decoded: see DataLoader. None: none, they are bytes.

    Raises
    ------
    ObjectNotFound
        There is no published dataset of this name, or it has no such version.
    ConfigError
        `name` is something else than a dataset, or it has no such field.
    InvalidKey
        No dataset can have this name.
    IntegrityError, FormatTooNew
        The manifest is damaged, or was written by a newer hpstore.
    TooManyErasures
        The manifest cannot be read now.
    """

    def __init__(
        self,
        pool: Pool,
        name: str,
        *,
        fields: Sequence[str] | None = None,
        version: str | None = None,
        decode: Decode = None,
    ) -> None:
        pool = require_pool(pool, "a Dataset")
        self._open(pool, name, read_manifest(pool, name, version), fields, decode)

    def _open(
        self,
        pool: Pool,
        name: str,
        manifest: DatasetManifest,
        fields: Sequence[str] | None,
        decode: Decode,
    ) -> None:
        super().__init__(pool, name, manifest, fields)
        self.decode = decode
        self._decoder = ValueDecoder(self.fields, checked_decode(decode, self.fields))
        self._wanted = None if fields is None else tuple(fields)
        call_in_children(self.renew_after_fork)

    @property
    def version(self) -> str:
        """Name of the version that was opened."""
        return self.manifest.version_name

    @property
    def fingerprint(self) -> str:
        """Equal for the same samples in the same order with the same fields and layout."""
        return self.manifest.fingerprint

    @property
    def metadata(self) -> Mapping[str, Any]:
        """What the writer recorded."""
        return self.manifest.metadata

    @property
    def classes(self) -> Mapping[str, Sequence[str]]:
        """Names of classes by field, in the order of their numbers: what the source said."""
        return class_names(self.metadata, list(self.fields))

    def __getitem__(self, index: int) -> Sample:
        """One sample: tensors (scalars 0-d or of their shape), bytes, str, what JSON holds, None.
        Raises IndexError, ConfigError for what is no whole number.
        """
        try:
            number = operator.index(index)
        except TypeError as error:
            raise ConfigError(
                f"the index of a sample is a whole number, not {repr(index)[:60]}; several "
                "samples: __getitems__([0, 1]), or torch.utils.data.Subset"
            ) from error
        return self.__getitems__([number])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        """Samples in the order of `indices`; tensors are views of one buffer of this call.

        A negative index counts from the end. Raises IndexError, IntegrityError naming the sample,
        ConfigError if an index is not an integer.
        """
        rows = sample_numbers(indices, len(self)).reshape(-1)
        self._check_range(rows)
        columns: dict[str, Sequence[Value]] = {}
        masks = {n: self.scalars(mask_name(n), rows) for n, f in self.fields.items() if f.optional}
        for name, made in self.fields.items():
            if made.kind is FieldKind.SCALAR:
                columns[name] = made.as_tensor(self.scalars(name, rows)).unbind(0)
        for stream in self.streams:
            records, ragged = self.read_direct(stream, rows), self.locate(stream, rows).ragged
            for name, raw in field_bytes(stream.record, records, ragged).items():
                if name in self.fields:
                    columns[name] = self._values(name, rows, raw, masks.get(name))
        for name, mask in masks.items():
            there = zip(columns[name], mask.tolist(), strict=True)
            columns[name] = [value if has else None for value, has in there]
        return [{name: columns[name][row] for name in self.fields} for row in range(len(rows))]

    def _values(
        self, name: str, rows: Int64s, raw: Sequence[Bytes], mask: Array | None
    ) -> list[Value]:
        """Values of large fields; those that are None are not looked at."""
        if self.fields[name].is_plain and name not in self._decoder.images:
            return [self.fields[name].as_value(value) for value in raw]
        found: list[Value] = [None] * len(raw)
        for row in range(len(raw)) if mask is None else np.flatnonzero(mask).tolist():
            try:
                found[row] = self._decoder.value(name, raw[row])
            except IntegrityError as error:
                where = f"sample {int(rows[row])} of data set {self.name!r}"
                raise IntegrityError(f"{where}: {error}") from error
        return found

    def __reduce__(self) -> tuple[object, ...]:
        wanted = (self.pool, self.name, self._wanted, self.fingerprint, self.decode)
        return (reopen_dataset, wanted)

    def __repr__(self) -> str:
        return f"<hpstore data set {self.name!r}, {len(self)} samples, fields {list(self.fields)}>"


def reopen_dataset(
    pool: Pool, name: str, fields: tuple[str, ...] | None, fingerprint: str, decode: Decode = None
) -> Dataset:
    """The version with a fingerprint, which need not be the newest any more. ConfigError."""
    manifest = version_with(pool, name, fingerprint)
    if manifest is None:
        raise ConfigError(
            f"data set {name!r} was replaced: no version of it has fingerprint {fingerprint}, that "
            "was opened. Open it again."
        )
    made = Dataset.__new__(Dataset)
    made._open(pool, name, manifest, fields, decode)
    return made
