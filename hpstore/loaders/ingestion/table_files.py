"""Which files of a folder are a table's: those that the folder itself names, where it does.

Tools leave other tables beside them: Hugging Face's map() a cache-*.arrow with the samples that it
has made, Spark and others files whose names begin with a dot or an underscore.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path, PurePosixPath

from hpstore.errors import ConfigError, IngestError
from hpstore.loaders.ingestion.hive_partitions import divided_files
from hpstore.loaders.ingestion.source_paths import (
    SourceFile,
    is_remote,
    local_files,
    local_path,
    source_files,
)

_HIDDEN = (".", "_")
_CACHE = re.compile(r"cache-[0-9a-f]{16}.*\.arrow$")  # what map() of Hugging Face leaves
_LOOK_AT = 1000  # entries below a folder
_MOST_BYTES = 64 << 20  # of a file that lists others

Metadata = Callable[[Path], Iterable[str]]  # the files that a `_metadata` of Parquet names


def table_files(
    where: str | os.PathLike[str],
    endings: Sequence[str],
    metadata: Metadata,
    storage: Mapping[str, object],
) -> tuple[Sequence[SourceFile], int]:
    """The files of a table, sorted or in the order that the folder gives, and how many others of
    these endings lie beside them. Raises ConfigError, IngestError.

    A folder of Hugging Face's save_to_disk names them in state.json, one of its cache in
    dataset_info.json, one of Parquet in `_metadata`; without any of these, the tables in folders
    named `column=value` are taken where there are none at the top.
    """
    if is_remote(where):
        return source_files(where, endings, storage), 0
    folder = Path(local_path(where))
    if not folder.is_dir():
        return local_files(where, endings), 0
    named = _named(folder, endings, metadata)
    beside = [file for file in folder.iterdir() if file.name.lower().endswith(tuple(endings))]
    if named is None:
        if not beside:
            divided = list(divided_files(folder, endings))
            if divided:
                return divided, 0
            raise no_table(folder, endings)
        shown = [f for f in local_files(folder, endings) if not f.name.startswith(_HIDDEN)]
        named = [f for f in shown if not _CACHE.match(f.name)] or shown
        if not named:
            raise ConfigError(
                f"{where} holds only files whose names begin with a dot or an underscore, which "
                "mark what is no part of a table; name them with a pattern"
            )
    return named, len(set(beside) - set(named))


def no_table(folder: Path, endings: Sequence[str]) -> ConfigError:
    """The error of a folder without tables, saying where there are some."""
    below = next(
        (f for f in islice(folder.rglob("*"), _LOOK_AT) if f.name.lower().endswith(tuple(endings))),
        None,
    )
    if below is None:
        return ConfigError(f"{folder} holds no file that ends in {', '.join(endings)}")
    return ConfigError(
        f"{folder} holds tables in folders below it, such as {below.relative_to(folder)}: name one "
        f"of these folders, or all files with a pattern such as {folder}/**/*{below.suffix}"
    )


def _named(folder: Path, endings: Sequence[str], metadata: Metadata) -> list[Path] | None:
    """What the folder says that its files are; None when it says nothing."""
    splits = _json(folder / "dataset_dict.json").get("splits")
    if isinstance(splits, list):
        raise ConfigError(
            f"{folder} holds the splits {', '.join(map(str, splits))}: name the folder of one of "
            "them, which is below it"
        )
    files = _json(folder / "state.json").get("_data_files")
    if isinstance(files, list):
        names = [f.get("filename") for f in files if isinstance(f, Mapping)]
        return _inside(folder, "state.json", names)
    if (folder / "_metadata").is_file():
        return _inside(folder, "_metadata", metadata(folder / "_metadata"))
    splits = _json(folder / "dataset_info.json").get("splits")
    if isinstance(splits, Mapping) and splits:
        return _of_splits(folder, endings, splits)
    return None


def _of_splits(
    folder: Path, endings: Sequence[str], splits: Mapping[str, object]
) -> list[Path] | None:
    """Files of Hugging Face's cache: NAME-SPLIT.arrow, or NAME-SPLIT-00000-of-00002.arrow."""

    def of(split: str) -> list[Path]:
        ours = [f for f in folder.iterdir() if f.name.lower().endswith(tuple(endings))]
        return sorted(f for f in ours if f.stem.endswith(f"-{split}") or f"-{split}-0" in f.stem)

    found = {str(split): files for split in splits if (files := of(str(split)))}
    if len(found) > 1:
        split, files = next(iter(found.items()))
        pattern = files[0].name.partition(f"-{split}")[0] + f"-{split}*"
        raise ConfigError(
            f"{folder} holds the splits {', '.join(found)}: name the files of one with a pattern, "
            f"such as {folder / pattern}"
        )
    return next(iter(found.values()), None)


def _inside(folder: Path, listing: str, names: Iterable[object]) -> list[Path]:
    """Files in the folder, each once; nothing that leads out of it, or is not there."""
    made: dict[Path, None] = {}
    for name in names:
        parts = PurePosixPath(str(name)).parts
        if not isinstance(name, str) or not parts or ".." in parts or name.startswith("/"):
            raise IngestError(f"{folder / listing} names {name!r}, which is no file in the folder")
        path = folder / name
        if not path.is_file():
            raise IngestError(f"{folder / listing} names {name}, which is not there")
        made[path] = None
    if not made:
        raise IngestError(f"{folder / listing} names no file")
    return list(made)


def _json(path: Path) -> Mapping[str, object]:
    """The object in a small JSON file; nothing where there is none."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            return {}
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
