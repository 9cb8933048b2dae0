"""Where the samples lie: four ways to read the same ones in the same order.

The task can be learnt: every class has a smooth pattern of its own, seen through noise.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.utils.data
from rows import STORAGES

import hpstore
from hpstore.config import Settings, find_config
from hpstore.devices import Device
from hpstore.devices.opener import device_opener
from hpstore.devices.wrappers import DeviceWrapper
from hpstore.loaders import Cache, DataLoader, Dataset, DatasetWriter, Field
from hpstore.loaders.sampling.data_parallel import Coordinates
from hpstore.loaders.sampling.order import GlobalOrder
from hpstore.loaders.sampling.rank_slices import Slices
from hpstore.pool.pool import Pool

T = TypeVar("T")
NAME, CLASSES = "pictures", 10
HPSTORE, FAULTY, MEMORY, FILES = STORAGES
DATA, PARITY = 4, 2
SLOW_SECONDS = 0.05  # by which every read and write of a device that is failing takes longer
SLOW_DEVICE, LOST_DEVICE = 0, 1
CACHE_SHARE = 2  # the data are so many times the cache: every epoch reads from the devices


class Slow(DeviceWrapper):
    """A device that answers late."""

    def around(self, operation: str, nbytes: int, call: Callable[[], T]) -> T:
        if operation in ("read", "write") and nbytes:
            time.sleep(SLOW_SECONDS)
        return call()


def generated(samples: int, side: int, seed: int) -> dict[str, np.ndarray]:
    """Pictures uint8 (samples, 3, side, side), labels and numbers int64 (samples,)."""
    rng = np.random.default_rng(seed)
    coarse = rng.standard_normal((CLASSES, 3, 4, 4))
    patterns = coarse.repeat(side // 4, axis=2).repeat(side // 4, axis=3)
    labels = rng.integers(0, CLASSES, samples)
    strength = rng.uniform(30.0, 60.0, (samples, 1, 1, 1))
    noise = rng.standard_normal((samples, 3, side, side))
    values = 128 + strength * patterns[labels] + 40 * noise
    return {
        "image": values.clip(0, 255).astype(np.uint8),
        "label": labels,
        "id": np.arange(samples),
    }


def prepare(directory: Path, samples: int, side: int, seed: int) -> None:
    """Write the samples for all storages below a directory; the faulty pool loses its device."""
    arrays = generated(samples, side, seed)
    np.savez(directory / "samples.npz", **arrays)
    for kind in (HPSTORE, FAULTY):
        root = directory / kind
        root.mkdir()
        places = [root / f"d{number}" for number in range(DATA + PARITY)]
        settings = Settings(run_directory=str(root / "run"))
        fields = {
            "image": Field("uint8", (3, side, side)),
            "label": Field("int64"),
            "id": Field("int64"),
        }
        with (
            hpstore.create(
                places, data=DATA, parity=PARITY, config=root / "pool.toml", settings=settings
            ) as pool,
            DatasetWriter(pool, NAME, fields, shuffle=False) as writer,
        ):
            writer.write_batch(arrays)
    shutil.rmtree(directory / FAULTY / f"d{LOST_DEVICE}")
    (directory / FILES).mkdir()
    for number, (image, label) in enumerate(zip(arrays["image"], arrays["label"], strict=True)):
        np.save(directory / FILES / f"{number:07d}-{label}.npy", image)


def open_pool(directory: Path, kind: str) -> Pool:
    """The pool of checkpoints, and of samples where they come from one."""
    path = directory / (FAULTY if kind == FAULTY else HPSTORE) / "pool.toml"
    if kind != FAULTY:
        return hpstore.open(path)
    config = find_config(path)
    plain = device_opener(config.settings)
    slow = config.devices[SLOW_DEVICE]

    def opener(url: str) -> Device:
        return Slow(plain(url)) if url == slow else plain(url)

    return Pool(config, opener=opener)


class Batches:
    """Batch sampler: the batches of hpstore's own order and shares, for other loaders."""

    def __init__(self, samples: int, batch_size: int, place: Coordinates, seed: int) -> None:
        self._order = GlobalOrder(samples, seed)
        self._slices = Slices(
            length=samples,
            batch_size=batch_size,
            world_size=place.world_size,
            rank=place.rank,
            drop_last=True,
        )
        self._epoch = 0

    def __len__(self) -> int:
        return self._slices.own_steps()

    def __iter__(self) -> Iterator[list[int]]:
        epoch, self._epoch = self._epoch, self._epoch + 1
        for number in range(len(self)):
            step = self._slices.step(0, number)
            yield self._order.indices(epoch, step.start, step.stop).tolist()


class InMemory:
    """Batches of tensors that are there already: nothing can be faster."""

    def __init__(self, path: Path, batches: Batches) -> None:
        with np.load(path) as found:
            self._tensors = {name: torch.from_numpy(found[name]) for name in found.files}
        self._batches = batches

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for indices in self._batches:
            yield {name: tensor[indices] for name, tensor in self._tensors.items()}


class Files(torch.utils.data.Dataset[dict[str, Any]]):
    """A file a sample."""

    def __init__(self, directory: Path) -> None:
        self._paths = sorted(directory.glob("*.npy"))

    def __getitem__(self, number: int) -> dict[str, Any]:
        path = self._paths[number]
        image = torch.from_numpy(np.load(path))
        return {"image": image, "label": int(path.stem.rpartition("-")[2]), "id": number}


class Source:
    """The loader of one rank, and what it counted."""

    def __init__(
        self,
        kind: str,
        directory: Path,
        pool: Pool,
        place: Coordinates,
        *,
        batch_size: int,
        samples: int,
        seed: int,
    ) -> None:
        self.kind, self._cache, self._pool = kind, None, pool
        self.loader: Any  # one of four kinds
        batches = Batches(samples, batch_size, place, seed)
        if kind == MEMORY:
            self.loader = InMemory(directory / "samples.npz", batches)
        elif kind == FILES:
            self.loader = torch.utils.data.DataLoader(
                Files(directory / FILES),
                batch_sampler=batches,
                num_workers=1,
                persistent_workers=True,
            )  # type: ignore[arg-type]  # a batch sampler need not be a Sampler
        else:
            data = Dataset(pool, NAME)
            nbytes = samples * sum(data[0][name].nbytes for name in data.fields)
            self._cache = Cache(nbytes // CACHE_SHARE)
            self.loader = DataLoader(
                data,
                batch_size,
                shuffle=True,
                seed=seed,
                drop_last=True,
                cache=self._cache,
                rank=place.rank,
                world_size=place.world_size,
            )

    @property
    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of it; torch's own loader has no position to save."""
        return {"loader": self.loader} if isinstance(self.loader, DataLoader) else {}

    def counted(self) -> dict[str, Any]:
        """For the storage block of a results file."""
        if self._cache is None:
            return {}
        stats = self._cache.stats()
        return {
            "cache_hit_rate": stats["hit_ratio"],
            "prefetch_accuracy": stats["accuracy"] if stats.get("prefetch_bytes") else None,
            "bytes_read": int(stats.get("source_bytes", 0)),
            "degraded_reads": self._pool.metrics.value("read_degraded_total"),
        }

    def close(self) -> None:
        """Stop what reads ahead."""
        if isinstance(self.loader, DataLoader):
            self.loader.close()
        if self._cache is not None:
            self._cache.close()
