"""Data units written while the rest of an object is still being filled."""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from hpstore.buffers import aligned_array
from hpstore.checkpoint import Checkpointer, copying, stager
from hpstore.checkpoint.saving import SaveJob
from hpstore.codec.galois import Bytes
from hpstore.config import Settings
from hpstore.devices.base import Device
from hpstore.devices.wrappers import DeviceWrapper, FaultyDevice, SimulatedCrash
from hpstore.errors import CheckpointError
from hpstore.objects import windows
from hpstore.objects.info import ObjectInfo
from hpstore.objects.source import FillingSource
from hpstore.pool import Pool
from hpstore.testing.harness import Harness
from hpstore.units import KIB, MIB

SETTINGS = Settings(memory_bytes=16 * MIB, device_deadline_seconds=2.0, straggler_seconds=0.2)
SIZE = 6 * MIB + 12_345  # some batches of 1.25 MiB, and a rest
START = 100 * KIB  # filled last, as the small items of a checkpoint are


def make(tmp_path: Path, *, devices: int = 3) -> Harness:
    """2+1 in memory; one batch is 640 KiB a column."""
    return Harness(tmp_path, data=2, parity=1, devices=devices, settings=SETTINGS)


def written_ahead(pool: Pool) -> int:
    return int(pool.metrics.snapshot().get("put_written_ahead_bytes", 0))


class Putting:
    """A put on a thread of its own, of memory that the test fills."""

    def __init__(self, pool: Pool) -> None:
        self.content = np.random.default_rng(1).integers(0, 256, SIZE, np.uint8)
        self.memory: Bytes = aligned_array(SIZE)
        self.memory[:] = 0xEE  # what must not be written
        self.source = FillingSource(self.memory.data, START)
        self.error: Exception | None = None

        def put() -> None:
            try:
                pool.put("key", self.source)
            except Exception as error:  # noqa: BLE001 (the test's to judge)
                self.error = error

        self.thread = threading.Thread(target=put)
        self.thread.start()

    def fill(self, start: int, end: int) -> None:
        self.memory[start:end] = self.content[start:end]
        if start >= START:
            self.source.reach(end)

    def end(self) -> None:
        """All is filled."""
        self.fill(0, START)
        self.source.finish()
        self.thread.join(60)
        assert not self.thread.is_alive()


class Reached(DeviceWrapper):
    """Sets `event` at the first write of data: what is final is being written."""

    event = threading.Event()

    def around(self, operation: str, nbytes: int, call: Callable[[], object]) -> object:  # type: ignore[override]
        if operation == "write":
            self.event.set()
        return call()


