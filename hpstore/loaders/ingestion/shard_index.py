"""The index.json of MDS and LitData folders: which of the two it is, which files it names."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hpstore.errors import ConfigError, MalformedFile
from hpstore.format.untrusted_bytes import MALFORMED, MOST, brief, whole
from hpstore.loaders.ingestion.source_paths import local_path

INDEX = "index.json"
_MOST_BYTES = 1 << 30


def read_index(folder: Path) -> dict[str, Any]:
    """The index of a folder. Any: JSON. Raises MalformedFile."""
    file = folder / INDEX
    try:
        if file.stat().st_size > _MOST_BYTES:
            raise ValueError(f"it has more than {_MOST_BYTES} bytes")
        found = json.loads(file.read_bytes())
        if not isinstance(found, dict):
            raise ValueError("it is no JSON object")
    except (OSError, *MALFORMED) as error:
        raise MalformedFile(f"{file} cannot be read: {brief(error)}") from error
    return found


def index_folder(where: str | os.PathLike[str]) -> Path:
    """The local folder of an index, which `where` or its index.json names. Raises ConfigError."""
    folder = Path(local_path(where))
    return folder.parent if folder.name == INDEX else folder


@contextmanager
def believing(claim: str) -> Iterator[None]:
    """Take over what an index says in this block. Raises MalformedFile, with what is not so, where
    it cannot be; `claim`: that it is none."""
    try:
        yield
    except ConfigError:
        raise
    except (OSError, *MALFORMED) as error:
        raise MalformedFile(f"{claim}: {brief(error)}") from error


def of_index(folder: Path) -> str:
    """Whether a folder's index is one of "mds" or of "litdata"; "" where it is another one."""
    try:
        found = read_index(folder)
    except MalformedFile:
        if any(name.startswith("chunk-") or name.endswith(".mds") for name in os.listdir(folder)):
            raise  # or its chunks would pass for files of tokens
        return ""
    return "litdata" if {"chunks", "config"} <= found.keys() else "mds" * ("shards" in found)


def named_file(folder: Path, name: object, least_bytes: object) -> Path:
    """A file that an index names, which lies in its folder and is not shorter than it says. Raises
    ValueError, TypeError."""
    if not isinstance(name, str) or not name or "/" in name or name in (".", ".."):
        raise ValueError(f"{str(name)[:80]!r} is no name of a file in this folder")
    path = folder / name
    if not path.is_file():
        raise ValueError(f"{name} is not there")
    size, least = path.stat().st_size, whole(least_bytes, f"bytes of {name}")
    if size < least:
        raise ValueError(f"{name} is cut short: {size} bytes of {least}")
    return path


def whole_of(entry: Mapping[str, Any], key: str, *, most: int = MOST) -> int:
    """A count of an entry of an index. Raises ValueError, KeyError."""
    return whole(entry[key], key, most=most)
