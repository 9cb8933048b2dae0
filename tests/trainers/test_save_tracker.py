"""SaveTracker: numbers of saves in TensorBoard, in Weights & Biases offline, in any writer."""

from __future__ import annotations

import importlib
import json
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hpstore
from hpstore.checkpoint import Checkpointer, SaveHandle
from hpstore.errors import CheckpointError
from hpstore.trainers import SaveTracker
from hpstore.units import KIB
from tests.fault.common import poll

NAMES = {
    "bytes",
    "durable_seconds",
    "failed",
    "losses_tolerated",
    "referenced_bytes",
    "skipped",
    "stall_seconds",
}


class Scalars:
    """What TensorBoard's writer is called with."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, float]] = {}

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.rows.setdefault(step, {})[name.removeprefix("checkpoint/")] = value


class Rows:
    """What has log() and nothing else."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def log(self, row: dict[str, float]) -> None:
        self.rows.append(row)


def saves(pool: hpstore.Pool, tracker: SaveTracker, *steps: int) -> dict[int, SaveHandle]:
    """Tracked, each waited for."""
    handles = {}
    with Checkpointer(pool, "run") as ckpt:
        for step in steps:
            handles[step] = ckpt.save(step, {"w": torch.full((99,), float(step))})
            handles[step].result()
            tracker(handles[step])
    return handles


def test_each_save_is_logged_with_its_report(pool: hpstore.Pool) -> None:
    """The numbers are those of the handles."""
    writer = Scalars()
    handles = saves(pool, SaveTracker(writer), 10, 20)
    assert list(writer.rows) == [10, 20]
    for step, row in writer.rows.items():
        report = handles[step].result()
        assert set(row) == NAMES
        assert row["stall_seconds"] == report.staged_seconds > 0
        assert row["durable_seconds"] == report.durable_seconds
        assert (row["bytes"], row["losses_tolerated"]) == (report.bytes, 2)
        assert (row["failed"], row["skipped"]) == (0, 0)


def test_a_save_under_way_is_not_waited_for_and_not_lost(pool: hpstore.Pool) -> None:
    """The call returns; close() has it, and logs it once."""
    writer, go = Scalars(), threading.Event()
    tracker = SaveTracker(writer)
    with Checkpointer(pool, "run") as ckpt:
        put = pool.put

        def held(key: str, *args: Any, **options: Any) -> Any:
            assert go.wait(60)
            return put(key, *args, **options)

        pool.put = held  # type: ignore[method-assign]
        tracker(ckpt.save(1, {"w": torch.zeros(9)}))
        assert writer.rows == {}
        tracker.close(timeout=0.0)
        assert writer.rows == {}
        go.set()
        tracker.close()
        tracker.close()
    assert list(writer.rows) == [1]


def test_a_save_that_failed_is_shown_and_still_raised(
    pool: hpstore.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To look at it takes nothing from the trainer."""
    writer = Scalars()
    tracker = SaveTracker(writer)

    def broken(*_: Any, **__: Any) -> Any:
        raise CheckpointError("no device takes it")

    with Checkpointer(pool, "run") as ckpt:
        ckpt.save(1, {"w": torch.zeros(9)}).result()
        monkeypatch.setattr(pool, "put", broken)
        tracker(ckpt.save(2, {"w": torch.zeros(9)}))
        tracker.close()
        assert set(writer.rows[2]) == {"failed", "skipped", "stall_seconds"}
        assert writer.rows[2]["failed"] == 1.0
        with pytest.raises(CheckpointError, match="no device takes it"):
            ckpt.wait()


def test_a_skipped_save_is_no_failure(pool: hpstore.Pool) -> None:
    writer = Rows()
    tracker = SaveTracker(writer, prefix="saves")
    tracker(SaveHandle.of_skipped(3))
    assert writer.rows == [
        {"saves/step": 3, "saves/stall_seconds": 0.0, "saves/failed": 0.0, "saves/skipped": 1.0}
    ]


def test_a_writer_that_fails_ends_no_training(
    pool: hpstore.Pool, caplog: pytest.LogCaptureFixture
) -> None:
    """Counted, said once; the saves are committed."""

    class Full(Rows):
        def log(self, row: dict[str, float]) -> None:
            raise OSError("disk full")

    tracker = SaveTracker(Full())
    saves(pool, tracker, 1, 2)
    assert tracker.errors == 2
    assert caplog.text.count("was not tracked: disk full") == 1
    with Checkpointer(pool, "run") as ckpt:
        assert ckpt.steps() == [1, 2]


def test_what_is_no_writer_is_refused() -> None:
    with pytest.raises(TypeError, match="object is no writer"):
        SaveTracker(object())


def test_with_tensorboard(pool: hpstore.Pool, tmp_path: Path) -> None:
    """Its own reader finds the numbers in its files."""
    pytest.importorskip("tensorboard")
    found = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path / "tb")) as writer:
        tracker = SaveTracker(writer)
        handles = saves(pool, tracker, 10, 20)
        tracker.close()
    events = found.EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {f"checkpoint/{name}" for name in NAMES}
    assert [(event.step, event.value) for event in events.Scalars("checkpoint/bytes")] == [
        (step, handle.result().bytes) for step, handle in handles.items()
    ]


def test_with_weights_and_biases_offline(
    pool: hpstore.Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the rows of the trainer, whose own values at its own steps are all there."""
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = wandb.init(mode="offline", dir=str(tmp_path), project="p")
    try:
        tracker = SaveTracker(run)
        handles = {}
        with Checkpointer(pool, "run") as ckpt:
            for step in (10, 20):
                run.log({"loss": 1.0 / step}, step=step)
                handles[step] = ckpt.save(step, {"w": torch.zeros(step)})
                handles[step].result()
                tracker(handles[step])
                run.log({"rate": 0.5}, step=step)
        tracker.close()
    finally:
        run.finish()
    assert tracker.errors == 0
    poll(60, lambda: len(history(tmp_path)) == 2)  # its own process ends the file, after finish()
    rows = history(tmp_path)
    assert [row["_step"] for row in rows] == [10, 20]
    for row in rows:
        step = row["checkpoint/step"]
        assert row["_step"] == step
        assert row["checkpoint/bytes"] == handles[step].result().bytes
        assert (row["loss"], row["rate"]) == (1.0 / step, 0.5)


def history(directory: Path) -> list[dict[str, Any]]:
    """The rows of the one run that was logged there."""
    from wandb.proto import wandb_internal_pb2  # type: ignore[import-not-found,unused-ignore]

    (path,) = directory.glob("wandb/offline-run-*/*.wandb")
    rows = []
    for data in records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            names = [item.key or "/".join(item.nested_key) for item in items]
            rows.append({n: json.loads(i.value_json) for n, i in zip(names, items, strict=True)})
    return rows


def records(data: bytes) -> Iterator[bytes]:
    """Of a file of the package, which is a log of LevelDB behind 7 bytes: blocks of 32 KiB with
    pieces, each a checksum (4 bytes), its length (2) and its kind (1: whole, 2 to 4: parts)."""
    block, at, found = 32 * KIB, 7, b""
    while at + 7 <= len(data):
        if block - at % block < 7:
            at += block - at % block
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        found += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield found
            found = b""
