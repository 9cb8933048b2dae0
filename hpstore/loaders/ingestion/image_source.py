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
from operator import itemgetter
from pathlib import Path

import aiofiles.os
import numpy as np

from hpstore.errors import ConfigError, IngestError
from hpstore.loaders.dataset.fields import MAX_VALUE_BYTES, Field, too_large
from hpstore.loaders.dataset.many_ranges import read_files
from hpstore.loaders.dataset.stored_values import StoredValues
from hpstore.loaders.dataset.value_rows import Int64s, ValueRows
from hpstore.loaders.ingestion.image_checks import any_problem, image_problem
from hpstore.loaders.ingestion.sample_source import (
    IndexedSource,
    digest_of,
    in_order,
    printable,
    sliced,
)
from hpstore.loaders.ingestion.source_paths import MAX_DEPTH, LinkedFolders, leads_to, listed
from hpstore.loaders.ingestion.source_rows import (
    Column,
    ColumnRows,
    SourceItem,
    SourceRows,
    gathered,
    grouped,
)
from hpstore.runtime.threads import WorkerThreads, start_thread
from hpstore.units import MIB

EXTENSIONS = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
SLICE_ROWS, SLICE_BYTES = 256, 4 * MIB  # read by a thread at a time


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
        self._prefix = os.path.join(root, "")
        self._extensions = frozenset(e.lower() for e in extensions)
        if not self._root.is_dir():
            raise ConfigError(f"{self.where} is not a folder of images")
        top = sorted(entry.name for entry in listed(self._root) if leads_to(entry.is_dir))
        self.classes = [printable(name) for name in top]
        self._paths: list[str] = []
        labels: list[int] = []
        facts: list[tuple[int, int]] = []
        self._links = LinkedFolders()
        for label, folder in enumerate(top or [""]):
            linked = (self._root / folder).is_symlink()
            self._scan(self._root / folder, folder, (), facts, linked=linked)
            labels += [label] * (len(facts) - len(labels))
        if top:
            self.ignored += sum(not leads_to(entry.is_dir) for entry in listed(self._root))
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
        *,
        linked: bool,
    ) -> None:
        """Collect the images of a folder and of those in it, following links but no loops."""
        here = folder.stat()
        if (here.st_dev, here.st_ino) in above:
            return
        if len(above) >= MAX_DEPTH:
            raise IngestError(f"{folder}: folders are nested deeper than {MAX_DEPTH}")
        for entry in listed(folder):
            name = f"{inside}/{entry.name}" if inside else entry.name
            if leads_to(entry.is_dir):
                behind = self._links.behind(entry, linked=linked)
                inner = (*above, (here.st_dev, here.st_ino))
                self._scan(folder / entry.name, name, inner, facts, linked=behind)
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
        return ending in self._extensions and (
            leads_to(entry.is_file) or not os.path.exists(entry.path)
        )

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
        return digest_of([self.kind, self.classes], facts)

    def name_of(self, index: int) -> str:
        return printable(self._paths[index])

    def bytes_of(self, index: int) -> int:
        return int(self._sizes[index])

    def load(self, index: int) -> SourceItem:
        if self._sizes[index] > MAX_VALUE_BYTES:
            problem = too_large(int(self._sizes[index]))
            return SourceItem(name=self.name_of(index), origin=index, problem=problem)
        try:
            data = self._bytes(index)
        except OSError as error:
            return self._unreadable(index, error)
        return self._item(index, data)

    def read(self, indices: Iterable[int], workers: int) -> Iterator[SourceItem]:
        for rows in self.read_rows(indices, workers):
            yield from rows.items()

    def read_rows(self, indices: Iterable[int], workers: int) -> Iterator[SourceRows]:
        """Images in the order given, of `workers` slices at a time, read by an event loop."""
        slices = sliced(indices, self._sizes, rows=SLICE_ROWS, nbytes=SLICE_BYTES)
        with FileLoop(workers) as files:
            read = aiofiles.os.wrap(self._read_slice)

            def submit(some: tuple[Int64s, int]) -> Future[list[SourceRows]]:
                return asyncio.run_coroutine_threadsafe(
                    read(some[0], executor=files.executor), files.loop
                )

            found = in_order(submit, slices, ahead=2 * workers, bytes_of=itemgetter(1))
            yield from gathered(rows for some in found for rows in some)

    def _read_slice(self, origins: Int64s) -> list[SourceRows]:
        """These images by columns, or one by one where one of them is bad."""
        indices: list[int] = origins.tolist()
        rows = self._whole_files(origins)
        if rows is None or (
            self._check and any_problem(rows, lambda row: self._ending(indices[row]))
        ):
            return list(grouped(map(self.load, indices)))
        columns: dict[str, Column] = {"image": StoredValues(text=False, rows=rows)}
        if self.classes:
            columns["label"] = self._labels[origins]
        return [ColumnRows(columns, origins, lambda row: self.name_of(indices[row]))]

    def _whole_files(self, indices: Int64s) -> ValueRows | None:
        """What is in these files; None where one cannot be read, is too long, or has changed."""
        sizes = self._sizes[indices]
        if int(sizes.max(initial=0)) > MAX_VALUE_BYTES:
            return None
        rooms = sizes + 1  # one byte more shows a file that has grown
        starts = np.cumsum(rooms) - rooms
        memory = np.empty(int(rooms.sum()), np.uint8)
        paths = [self._prefix + self._paths[index] for index in indices.tolist()]
        if (read_files(paths, memory, starts, rooms) != sizes).any():
            return None
        return ValueRows.of(memory, starts, sizes)

    def _bytes(self, index: int) -> bytes:
        """The whole file, or more than a value may have of one that has grown so far."""
        descriptor = os.open(self._prefix + self._paths[index], os.O_RDONLY | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            size = int(self._sizes[index])
            data = file.read(size + 1)
            if len(data) > size:  # it has changed since the scan
                data += file.read(MAX_VALUE_BYTES + 1 - len(data))
        return data

    def _ending(self, index: int) -> str:
        return os.path.splitext(self._paths[index])[1]

    def _item(self, index: int, data: bytes) -> SourceItem:
        name = self._paths[index]
        problem = image_problem(data, self._ending(index)) if self._check else ""
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
        self.executor = WorkerThreads(workers, "hpstore-ingest")
        self.loop.set_default_executor(self.executor)
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
        self.executor.shutdown()
        self.loop.close()


async def _drained() -> None:
    """Wait for reads under way. Not cancelled: a file that a thread is opening would stay open."""
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    await asyncio.gather(*others, return_exceptions=True)


def _size_and_time(entry: os.DirEntry[str]) -> tuple[int, int]:
    try:
        found = entry.stat()
    except OSError:  # a link that leads nowhere: reading it will say so
        return 0, 0
    return found.st_size, found.st_mtime_ns