@pytest.mark.parametrize("pieces", [1, 3, 40])
def test_only_what_is_final_is_written_ahead(tmp_path: Path, pieces: int) -> None:
    """Memory that is not reached yet holds other bytes: none of them is in the object."""
    with make(tmp_path).open() as pool:
        put = Putting(pool)
        ends = [START + (SIZE - START) * n // pieces for n in range(pieces + 1)]
        for start, end in itertools.pairwise(ends):
            put.fill(start, end)
        put.end()
        assert put.error is None
        assert pool.get("key") == put.content.tobytes()
        assert pool.scrub().clean


def test_data_is_on_the_devices_before_the_source_is_full(tmp_path: Path) -> None:
    """The first writes come while the last bytes are still missing."""
    harness = make(tmp_path)
    Reached.event = threading.Event()
    with harness.open(wrap=lambda _, device: Reached(device)) as pool:
        put = Putting(pool)
        put.fill(START, 4 * MIB)
        assert Reached.event.wait(60)
        put.fill(4 * MIB, SIZE)
        put.end()
        assert put.error is None
        assert written_ahead(pool) >= 1280 * KIB
        assert pool.get("key") == put.content.tobytes()
        assert pool.scrub().clean


def test_a_source_that_fails_leaves_nothing(tmp_path: Path) -> None:
    """fail() is raised by the put; no object, no file."""
    harness = make(tmp_path)
    with harness.open() as pool:
        put = Putting(pool)
        put.fill(START, 4 * MIB)
        put.source.fail(CheckpointError("no more bytes"))
        put.thread.join(60)
        assert str(put.error) == "no more bytes"
        assert not pool.exists("key")
        assert pool.scrub().clean
    assert not any("tmp/" in name for d in harness.devices.values() for name in d.files)


@pytest.mark.parametrize("plan", ["WE*", "WH", "WWE"])
def test_a_device_lost_while_data_is_written_ahead(tmp_path: Path, plan: str) -> None:
    """It fails or hangs (PROTOCOL 21): the column is given up, the object is whole without it."""
    harness = make(tmp_path, devices=4)
    faulty: list[FaultyDevice] = []

    def wrap(url: str, device: Device) -> Device:
        if url != harness.urls[1]:
            return device
        faulty.append(FaultyDevice(device))
        return faulty[0]

    with harness.open(wrap=wrap, threads=True) as pool:
        faulty[0].plan = plan
        put = Putting(pool)
        put.fill(START, SIZE)
        put.end()
        assert put.error is None
        faulty[0].plan = ""
        faulty[0].released.set()
        assert pool.get("key") == put.content.tobytes()
        pool.rebuild()
        assert pool.scrub().clean


# --- by a Checkpointer ---------------------------------------------------------------------------


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """States of this file's size are written ahead: their copies end when writing has begun, or
    has failed to."""
    monkeypatch.setattr(stager, "AHEAD_BYTES", MIB)
    monkeypatch.setattr(copying, "PIECE_BYTES", 256 * KIB)
    begun: defaultdict[object, threading.Event] = defaultdict(threading.Event)  # by source
    reached, run = FillingSource.reached, copying.Copier.run
    begin, put = SaveJob.begin, SaveJob._put

    def patched_reached(self: FillingSource, end: int) -> bool:
        found = reached(self, end)
        if found:
            begun[self].set()
        return found

    def patched_run(
        self: copying.Copier,
        pairs: Iterable[copying.Pair],
        reached: Callable[[int], None] | None = None,
    ) -> None:
        run(self, pairs, reached)
        if reached is not None:
            assert begun[reached.__self__.filling].wait(60)  # type: ignore[attr-defined]

    def patched_begin(self: SaveJob, *, fence: bool) -> None:
        try:
            begin(self, fence=fence)
        except BaseException:
            for event in list(begun.values()):
                event.set()
            raise

    def patched_put(self: SaveJob, key: str, data: object) -> ObjectInfo:
        try:
            return put(self, key, data)
        finally:
            if isinstance(data, FillingSource):
                begun[data].set()

    init = stager.Ahead.__init__

    def patched_init(self: stager.Ahead, memory: Bytes, start: int) -> None:
        init(self, memory, start)
        begun[self.filling].clear()  # known from the start, also to a begin() that fails

    monkeypatch.setattr(stager.Ahead, "__init__", patched_init)
    monkeypatch.setattr(FillingSource, "reached", patched_reached)
    monkeypatch.setattr(copying.Copier, "run", patched_run)
    monkeypatch.setattr(SaveJob, "begin", patched_begin)
    monkeypatch.setattr(SaveJob, "_put", patched_put)


def state_of(value: float) -> dict[str, torch.Tensor]:
    """6 MiB in three tensors, one small."""
    return {
        "w": torch.full((3 * MIB // 4,), float(value)),
        "step": torch.tensor(float(value)),
        "m": torch.full((3 * MIB // 4,), -float(value)),
    }


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in b)


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    with make(tmp_path).open() as opened:
        yield opened


def test_saves_written_ahead_come_back(ahead: None, pool: Pool) -> None:
    """Three saves in one arena, each with its own values."""
    with Checkpointer(pool, "run", rng=False) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, state_of(step)).result()
        assert written_ahead(pool) > 0
    with Checkpointer(pool, "run", rng=False) as ckpt:
        for step in (1, 2, 3):
            target = state_of(0)
            assert ckpt.restore(target, step) == step
            assert same(target, state_of(step))
            assert ckpt.verify(step).ok


def test_unchanged_items_are_referenced_though_writing_began(ahead: None, pool: Pool) -> None:
    """One item stands still for the first time: what was begun is dropped, nothing is torn. The
    next save does not begin ahead."""
    with Checkpointer(pool, "run", rng=False) as ckpt:
        ckpt.save(1, state_of(1)).result()
        changed = {**state_of(2), "w": state_of(1)["w"]}
        report = ckpt.save(2, changed).result()
        assert report.referenced_bytes == 3 * MIB
        before = written_ahead(pool)
        assert ckpt.save(3, changed).result().referenced_bytes == 6 * MIB
        assert written_ahead(pool) == before
        target = state_of(0)
        assert ckpt.restore(target, 2) == 2
        assert same(target, changed)
        assert ckpt.verify(2).ok
        assert ckpt.collect_garbage() == 0


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_copy_that_fails_fails_the_save_alone(
    ahead: None, pool: Pool, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """The third piece cannot be copied: save() raises it, the step before is current, and the
    next save works."""
    with Checkpointer(pool, "run", rng=False) as ckpt:
        ckpt.save(1, state_of(1)).result()
        real, count = np.copyto, itertools.count()

        def copyto(to: Bytes, piece: Bytes) -> None:
            if next(count) == 12:
                raise error("no copy")
            real(to, piece)

        with monkeypatch.context() as patched:
            patched.setattr(np, "copyto", copyto)
            with pytest.raises(error, match="no copy"):
                ckpt.save(2, state_of(2))
        assert ckpt.steps() == [1]
        ckpt.save(3, state_of(3)).result()
        assert ckpt.steps() == [1, 3]
        assert ckpt.collect_garbage() == 0
        target = state_of(0)
        assert ckpt.restore(target) == 3
        assert same(target, state_of(3))


def test_an_error_of_the_put_is_the_saves(ahead: None, tmp_path: Path) -> None:
    """All devices are gone when the writing begins: save() returns, result() raises."""
    harness = make(tmp_path)
    with harness.open() as pool, Checkpointer(pool, "run", rng=False) as ckpt:
        ckpt.save(1, state_of(1)).result()
        harness.lose(harness.urls)
        handle = ckpt.save(2, state_of(2))
        with pytest.raises(Exception, match="step 2 is not committed"):
            handle.result()
        harness.bring_back()
        assert ckpt.steps() == [1]


def test_a_commit_written_ahead_is_old_or_new_after_a_crash(
    ahead: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PROTOCOL 18, 19: the process dies before every seventh device operation of the save."""
    monkeypatch.setattr(stager, "AHEAD_BYTES", 0)
    monkeypatch.setattr(windows, "WINDOW_COLUMN_BYTES", 64 * KIB)  # small batches: few bytes

    def small(value: float) -> dict[str, torch.Tensor]:
        return {"w": torch.full((100_000,), float(value))}

    for crash_at in itertools.count(step=7):
        directory = tmp_path / str(crash_at)
        directory.mkdir()
        harness = make(directory)
        with harness.open() as pool, Checkpointer(pool, "run", rng=False) as ckpt:
            ckpt.save(1, small(1)).result()
        pool, _ = harness.open_crashing(crash_at)
        try:
            ckpt = Checkpointer(pool, "run", rng=False)
            ckpt.save(2, small(2)).result()
            finished = True
        except SimulatedCrash:
            finished = False
        harness.restart()
        with harness.open(read_only=True) as again, Checkpointer(again, "run") as found:
            state = small(0)
            step = found.restore(state)
            assert step in ((2,) if finished else (1, 2))
            assert same(state, small(float(step or 0)))
        if finished:
            assert written_ahead(pool) > 0
            assert crash_at > 50
            return
