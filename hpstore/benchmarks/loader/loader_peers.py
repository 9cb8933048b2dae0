"""What the loader benchmark measures beside hpstore, and what torch itself offers.

Each peer is set up as well as we know; `configuration` says how. Every epoch is shuffled. Batches
come as (values, labels); of B the values are a list of tensors, one a record, as a collate_fn of
`list` gives them: nothing is padded or joined that the peer does not pad or join itself.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.utils.data

from hpstore.benchmarks.loader.loader_data import BATCH, Batch, Data
from hpstore.codec.galois import Bytes


class LoaderPeer(ABC):
    """One contender over the store in `directory`. Any below: other libraries' objects."""

    name: ClassVar[str]
    group: ClassVar[str]  # what --peers calls it
    package: ClassVar[str] = "torch"
    store: ClassVar[str]  # the files that it reads; several peers may share one
    configuration: ClassVar[str]

    def __init__(self, directory: Path, data: Data, device: str = "cpu") -> None:
        self.directory, self.data, self.device = directory, data, device
        self.load()

    def load(self) -> None:  # noqa: B027 (most have nothing to do)
        """Import what is needed: not part of any figure."""

    @abstractmethod
    def write(self) -> None:
        """Make the store."""

    @abstractmethod
    def epoch(self, number: int) -> Iterator[Batch]:
        """The batches of an epoch; the first call constructs the loader."""

    def close(self) -> None:  # noqa: B027 (most have nothing to do)
        """Stop what it started."""


def collate_rows(samples: Sequence[tuple[torch.Tensor, int]]) -> Batch:
    """Records of many sizes as a list."""
    return [value for value, _ in samples], torch.tensor([label for _, label in samples])


class TorchPeer(LoaderPeer):
    """torch's DataLoader over a map-style dataset."""

    group = "torch"
    workers: ClassVar[int] = 0

    @abstractmethod
    def dataset(self) -> Any:
        """What is loaded from."""

    def loader(self) -> Any:
        """torch's DataLoader over it."""
        options: dict[str, Any] = {"num_workers": self.workers}
        if self.workers:
            options["persistent_workers"] = True
        if self.device != "cpu":
            options["pin_memory"] = True
        return torch.utils.data.DataLoader(
            self.dataset(), BATCH, shuffle=True, collate_fn=self.collate(), **options
        )

    def collate(self) -> Any:
        """None is torch's own."""
        return collate_rows if self.data.ragged else None

    def epoch(self, number: int) -> Iterator[Batch]:
        if not hasattr(self, "_loader"):
            self._loader = self.loader()
        torch.manual_seed(number)
        return iter(self._loader)

    def close(self) -> None:
        if hasattr(self, "_loader"):
            del self._loader


class FlatRows:
    """All records back to back in one file, mapped: sample i is a copy, as a tensor."""

    def __init__(self, path: Path, data: Data) -> None:
        self.flat = np.memmap(path, np.uint8, "r")
        self.rows = None if data.ragged else self.flat.reshape(data.rows, -1)
        self.starts, self.count = data.starts, data.rows

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self.rows is not None:
            return torch.from_numpy(np.array(self.rows[index])), index
        return torch.from_numpy(
            np.array(self.flat[self.starts[index] : self.starts[index + 1]])
        ), index


class FlatBatches(FlatRows):
    """The same with `__getitems__`: one fancy index a batch, which the collate_fn hands through."""

    def __getitems__(self, indices: list[int]) -> Batch:
        if self.rows is not None:
            return torch.from_numpy(self.rows[indices]), torch.tensor(indices)
        return collate_rows([self[index] for index in indices])


def write_flat(path: Path, data: Data) -> None:
    """All records back to back."""
    with path.open("wb", buffering=16 << 20) as file:
        for record in data.records():
            file.write(record.data)


def as_it_is(batch: Batch) -> Batch:
    """The collate_fn of datasets that make batches themselves."""
    return batch


class Memmap(TorchPeer):
    """A memmap, sample by sample."""

    name, store = "torch memmap", "flat"
    configuration = "DataLoader over numpy.memmap, 0 workers, default collation"

    def write(self) -> None:
        write_flat(self.directory / "flat", self.data)

    def dataset(self) -> Any:
        return FlatRows(self.directory / "flat", self.data)


class MemmapFancy(Memmap):
    """A memmap, a fancy index a batch."""

    name = "torch memmap getitems"
    configuration = "DataLoader over numpy.memmap, __getitems__ by one fancy index, 0 workers"

    def dataset(self) -> Any:
        return FlatBatches(self.directory / "flat", self.data)

    def collate(self) -> Any:
        return as_it_is


class MemmapWorkers(Memmap):
    """A memmap, two worker processes."""

    name, workers = "torch memmap 2 workers", 2
    configuration = "DataLoader over numpy.memmap, 2 persistent workers, default collation"


class MemmapFancyWorkers(MemmapFancy):
    """A memmap, a fancy index a batch, two worker processes."""

    name, workers = "torch memmap getitems 2 workers", 2
    configuration = "DataLoader over numpy.memmap, __getitems__, 2 persistent workers"


class FileRows:
    """One file a record, 1,000 in a directory."""

    def __init__(self, directory: Path, data: Data) -> None:
        self.directory, self.count = str(directory), data.rows

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        with open(f"{self.directory}/{index // 1000}/{index}", "rb", buffering=0) as file:
            return torch.frombuffer(bytearray(file.read()), dtype=torch.uint8), index


class Files(TorchPeer):
    """A file a record."""

    name, store = "torch files", "files"
    configuration = "DataLoader, a file a record, 0 workers, default collation"

    def write(self) -> None:
        for number in range(0, self.data.rows, 1000):
            (self.directory / str(number // 1000)).mkdir()
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(self._write, range(self.data.rows)))

    def _write(self, index: int) -> None:
        path = f"{self.directory}/{index // 1000}/{index}"
        with open(path, "wb", buffering=0) as file:
            file.write(self.data.record(index).data)

    def dataset(self) -> Any:
        return FileRows(self.directory, self.data)


class FilesWorkers(Files):
    """A file a record, two worker processes."""

    name, workers = "torch files 2 workers", 2
    configuration = "DataLoader, a file a record, 2 persistent workers, default collation"


TORCH_PEERS: tuple[type[LoaderPeer], ...] = (
    MemmapFancy,
    Memmap,
    MemmapWorkers,
    MemmapFancyWorkers,
    Files,
    FilesWorkers,
)


def sample_of(value: Bytes | bytes | memoryview) -> torch.Tensor:
    """Bytes of a record as a tensor of their own, as training needs it."""
    return torch.frombuffer(bytearray(value), dtype=torch.uint8)


def cpus() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0))
