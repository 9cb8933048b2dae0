"""Splits of a source: train, val and test of one folder, or of a DatasetDict (decision 0124)."""

from __future__ import annotations

import fnmatch
import glob
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpstore.errors import ConfigError
from hpstore.loaders.ingestion.source_formats import ENDINGS
from hpstore.loaders.ingestion.source_paths import local_path

SPLITS = ("train", "training", "val", "valid", "validation", "dev", "eval", "test", "testing")
_NAMED = re.compile(rf"(?:.*-)?({'|'.join(SPLITS)})(?:-[0-9].*)?")
_MOST_BYTES = 64 << 20


def splits_of(source: object) -> dict[str, Any]:
    """The splits of what a user names as a source, by name, each a source; none where it is one.

    A folder whose folders are all named as splits are, beside no data; one whose files are all
    named for splits (train-00000-of-00002.parquet, imdb-test.arrow, val.jsonl), of which there are
    two or more; a folder of save_to_disk with several; a DatasetDict, also of streams. Any: each is
    a source.
    """
    if isinstance(source, Mapping) and type(source).__module__.partition(".")[0] == "datasets":
        return {str(name): split for name, split in source.items()}
    if not isinstance(source, str | os.PathLike) or "://" in os.fspath(source):
        return {}
    folder = Path(local_path(source))
    if not folder.is_dir():
        return {}
    return _of_save_to_disk(folder) or _of_folders(folder) or _of_files(folder)


def _of_save_to_disk(folder: Path) -> dict[str, Any]:
    try:
        listing = folder / "dataset_dict.json"
        if listing.stat().st_size > _MOST_BYTES:
            return {}
        found = json.loads(listing.read_bytes())["splits"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return {}
    if not isinstance(found, list):
        return {}
    names = [str(name) for name in found]
    if any("/" in name or name in ("", ".", "..") for name in names):
        raise ConfigError(f"{listing} names {names}, of which one is no folder in it")
    return {name: str(folder / name) for name in names}


def _of_folders(folder: Path) -> dict[str, Any]:
    entries = [entry for entry in folder.iterdir() if not entry.name.startswith((".", "_"))]
    folders = sorted(entry.name for entry in entries if entry.is_dir())
    if not folders or any(name.lower() not in SPLITS for name in folders):
        return {}
    if any(_ending(entry) for entry in entries if entry.is_file()):
        return {}
    return {name: str(folder / name) for name in folders}


def _of_files(folder: Path) -> dict[str, Any]:
    """By the names of files; of one ending, so that a pattern names those of a split."""
    named = [f for f in folder.iterdir() if not f.name.startswith((".", "_")) and _ending(f)]
    files = [file.name for file in sorted(named) if file.is_file()]
    parts: dict[str, tuple[str, str, str]] = {}  # before, the split as it is written, the ending
    ours: dict[str, list[str]] = {}
    for name in files:
        ending = _ending(Path(name))
        found = _NAMED.fullmatch(name[: -len(ending)].lower())
        if found is None:
            return {}
        low, high = found.span(1)
        part = (name[:low], name[low:high], ending)
        if parts.setdefault(found[1], part) != part:
            return {}  # files of two datasets, or of two formats
        ours.setdefault(found[1], []).append(name)
    if len(ours) < 2:
        return {}
    return {split: _pattern(folder, parts[split], ours[split], files) for split in ours}


def _pattern(
    folder: Path, part: tuple[str, str, str], ours: Sequence[str], files: Sequence[str]
) -> str:
    """What names these of the files of a folder, and no other: val* is validation, too. Raises
    ConfigError."""
    before, split, ending = part
    for sign in ("*", "-[0-9]*", ""):
        pattern = f"{glob.escape(before + split)}{sign}{ending}"
        if fnmatch.filter(files, pattern) == ours:
            return f"{glob.escape(str(folder))}/{pattern}"
    raise ConfigError(
        f"{folder}: no pattern names the files {', '.join(ours[:3])} of one split and no other: "
        "put the files of each split into a folder of its own"
    )


def _ending(file: Path) -> str:
    """The known ending of a file's name, or ""."""
    name = file.name.lower()
    ends = [end for endings in ENDINGS.values() for end in endings if name.endswith(end)]
    return max(ends, key=len, default="")


def refuse_splits(source: object) -> None:
    """Raise ConfigError for a source of several splits, naming them."""
    found = splits_of(source)
    if not found:
        return
    where = os.fspath(source) if isinstance(source, str | os.PathLike) else type(source).__name__
    one = next(iter(found.values()))
    hint = f"name one of them, such as {one}" if isinstance(one, str) else "give one of them"
    raise ConfigError(
        f"{where} holds the splits {', '.join(found)}: {hint}, or write each as a dataset with "
        "ingest_splits() or hpstore dataset ingest"
    )
