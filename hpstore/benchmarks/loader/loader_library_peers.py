"""Other loaders, each in the best configuration that we know; none is a dependency.

One that is not installed, or fails here, is reported with the reason. Any: their types are not
here. How many workers: what was fastest in notes of November 2026 on two cores.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.utils.data

from hpstore.benchmarks.loader.loader_data import BATCH, Batch
from hpstore.benchmarks.loader.loader_peers import LoaderPeer, collate_rows, cpus, sample_of
from hpstore.units import MIB

_SHARD_ROWS_BYTES = 64 * MIB


class Streaming(LoaderPeer):
    """mosaicml-streaming."""

    name = group = "streaming"
    package, store = "mosaicml-streaming", "mds"
    configuration = "StreamingDataset(local, shuffle, py1e), 2 persistent workers, shards 64 MiB"

    def load(self) -> None:
        import streaming

        self._library: Any = streaming

    def write(self) -> None:
        columns = {"value": "bytes", "label": "int"}
        with self._library.MDSWriter(
            out=str(self.directory), columns=columns, size_limit=_SHARD_ROWS_BYTES
        ) as out:
            for index, record in enumerate(self.data.records()):
                out.write({"value": record.tobytes(), "label": index})

    def epoch(self, number: int) -> Iterator[Batch]:
        if not hasattr(self, "_loader"):
            self._library.base.util.clean_stale_shared_memory()
            dataset = self._library.StreamingDataset(
                local=str(self.directory), shuffle=True, batch_size=BATCH, num_canonical_nodes=1
            )
            self._loader: Any = torch.utils.data.DataLoader(
                dataset,
                BATCH,
                num_workers=2,
                persistent_workers=True,
                collate_fn=collate_ragged if self.data.ragged else collate_fixed,
            )
        return iter(self._loader)


def collate_ragged(samples: list[dict[str, Any]]) -> Batch:
    """A list of tensors."""
    return collate_rows([(sample_of(s["value"]), int(s["label"])) for s in samples])


def collate_fixed(samples: list[dict[str, Any]]) -> Batch:
    """One tensor."""
    joined = np.stack([np.frombuffer(s["value"], np.uint8) for s in samples])
    return torch.from_numpy(joined), torch.tensor([int(s["label"]) for s in samples])


class Litdata(LoaderPeer):
    """litdata, one process: faster here than two workers."""

    name = group = package = store = "litdata"
    configuration = "StreamingDataLoader(StreamingDataset(shuffle)), 0 workers, chunks 64 MiB"

    def load(self) -> None:
        import litdata
        from litdata.streaming import Cache

        self._library: Any = litdata
        self._cache: Any = Cache

    def write(self) -> None:
        cache = self._cache(str(self.directory), chunk_bytes=_SHARD_ROWS_BYTES)
        for index, record in enumerate(self.data.records()):
            cache[index] = {"value": record.tobytes(), "label": index}
        cache.done()
        cache.merge()

    def epoch(self, number: int) -> Iterator[Batch]:
        if not hasattr(self, "_loader"):
            dataset = self._library.StreamingDataset(str(self.directory), shuffle=True)
            self._loader: Any = self._library.StreamingDataLoader(
                dataset,
                batch_size=BATCH,
                collate_fn=collate_ragged if self.data.ragged else collate_fixed,
            )
        return iter(self._loader)


class Webdataset(LoaderPeer):
    """WebDataset: shards in random order, and a buffer of samples. Not a full shuffle."""

    name = group = package = store = "webdataset"
    configuration = "tar shards of 1,000, shardshuffle, buffer of 2,000 (not a full shuffle)"

    def load(self) -> None:
        import webdataset

        self._library: Any = webdataset

    def write(self) -> None:
        rows = 1000 if not self.data.ragged else 400
        pattern = str(self.directory / "%06d.tar")
        with self._library.ShardWriter(pattern, maxcount=rows, verbose=0) as out:
            for index, record in enumerate(self.data.records()):
                out.write(
                    {
                        "__key__": f"{index:09d}",
                        "value.bin": record.tobytes(),
                        "label.txt": str(index),
                    }
                )

    def epoch(self, number: int) -> Iterator[Batch]:
        urls = [str(path) for path in sorted(self.directory.glob("*.tar"))]
        ragged = self.data.ragged
        collate = collate_ragged if ragged else collate_fixed

        def sample(found: dict[str, Any]) -> dict[str, Any]:
            return {"value": found["value.bin"], "label": int(found["label.txt"])}

        source = self._library.WebDataset(
            urls, shardshuffle=len(urls), seed=number, empty_check=False
        )
        buffer = 2000 if not ragged else 500
        made = source.shuffle(buffer).map(sample).batched(BATCH, collation_fn=collate)
        return iter(made)


class Ffcv(LoaderPeer):
    """ffcv, its fastest order that is a full shuffle."""

    name = group = package = store = "ffcv"
    configuration = "OrderOption.RANDOM, os_cache=True, compiled; ragged records come out padded"
    order, os_cache = "RANDOM", True

    def load(self) -> None:
        import ffcv.loader
        import ffcv.writer

        self._library: Any = ffcv

    def write(self) -> None:
        fields = self._library.fields
        length = int(self.data.lengths[0])
        value = (
            fields.BytesField()
            if self.data.ragged
            else fields.NDArrayField(np.dtype(np.uint8), (length,))
        )
        made = {"value": value, "label": fields.IntField()}
        writer = self._library.writer.DatasetWriter(
            str(self.directory / "data.beton"), made, num_workers=1
        )
        writer.from_indexed_dataset(_Indexed(self.data))

    def epoch(self, number: int) -> Iterator[Batch]:
        if not hasattr(self, "_loader"):
            from ffcv.fields.basics import IntDecoder
            from ffcv.fields.bytes import BytesDecoder
            from ffcv.fields.ndarray import NDArrayDecoder
            from ffcv.loader import Loader, OrderOption
            from ffcv.transforms import Squeeze, ToTensor

            value = BytesDecoder() if self.data.ragged else NDArrayDecoder()
            self._loader: Any = Loader(
                str(self.directory / "data.beton"),
                batch_size=BATCH,
                num_workers=cpus(),
                order=getattr(OrderOption, self.order),
                os_cache=self.os_cache,
                drop_last=False,
                pipelines={
                    "value": [value, ToTensor()],
                    "label": [IntDecoder(), ToTensor(), Squeeze()],
                },
            )
        return iter(self._loader)


class _Indexed:
    """What ffcv's writer reads from."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __len__(self) -> int:
        return int(self._data.rows)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self._data.record(index), index


