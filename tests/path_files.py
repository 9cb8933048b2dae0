"""The files of the package that a call runs through: of a put, a get, a save, a restore, a batch.

python -m tests.path_files    # how many, and which
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType

import numpy as np
import torch

import hpstore
from hpstore.checkpoint import Checkpointer
from hpstore.loaders import DataLoader, Dataset, DatasetWriter, Field
from tests.house_graph import ROOT

PACKAGE = f"{ROOT}/hpstore/"
OBJECT_BYTES = 1 << 20
ROWS, BATCH_ROWS = 2048, 32
_OF_THE_MONITOR = {"health/detect/media.py"}  # it asks each device once, on the device's lane
Paths = dict[str, set[str]]  # files below hpstore/, by what runs through them


class Recorder:
    """Notes the files of all functions that are called meanwhile, by this thread and by those that
    begin after it. Without the health monitor's: it looks at what was done once a second."""

    def __init__(self) -> None:
        self.paths: Paths = {}
        self._seen: set[str] | None = None
        self._only: int | None = None  # the thread that counts; None for all

    def __enter__(self) -> Recorder:
        threading.setprofile(self._begun)
        sys.setprofile(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _begun(self, *_: object) -> None:
        """In a new thread."""
        monitor = threading.current_thread().name == "hpstore-health"
        sys.setprofile(None if monitor else self._called)

    def _called(self, frame: FrameType, event: str, _: object) -> None:
        seen, code = self._seen, frame.f_code
        if seen is None or event != "call" or code.co_name == "<module>":
            return
        if self._only in (None, threading.get_ident()):
            seen.add(code.co_filename)

    @contextmanager
    def of(self, what: str, *, alone: bool = False) -> Iterator[None]:
        """Note what runs in this block; `alone`: by this thread, while others work ahead."""
        self._only = threading.get_ident() if alone else None
        self._seen = found = set[str]()
        try:
            yield
        finally:
            self._seen = None
        ours = (name for name in found if name.startswith(PACKAGE))
        self.paths[what] = {name.removeprefix(PACKAGE) for name in ours} - _OF_THE_MONITOR


def paths_in(directory: Path) -> Paths:
    """Every path, in a new pool of directories: of the second call of its kind, when what is made
    once is there; of the first batch of an epoch, and of one from memory."""
    devices = [directory / f"disk{number}" for number in range(6)]
    for device in devices:
        device.mkdir()
    with Recorder() as recorder:
        config = directory / "pool.toml"
        with hpstore.create(devices, scheme="4+2", config=config) as pool:
            _objects(pool, recorder)
            _checkpoints(pool, recorder)
            _batches(pool, recorder)
    return recorder.paths


def _objects(pool: hpstore.Pool, recorder: Recorder) -> None:
    data = os.urandom(OBJECT_BYTES)
    pool.put("first", data)
    with recorder.of("put"):
        pool.put("object", data)
    pool.get("first")
    with recorder.of("get"):
        pool.get("object")


def _checkpoints(pool: hpstore.Pool, recorder: Recorder) -> None:
    model = torch.nn.Linear(1024, 1024)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(1, 1024)).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer}
    with Checkpointer(pool, "run") as checkpointer:
        checkpointer.save(1, state).result()
        checkpointer.wait()
        with recorder.of("save"):
            checkpointer.save(2, state).result()
            checkpointer.wait()
        with recorder.of("restore"):
            checkpointer.restore(state)


def _batches(pool: hpstore.Pool, recorder: Recorder) -> None:
    with DatasetWriter(
        pool, "train", {"x": Field("float32", (64,)), "y": Field("int64")}
    ) as writer:
        rows = np.arange(ROWS)
        writer.write_batch({"x": np.zeros((ROWS, 64), np.float32), "y": rows})
    made = DataLoader(Dataset(pool, "train"), batch_size=BATCH_ROWS, shuffle=True)
    with closing(made) as loader:
        with recorder.of("cold batch"):
            batches = iter(loader)
            next(batches)
        for _ in batches:
            pass
        batches = iter(loader)
        next(batches)
        until = time.monotonic() + 10
        while not batches.ready and time.monotonic() < until:
            os.sched_yield()
        with recorder.of("warm batch", alone=True):
            next(batches)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        for what, files in paths_in(Path(made)).items():
            print(f"{what}: {len(files)} files")
            print("".join(f"  {name}\n" for name in sorted(files)), end="")
