"""Formats of files, their options, and which one a path is of: by endings and folders' contents."""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

from hpstore.errors import ConfigError
from hpstore.loaders.ingestion.arrow_source import ARROW, PARQUET
from hpstore.loaders.ingestion.csv_source import TABLE_TEXT
from hpstore.loaders.ingestion.hdf5_source import HDF5
from hpstore.loaders.ingestion.hive_partitions import divided_files
from hpstore.loaders.ingestion.image_source import EXTENSIONS
from hpstore.loaders.ingestion.json_lines_source import JSON_LINES
from hpstore.loaders.ingestion.lance_source import LANCE
from hpstore.loaders.ingestion.lmdb_source import LMDB
from hpstore.loaders.ingestion.numpy_source import NUMPY
from hpstore.loaders.ingestion.shard_index import INDEX, of_index
from hpstore.loaders.ingestion.source_paths import local_path
from hpstore.loaders.ingestion.table_files import no_table
from hpstore.loaders.ingestion.tfrecord_source import TFRECORD
from hpstore.loaders.ingestion.token_source import TOKENS
from hpstore.loaders.ingestion.webdataset_source import COMPRESSED, PLAIN

ZARR_FILES = ("zarr.json", ".zarray", ".zgroup")
LOOK_AT = 1000  # entries of a folder by which its format is guessed


class SourceFormat(StrEnum):
    """Formats of files. AUTO: by endings and contents."""

    AUTO = "auto"
    IMAGES = "images"
    WEBDATASET = "webdataset"
    PARQUET = "parquet"
    JSONL = "jsonl"
    CSV = "csv"
    TOKENS = "tokens"
    TFRECORD = "tfrecord"
    HDF5 = "hdf5"
    LMDB = "lmdb"
    LANCE = "lance"
    MDS = "mds"
    LITDATA = "litdata"
    NUMPY = "numpy"
    ZARR = "zarr"


OPTIONS: dict[SourceFormat, tuple[str, ...]] = {
    SourceFormat.WEBDATASET: ("storage",),
    SourceFormat.PARQUET: ("storage",),
    SourceFormat.JSONL: ("storage",),
    SourceFormat.CSV: ("delimiter", "storage"),
    SourceFormat.TFRECORD: ("storage",),
    SourceFormat.HDF5: ("group",),
    SourceFormat.LMDB: ("database",),
    SourceFormat.TOKENS: ("dtype", "record_tokens"),
}

REMOTE = frozenset(kind for kind, names in OPTIONS.items() if "storage" in names)
"""Formats that are read by URL; `storage`: options of fsspec for it."""

ENDINGS: dict[SourceFormat, tuple[str, ...]] = {
    SourceFormat.WEBDATASET: (*PLAIN, *COMPRESSED),
    SourceFormat.PARQUET: (*PARQUET, *ARROW),
    SourceFormat.JSONL: JSON_LINES,
    SourceFormat.CSV: TABLE_TEXT,
    SourceFormat.TOKENS: TOKENS,
    SourceFormat.TFRECORD: TFRECORD,
    SourceFormat.HDF5: HDF5,
    SourceFormat.LMDB: LMDB,
    SourceFormat.LANCE: LANCE,
    SourceFormat.MDS: (".mds",),
    SourceFormat.NUMPY: NUMPY,
    SourceFormat.ZARR: (".zarr",),
}
_KNOWN = (
    f"Known are {', '.join(ending for endings in ENDINGS.values() for ending in endings)} and "
    "folders of images; format= (--format) says which one a file of another name is. Anything else "
    "can be given from Python, as a data set or an iterable of its samples"
)


def format_of(where: str, asked: str) -> SourceFormat:
    """The format of a path. Raises ConfigError when it is not clear."""
    if asked != SourceFormat.AUTO:
        return SourceFormat(asked)
    by_name = _by_ending(where.rstrip("/").lower())
    if by_name is not None:
        return by_name
    path = local_path(where)
    if not os.path.isdir(path):
        if not os.path.exists(path) and not any(c in where for c in "*?[{"):
            raise ConfigError(f"{where} does not exist")
        raise ConfigError(f"the format of {where} is not clear. {_KNOWN}")
    return _of_folder(Path(path))


def _by_ending(name: str) -> SourceFormat | None:
    return next((kind for kind, ends in ENDINGS.items() if name.endswith(ends)), None)


def _of_folder(path: Path) -> SourceFormat:
    """By the files of zarr, MDS and LitData, else by the first file of a known ending, at the top,
    then below."""
    if any((path / name).is_file() for name in ZARR_FILES):
        return SourceFormat.ZARR
    if (path / INDEX).is_file():
        kind = of_index(path)
        if kind:
            return SourceFormat(kind)
    for names in (sorted(os.listdir(path)), _below(path)):
        for name in names:
            found = _by_ending(name.lower())
            if found not in (None, SourceFormat.ZARR) and (path / name).is_file():
                return SourceFormat(str(found))
            if name.lower().endswith(EXTENSIONS):
                return SourceFormat.IMAGES
    tables = (*PARQUET, *ARROW)
    if any(True for _ in divided_files(path, tables)):
        return SourceFormat.PARQUET
    if any(True for _ in _below(path, tables)):
        raise no_table(path, tables)
    raise ConfigError(f"{path} holds nothing of a known ending. {_KNOWN}")


def _below(path: Path, endings: tuple[str, ...] = EXTENSIONS) -> Iterator[str]:
    """Files with these endings in the folders of a folder; the first ones."""
    looked = 0
    for _, _, files in os.walk(path, followlinks=False):
        for name in sorted(files):
            looked += 1
            if looked > LOOK_AT:
                return
            if name.lower().endswith(endings):
                yield name


def options_of(given: Mapping[str, object] | None) -> dict[str, Any]:
    """The options as a dict. Raises ConfigError for what is none."""
    if given is not None and not isinstance(given, Mapping):
        raise ConfigError(f"source_options are a {type(given).__name__}: give a dict")
    options = dict(given or {})
    for name in ("delimiter", "group", "database"):
        if not isinstance(options.get(name, ""), str):
            raise ConfigError(f"option {name} is {options[name]!r}, not a text")
    if not isinstance(options.get("storage") or {}, Mapping):
        raise ConfigError(f"option storage is {options['storage']!r}: give a dict")
    return options


def refuse_options(what: str, given: Mapping[str, object], known: Collection[str]) -> None:
    """Raise ConfigError for an option that this kind of source has not."""
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            said = ", ".join(known) or "none"
            raise ConfigError(f"{what} has no option {name!r}{hint} (options: {said})")
