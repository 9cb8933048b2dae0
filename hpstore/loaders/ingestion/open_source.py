"""From what the user names to a source."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset

from hpstore.errors import ConfigError
from hpstore.loaders.ingestion.arrow_source import ArrowTables
from hpstore.loaders.ingestion.csv_source import CsvFiles
from hpstore.loaders.ingestion.hdf5_source import Hdf5Arrays
from hpstore.loaders.ingestion.hugging_face_source import hugging_face
from hpstore.loaders.ingestion.image_source import ImageFolder
from hpstore.loaders.ingestion.json_lines_source import JsonLines
from hpstore.loaders.ingestion.lance_source import LanceRows
from hpstore.loaders.ingestion.litdata_source import LitDataChunks
from hpstore.loaders.ingestion.lmdb_source import LmdbRecords
from hpstore.loaders.ingestion.mds_source import MdsShards
from hpstore.loaders.ingestion.numpy_source import Arrays, numpy_files
from hpstore.loaders.ingestion.optional_packages import needed
from hpstore.loaders.ingestion.python_source import Iterables, MapDataset, StoredSamples, stored_in
from hpstore.loaders.ingestion.sample_source import Source
from hpstore.loaders.ingestion.source_formats import (
    OPTIONS,
    REMOTE,
    SourceFormat,
    format_of,
    options_of,
    refuse_options,
)
from hpstore.loaders.ingestion.source_paths import is_remote, local_path
from hpstore.loaders.ingestion.source_splits import refuse_splits
from hpstore.loaders.ingestion.tfrecord_source import TfRecords
from hpstore.loaders.ingestion.token_source import token_files
from hpstore.loaders.ingestion.webdataset_source import webdataset


def open_source(
    source: object,  # path, URL, pattern; arrays; dataset; iterable
    *,
    format: str = "auto",  # noqa: A002 (the word that users look for)
    names: Sequence[str] | None = None,
    check_images: bool = True,
    source_options: Mapping[str, object] | None = None,
) -> Source:
    """Open what the caller names as a source of samples.

    Parameters
    ----------
    source
        A path, URL or pattern is opened as `format`; an array, a dict of arrays, a zarr array or
        group, a torch Dataset, a sequence, an iterable or a function that returns one as what it
        is. A Source is returned as it is.
    format
        A SourceFormat, such as "jsonl" (docs/data.md). "auto": by endings and what a folder holds.
    names
        Names of the fields of samples that are tuples.
    check_images
        An image file that is cut short is a bad record; nothing is decoded. False: the bytes of
        images are not looked at.
    source_options
        What a format is read by, such as {"delimiter": ";"} of "csv" (docs/data.md).

    Returns
    -------
    Source
        Records by number, or blocks of records. Samples are read later, by ingest().

    Raises
    ------
    ConfigError
        `source` is not there or is not a source, has several splits (see ingest_splits), its
        format is not clear, or an argument is wrong.
    IngestError
        Its files cannot be taken as a source.
    """
    if format not in list(SourceFormat):
        raise ConfigError(f"format {format!r} is not one of {', '.join(SourceFormat)}")
    if isinstance(names, str) or not all(isinstance(name, str) for name in names or ()):
        raise ConfigError(f"names are {names!r}: give a list of names of fields")
    given = options_of(source_options)
    refuse_splits(source)
    if isinstance(source, str | os.PathLike):
        where = os.fspath(source)
        return _from_path(where, format_of(where, format), check_images, names, given)
    refuse_options(f"a {type(source).__name__}", given, ())
    if isinstance(source, Source):
        return source
    if isinstance(source, np.ndarray):
        return Arrays({"data": source}, where=type(source).__name__)
    if isinstance(source, Mapping) and all(isinstance(v, np.ndarray) for v in source.values()):
        return Arrays({str(name): array for name, array in source.items()})
    if type(source).__module__.partition(".")[0] == "zarr":
        return _zarr(source)
    if type(source).__module__.partition(".")[0] == "datasets":
        return hugging_face(source)
    return _from_object(source, names)


def _from_object(source: Any, names: Sequence[str] | None) -> Source:  # Any: duck-typed datasets
    if isinstance(source, Mapping):
        raise ConfigError("a dict is a source when all its values are numpy arrays")
    streams = isinstance(source, IterableDataset)  # which has an unusable __getitem__
    if hasattr(source, "__getitem__") and hasattr(source, "__len__") and not streams:
        if stored_in(source) is not None:
            return StoredSamples(source)
        return MapDataset(source, names=names)
    if isinstance(source, Iterable) or callable(source):
        return Iterables(source, names=names)
    raise ConfigError(f"a {type(source).__name__} is no source of samples")


def _from_path(
    where: str,
    kind: SourceFormat,
    check_images: bool,
    names: Sequence[str] | None,
    given: dict[str, Any],
) -> Source:
    if kind is not SourceFormat.ZARR and not (kind in REMOTE and is_remote(where)):
        where = local_path(where)
    refuse_options(kind, given, OPTIONS.get(kind, ()))
    makers: dict[SourceFormat, Callable[[], Source]] = {
        SourceFormat.IMAGES: lambda: ImageFolder(where, check=check_images),
        SourceFormat.WEBDATASET: lambda: webdataset(where, check=check_images, **given),
        SourceFormat.PARQUET: lambda: ArrowTables(where, **given),
        SourceFormat.JSONL: lambda: JsonLines(where, **given),
        SourceFormat.CSV: lambda: CsvFiles(where, **given),
        SourceFormat.TOKENS: lambda: token_files(where, **given),
        SourceFormat.TFRECORD: lambda: TfRecords(where, **given),
        SourceFormat.HDF5: lambda: Hdf5Arrays(where, **given),
        SourceFormat.LMDB: lambda: LmdbRecords(where, **given),
        SourceFormat.LANCE: lambda: LanceRows(where),
        SourceFormat.MDS: lambda: MdsShards(where),
        SourceFormat.LITDATA: lambda: LitDataChunks(where, names=names),
        SourceFormat.NUMPY: lambda: numpy_files(where),
        SourceFormat.ZARR: lambda: _zarr(where),
    }
    return makers[kind]()


def _zarr(where: object) -> Source:
    with needed("zarr arrays need zarr", extra="zarr"):
        from hpstore.loaders.ingestion.zarr_source import ZarrArrays
    return ZarrArrays(where)
