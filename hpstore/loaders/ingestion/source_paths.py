"""Files that a source names: one file, a folder of them, a pattern."""

from __future__ import annotations

import glob
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

from hpstore.errors import ConfigError, IngestError
from hpstore.loaders.ingestion.remote_files import RemoteFile, remote_files
from hpstore.runtime.text_files import checked_path

_log = logging.getLogger(__name__)
SourceFile = Path | RemoteFile
"""A file of a source: what both have is name, stem, suffix, stat() and open("rb")."""
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
MAX_FILES = 1_000_000
MAX_DEPTH = 64  # of folders in each other
MAX_LINKED = 1_000_000  # folders behind links


def local_path(where: str | os.PathLike[str]) -> str:
    """The path of files of this machine; file:// is taken off. Raises ConfigError for URLs."""
    text = os.fspath(where)
    if text.startswith("file://"):
        return checked_path(unquote(urlsplit(text).path), "source")
    if is_remote(text) or text.startswith("pipe:"):
        raise ConfigError(
            f"{text} is not on this machine. From elsewhere are read, by URL, JSON Lines, CSV, "
            "TFRecord, Parquet, Arrow, WebDataset tars and zarr arrays (format=, --format, where "
            "the name is not clear): copy or mount the rest here first (aws s3 sync, rclone), or "
            "give its records from Python, as a data set or an iterable of samples. Nothing was "
            "written"
        )
    return checked_path(text, "source")


def is_remote(where: str | os.PathLike[str]) -> bool:
    """Whether this is a URL of another machine."""
    text = os.fspath(where)
    return "://" in text and not text.startswith(("file://", "pipe:"))


def source_files(
    where: str | os.PathLike[str], endings: Sequence[str], storage: Mapping[str, object]
) -> Sequence[SourceFile]:
    """The files of a source, sorted, as local_files has them, or behind a URL that fsspec reads
    with the options `storage`. Raises ConfigError when there are none."""
    text = os.fspath(where)
    if not is_remote(text):
        return local_files(where, endings)
    return remote_files(text, list(_expanded(text)), endings, storage)


def local_files(where: str | os.PathLike[str], endings: Sequence[str]) -> list[Path]:
    """The files of a source, sorted: `where` itself, those of a folder with one of `endings`, or
    those of a pattern (`*`, `?`, `[...]`, `{000..099}`). Raises ConfigError when there are none.
    """
    text = local_path(where)
    if os.path.isfile(text):
        return [Path(text)]
    if os.path.isdir(text):
        found = [
            entry.path
            for entry in listed(text)
            if entry.name.lower().endswith(tuple(endings)) and leads_to(entry.is_file)
        ]
        problem = f"holds no file that ends in {', '.join(endings)}"
    else:
        found = [path for pattern in _expanded(text) for path in _matching(pattern)]
        problem = "does not exist, and no file matches it as a pattern"
    if not found:
        raise ConfigError(f"{text} {problem}")
    return [Path(path) for path in sorted(set(found))]


def leads_to(kind: Callable[[], bool]) -> bool:
    """What is_file or is_dir of an os.DirEntry says; False for a link that leads to itself."""
    try:
        return kind()
    except OSError:
        return False


def _matching(pattern: str) -> list[str]:
    """Files of one pattern. A name without wildcards must be there."""
    if not glob.has_magic(pattern):
        if not os.path.isfile(pattern):
            raise ConfigError(f"{pattern} does not exist")
        return [pattern]
    return [path for path in _found(pattern, LinkedFolders()) if os.path.isfile(path)]


class LinkedFolders:
    """Counts folders that lie behind links: two links in each of 64 lead to 2^64 of them."""

    def __init__(self) -> None:
        self._count = 0

    def behind(self, entry: os.DirEntry[str], *, linked: bool) -> bool:
        """Whether this folder lies behind a link, as the one that it is in does if `linked`. Raises
        IngestError where there are too many."""
        linked = linked or entry.is_symlink()
        self._count += linked
        if self._count > MAX_LINKED:
            raise IngestError(f"{entry.path}: more than {MAX_LINKED:,} folders lie behind links")
        return linked


def _found(pattern: str, links: LinkedFolders) -> Iterator[str]:
    """As glob has it, but `**` follows no loop of links. Raises IngestError."""
    parts = pattern.split("/")
    if "**" not in parts:
        yield from glob.glob(pattern)
        return
    at = parts.index("**")
    top, rest = "/".join(parts[:at]), "/".join(parts[at + 1 :])
    tops = glob.glob(top or ("/" if at else "."))
    for folder in filter(os.path.isdir, tops):
        for inside in _folders(folder, (), links, linked=False):
            yield from _found(os.path.join(glob.escape(inside), rest or "*"), links)


def _folders(
    folder: str, above: tuple[tuple[int, int], ...], links: LinkedFolders, *, linked: bool
) -> Iterator[str]:
    """A folder and those in it, but for hidden ones, and those that may not be listed."""
    try:
        here, inside = os.stat(folder), listed(folder)
    except (OSError, IngestError) as error:
        _log.warning("%s is left out: %s", folder, error)
        return
    if (here.st_dev, here.st_ino) in above:
        return
    if len(above) >= MAX_DEPTH:
        raise IngestError(f"{folder}: folders are nested deeper than {MAX_DEPTH}")
    yield folder
    for entry in inside:
        if not entry.name.startswith(".") and leads_to(entry.is_dir):
            behind = links.behind(entry, linked=linked)
            inner = (*above, (here.st_dev, here.st_ino))
            yield from _folders(entry.path, inner, links, linked=behind)


def listed(folder: str | Path) -> list[os.DirEntry[str]]:
    """What is in a folder, sorted. Raises IngestError."""
    try:
        with os.scandir(folder) as found:
            return sorted(found, key=lambda entry: entry.name)
    except OSError as error:
        raise IngestError(
            f"{folder} cannot be listed: {error.strerror}. Nothing was written."
        ) from error


def _expanded(text: str) -> Iterator[str]:
    """Every name of {000..099}, as WebDataset writes its shards."""
    found = _RANGE.search(text)
    if found is None:
        yield text
        return
    first, last = found.groups()
    if int(last) - int(first) >= MAX_FILES:
        raise ConfigError(f"{text} names more than {MAX_FILES} files")
    for number in range(int(first), int(last) + 1):
        name = str(number).zfill(len(first))
        yield from _expanded(text[: found.start()] + name + text[found.end() :])


def file_facts(files: Sequence[SourceFile]) -> list[tuple[str, int, int | str]]:
    """Path, size and time of change of each, for a fingerprint; of remote ones URL, size, tag."""
    return [_facts(file) for file in files]


def _facts(file: SourceFile) -> tuple[str, int, int | str]:
    if isinstance(file, RemoteFile):
        return str(file), file.stat().st_size, file.stat().tag
    found = file.stat()
    return str(file.resolve()), found.st_size, found.st_mtime_ns