class FfcvQuasi(Ffcv):
    """ffcv where the data do not fit: pages read by itself."""

    name = "ffcv quasi-random"
    configuration = "OrderOption.QUASI_RANDOM, os_cache=False, compiled"
    order, os_cache = "QUASI_RANDOM", False


class Grain(LoaderPeer):
    """grain over ArrayRecord."""

    name = group = package = "grain"
    store = "arrayrecord"
    configuration = "MapDataset over ArrayRecord (group_size 1), shuffle, 16 reading threads"

    def load(self) -> None:
        import grain.python
        from array_record.python import array_record_module

        self._library: Any = grain.python
        self._format: Any = array_record_module

    def write(self) -> None:
        writer = self._format.ArrayRecordWriter(
            str(self.directory / "data.array_record"), "group_size:1,uncompressed"
        )
        for index, record in enumerate(self.data.records()):
            writer.write(np.int64(index).tobytes() + record.tobytes())
        writer.close()

    def epoch(self, number: int) -> Iterator[Batch]:
        grain = self._library
        source = grain.ArrayRecordDataSource([str(self.directory / "data.array_record")])
        options = grain.ReadOptions(num_threads=16, prefetch_buffer_size=4 * BATCH)
        collate = _grain_ragged if self.data.ragged else _grain_fixed
        made = grain.MapDataset.source(source).seed(number).shuffle()
        return iter(made.to_iter_dataset(options).batch(BATCH, batch_fn=collate))


def _grain_ragged(records: Any) -> Batch:
    labels = torch.tensor([int(np.frombuffer(raw, np.int64, 1)[0]) for raw in records])
    return [sample_of(memoryview(raw)[8:]) for raw in records], labels


def _grain_fixed(records: Any) -> Batch:
    joined = torch.from_numpy(np.stack([np.frombuffer(raw, np.uint8) for raw in records]))
    return joined[:, 8:], joined[:, :8].contiguous().view(torch.int64).reshape(-1)


LIBRARY_PEERS: tuple[type[LoaderPeer], ...] = (
    Litdata,
    Webdataset,
    Streaming,
    Ffcv,
    FfcvQuasi,
    Grain,
)
