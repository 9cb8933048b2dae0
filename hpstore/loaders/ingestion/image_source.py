"""A tree of image files: the folders at its top are the classes.

The encoded bytes are kept as they are. Files are read concurrently with aiofiles, a bounded number
at a time: with thousands of small files the time goes into waiting for each.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path

import aiofiles
import numpy as np

from hpstore.errors import ConfigError, IngestError
from hpstore.loaders.dataset.fields import Field
from hpstore.loaders.ingestion.image_checks import image_problem
from hpstore.loaders.ingestion.sample_source import (
    IndexedSource,
    SourceItem,
    digest_of,
    in_order,
    printable,
)
from hpstore.runtime.threads import WorkerThreads, start_thread

EXTENSIONS = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
MAX_DEPTH = 64


class ImageFolder(IndexedSource):
    """Images under `root`, in sorted order; fields `image` (bytes) and `label` (int64).

    The label is the place of the top folder among all of them, sorted, as in torchvision; a root
    without folders has no labels. Files of other endings are counted in `ignored`. With `check`, an
    image that is cut short is a bad record (nothing is decoded).
    """

    kind = "images"
    threads = 16

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        extensions: Iterable[str] = EXTENSIONS,
        check: bool = True,
    ) -> None:
        self.where = printable(str(root))
        self._root, self._check = Path(root), check
        self._extensions = frozenset(e.lower() for e in extensions)
        if not self._root.is_dir():
            raise ConfigError(f"{self.where} is not a folder of images")
        top = sorted(entry.name for entry in _entries(self._root) if entry.is_dir())
        self.classes = [printable(name) for name in top]
        self._paths: list[str] = []
        labels: list[int] = []
        facts: list[tuple[int, int]] = []
        for label, folder in enumerate(top or [""]):
            self._scan(self._root / folder, folder, (), facts)
            labels += [label] * (len(facts) - len(labels))
        if top:
            self.ignored += sum(not entry.is_dir() for entry in _entries(self._root))
        self._labels = np.array(labels, np.int64)
        self._sizes = np.array([size for size, _ in facts], np.int64)
        self._times = np.array([time for _, time in facts], np.int64)
        self.length, self.total_bytes = len(facts), int(self._sizes.sum())
        if not facts:
            raise ConfigError(
                f"{self.where} holds no image ({', '.join(sorted(self._extensions))}); "
                f"{self.ignored} other files"
            )

    def _scan(
        self,
        folder: Path,
        inside: str,
        above: tuple[tuple[int, int], ...],
        facts: list[tuple[int, int]],
    ) -> None:
        """Collect the images of a folder and of those in it, following links but no loops."""
        here = folder.stat()
        if (here.st_dev, here.st_ino) in above:
            return
        if len(above) >= MAX_DEPTH:
            raise IngestError(f"{folder}: folders are nested deeper than {MAX_DEPTH}")
        for entry in _entries(folder):
            name = f"{inside}/{entry.name}" if inside else entry.name
            if entry.is_dir():
                self._scan(folder / entry.name, name, (*above, (here.st_dev, here.st_ino)), facts)
            elif not self._is_image(entry):
                self.ignored += 1
            else:
                self._paths.append(name)
                facts.append(_size_and_time(entry))

    def _is_image(self, entry: os.DirEntry[str]) -> bool:
        """A file, or a link that leads nowhere (a bad record), with one of the endings. What macOS
        keeps beside a file, as ._x.jpg, is none."""
        if entry.name.startswith("._"):
            return False
        ending = os.path.splitext(entry.name)[1].lower()
        return ending in self._extensions and (entry.is_file() or not os.path.exists(entry.path))

    @property
    def metadata(self) -> dict[str, object]:
        return {"classes": self.classes} if self.classes else {}

    @property
    def fields(self) -> dict[str, Field]:
        labels = {"label": Field("int64")} if self.classes else {}
        return {"image": Field("bytes"), **labels}

    def fingerprint(self) -> str:
        """Over the path, size and time of change of every file."""
        facts = zip(self._paths, self._sizes.tolist(), self._times.tolist(), strict=True)
        return digest_of([self.kind, self.classes, *facts])

    def name_of(self, index: int) -> str:
        return printable(self._paths[index])

    def bytes_of(self, index: int) -> int:
        return int(self._sizes[index])

    def load(self, index: int) -> SourceItem:
        try:
            return self._item(index, (self._root / self._paths[index]).read_bytes())
        except OSError as error:
            return self._unreadable(index, error)

    def read(self, indices: Iterable[int], workers: int) -> Iterator[SourceItem]:
        """Images in the order given, `workers` files open at a time, read by an event loop."""
        with FileLoop(workers) as files:

            def submit(index: int) -> Future[SourceItem]:
                return asyncio.run_coroutine_threadsafe(self._fetch(index), files.loop)

            yield from in_order(submit, indices, ahead=2 * workers, bytes_of=self.bytes_of)

    async def _fetch(self, index: int) -> SourceItem:
        try:
            async with aiofiles.open(self._root / self._paths[index], "rb") as file:
                data = await file.read()
        except OSError as error:
            return self._unreadable(index, error)
        return self._item(index, data)

    def _item(self, index: int, data: bytes) -> SourceItem:
        name = self._paths[index]
        problem = image_problem(data, os.path.splitext(name)[1]) if self._check else ""
        sample: dict[str, object] = {"image": data}
        if self.classes:
            sample["label"] = int(self._labels[index])
        name = printable(name)
        return SourceItem(
            name=name, origin=index, sample=None if problem else sample, problem=problem
        )

    def _unreadable(self, index: int, error: OSError) -> SourceItem:
        reason = f"it cannot be read: {error.strerror or error}"
        return SourceItem(name=self.name_of(index), origin=index, problem=reason)


class FileLoop:
    """An event loop on a thread of its own, for aiofiles; also where the caller runs one."""

    def __init__(self, workers: int) -> None:
        self.loop = asyncio.new_event_loop()
        self._pool = WorkerThreads(workers, "hpstore-ingest")
        self.loop.set_default_executor(self._pool)
        self._thread = threading.Thread(
            target=self.loop.run_forever, name="hpstore-ingest-loop", daemon=True
        )

    def __enter__(self) -> FileLoop:
        start_thread(self._thread)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(_drained(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self._pool.shutdown()
        self.loop.close()


async def _drained() -> None:
    """Wait for reads under way. Not cancelled: a file that a thread is opening would stay open."""
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    await asyncio.gather(*others, return_exceptions=True)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return sorted(found, key=lambda entry: entry.name)
    except OSError as error:
        raise IngestError(
            f"{folder} cannot be listed: {error.strerror}. Nothing was written."
        ) from error


def _size_and_time(entry: os.DirEntry[str]) -> tuple[int, int]:
    try:
        found = entry.stat()
    except OSError:  # a link that leads nowhere: reading it will say so
        return 0, 0
    return found.st_size, found.st_mtime_ns
