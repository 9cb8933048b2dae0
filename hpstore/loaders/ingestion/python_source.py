"""Python objects as sources: a torch Dataset or another sequence, and any iterable."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import Subset

from hpstore.errors import ConfigError
from hpstore.loaders.dataset.class_names import CLASSES, UNITS, feature_classes
from hpstore.loaders.dataset.dataset import Dataset
from hpstore.loaders.dataset.fields import Field
from hpstore.loaders.ingestion.sample_source import BlockwiseSource, IndexedSource, digest_of
from hpstore.loaders.ingestion.source_rows import Sample, SourceItem


class Indexable(Protocol):
    """What a map-style torch Dataset has. Any: samples are whatever it makes."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class MapDataset(IndexedSource):
    """Anything with a length and items: a torch Dataset, a Subset, a list of samples.

    What an item raises is a bad record. With more than one worker, its items are made by threads.
    """

    kind = "dataset"

    def __init__(self, items: Indexable, *, names: Sequence[str] | None = None) -> None:
        self._items, self._names_given = items, names
        self.where = type(items).__name__
        self.length = len(items)

    @property
    def metadata(self) -> dict[str, object]:
        """Names of the classes of Hugging Face's ClassLabel columns."""
        features = getattr(self._items, "features", None)
        found = feature_classes(features) if isinstance(features, Mapping) else {}
        return {CLASSES: found} if found else {}

    def fingerprint(self) -> str:
        """Over type, length, and the first and the last sample."""
        ends = [self.load(i) for i in sorted({0, self.length - 1})] if self.length else []
        said = [[item.problem] if item.sample is None else shape_of(item.sample) for item in ends]
        return digest_of([self.kind, self.where, self.length, *said])

    def name_of(self, index: int) -> str:
        return f"{self.where}[{index}]"

    def load(self, index: int) -> SourceItem:
        name = self.name_of(index)
        try:
            return SourceItem(
                name=name, origin=index, sample=as_sample(self._items[index], self._names_given)
            )
        except Exception as error:  # noqa: BLE001 (any error of user code is this record's)
            return SourceItem(name=name, origin=index, problem=f"{type(error).__name__}: {error}")


def stored_in(items: object) -> Dataset | None:
    """The dataset of hpstore that this is, or of which it is a Subset, unless it decodes images."""
    while isinstance(items, Subset):
        items = items.dataset
    return items if isinstance(items, Dataset) and items.decode is None else None


class StoredSamples(MapDataset):
    """Samples of a dataset of hpstore, or of a Subset of one: with its fields and classes."""

    kind = "hpstore"

    def __init__(self, items: Any) -> None:  # Any: a Dataset or a Subset
        super().__init__(items)
        found = stored_in(items)
        assert found is not None
        self._data = found
        self.where = f"data set {found.name}"

    @property
    def metadata(self) -> dict[str, object]:
        """What numbers of the fields stand for."""
        said = {CLASSES: self._data.classes, UNITS: self._data.metadata.get(UNITS)}
        return {what: value for what, value in said.items() if value}

    @property
    def fields(self) -> dict[str, Field]:
        return dict(self._data.fields)

    def fingerprint(self) -> str:
        """As of any dataset, and of its version."""
        return digest_of([super().fingerprint(), self._data.fingerprint])


class Iterables(BlockwiseSource):
    """One block: what an iterable yields, or what a function's iterable yields.

    A resumed ingest draws and drops what was already written, so it must yield the same again.
    """

    kind = "iterable"
    blocks = 1

    def __init__(
        self,
        items: Iterable[Any] | Callable[[], Iterable[Any]],
        *,
        names: Sequence[str] | None = None,
    ) -> None:
        self._items, self._names_given = items, names
        self.where = getattr(items, "__name__", type(items).__name__)

    def fingerprint(self) -> str:
        """Its type alone: looking at samples would draw them."""
        return digest_of([self.kind, self.where])

    def read_block(self, block: int, start: int) -> Iterator[SourceItem]:
        items = iter(self._items() if callable(self._items) else self._items)
        for number, value in enumerate(islice(items, start, None), start):
            name = f"{self.where}[{number}]"
            try:
                sample = as_sample(value, self._names_given)
            except ConfigError as error:
                yield SourceItem(name=name, origin=number, problem=str(error))
                continue
            yield SourceItem(name=name, origin=number, sample=sample)


def as_sample(value: object, names: Sequence[str] | None) -> Sample:
    """A dict of what a dataset yields: tuples by `names` or their places. Raises ConfigError."""
    if isinstance(value, Mapping):
        named = {str(name): part for name, part in value.items()}
        return _whole(named, list(value))
    parts = value if isinstance(value, tuple | list) else (value,)
    given = names or getattr(value, "_fields", None) or [str(i) for i in range(len(parts))]
    if len(given) != len(parts):
        raise ConfigError(f"it has {len(parts)} parts, names are {list(given)}")
    return _whole(dict(zip(given, parts, strict=True)), given)


def _whole(sample: dict[str, object], given: Sequence[object]) -> Sample:
    """The sample. Raises ConfigError where parts of one name took each other's place."""
    if len(sample) < len(given):
        raise ConfigError(f"two of its parts have one name: {list(given)[:20]}")
    return sample


def shape_of(sample: Sample) -> list[object]:
    """JSON that tells samples apart: names, types and a digest of the bytes, where they have any
    (a value may be anything, and be left out)."""
    rows: list[object] = []
    for name, value in sample.items():
        try:
            raw = _raw_bytes(value)
        except (RuntimeError, TypeError, ValueError):  # sparse, of several shapes
            raw = b""
        rows.append([name, type(value).__name__, hashlib.blake2b(raw, digest_size=16).hexdigest()])
    return rows


def _raw_bytes(value: object) -> bytes:
    """What distinguishes values of one type; nothing that is another in the next process."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if value is None or isinstance(value, str | int | float | bool | complex):
        return repr(value).encode(errors="surrogatepass")
    if isinstance(value, dict | list):
        try:
            json.dumps(value)
        except (TypeError, ValueError):  # sets have another order, and objects another address
            kinds = json.dumps(value, default=lambda one: type(one).__name__, skipkeys=True)
            return kinds.encode()
        return repr(value).encode(errors="surrogatepass")
    array = np.asarray(value)
    return b"" if array.dtype.hasobject else array.tobytes()  # those are addresses in memory
