"""The write pipeline: what it does at once, what it waits for, what it gives back."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path
from typing import Any, TypeVar

import pytest

from hpstore.codec import ErasureCode
from hpstore.config import Settings
from hpstore.devices.base import Device
from hpstore.devices.wrappers import DeviceWrapper
from hpstore.format.geometry import Geometry
from hpstore.format.keys import Kind
from hpstore.objects.read.read_plan import run_bytes
from hpstore.objects.write.column_writer import ColumnSet, ColumnWriter
from hpstore.objects.write.put_plan import PutContent, make_header, plan_columns
from hpstore.objects.write.stripe_writer import BATCHES_IN_FLIGHT
from hpstore.testing import in_threads, pattern
from hpstore.testing.memory_pool import Harness
from hpstore.units import KIB, MIB

T = TypeVar("T")
UNIT, DATA = 64 * KIB, 2
MEMORY = 16 * MIB
RUN = run_bytes(DATA + 1, MEMORY) // UNIT * UNIT  # what a batch writes to one device
BODY = pattern(4 * BATCHES_IN_FLIGHT * DATA * RUN)
SOON = 3.0  # seconds; what waits for longer waits for something else


class Watched(DeviceWrapper):
    """Calls `before(number)` before it writes its run of the number-th batch."""

    def __init__(self, inner: Device, before: Callable[[int], None]) -> None:
        super().__init__(inner)
        self._before, self.runs = before, 0

    def around(self, operation: str, nbytes: int, call: Callable[[], T]) -> T:
        if operation == "write" and nbytes == RUN:
            self.runs += 1
            self._before(self.runs)
        return call()


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    """2+1 on three memory devices."""
    return Harness(
        tmp_path,
        data=DATA,
        parity=1,
        devices=3,
        unit_bytes=UNIT,
        settings=Settings(memory_bytes=MEMORY),
    )


def test_data_are_written_while_their_parity_is_computed(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The encoder of the first batch waits until data have reached the devices."""
    written, in_time = threading.Event(), list[bool]()
    encoder = ErasureCode.encoder

    def slow(self: ErasureCode, data: int, parity: int) -> Callable[..., None]:
        encode = encoder(self, data, parity)

        def run(*arguments: Any) -> None:
            in_time.append(written.wait(SOON))
            encode(*arguments)

        return run

    monkeypatch.setattr(ErasureCode, "encoder", slow)
    with harness.open(lambda _, d: Watched(d, lambda _: written.set()), threads=True) as pool:
        pool.put("x", BODY)
        assert pool.get("x") == BODY.tobytes()
    assert in_time
    assert all(in_time)


def test_a_batch_that_is_through_makes_room_while_an_older_one_waits(harness: Harness) -> None:
    """One write of the first batch hangs until more batches than may be on their way have come."""
    enough, in_time = threading.Event(), list[bool]()

    def hangs(number: int) -> None:
        if number == 1:
            in_time.append(enough.wait(SOON))

    def counts(number: int) -> None:
        if number > BATCHES_IN_FLIGHT + 2:
            enough.set()

    before = dict(zip(harness.urls, (hangs, counts, counts), strict=True))
    with harness.open(lambda url, device: Watched(device, before[url]), threads=True) as pool:
        info = pool.put("x", BODY)
        assert pool.get("x") == BODY.tobytes()
    assert in_time == [True]
    assert info.spare_columns == 1


def test_a_batch_that_cannot_be_encoded_fails_the_put_and_gives_its_memory_back(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it is visible, and the next put has the whole budget."""

    def broken(self: ErasureCode, data: int, parity: int) -> Callable[..., None]:
        def run(*_: Any) -> None:
            raise RuntimeError("no encoder today")

        return run

    with harness.open(threads=True) as pool:
        with monkeypatch.context() as patch:
            patch.setattr(ErasureCode, "encoder", broken)
            with pytest.raises(RuntimeError, match="no encoder today"):
                pool.put("x", BODY)
        deadline = time.monotonic() + SOON
        while pool._store.buffers.budget.used_bytes and time.monotonic() < deadline:
            time.sleep(0.01)
        assert pool._store.buffers.budget.used_bytes == 0
        assert not pool.exists("x")
        assert harness.columns("x") == []
        pool.put("x", BODY)
        assert pool.get("x") == BODY.tobytes()


def test_all_calls_that_may_use_a_file_are_known_however_many_threads_start_them(
    harness: Harness,
) -> None:
    """abort() closes a column's file when the last of them has answered: none is forgotten."""
    gate, threads, each = threading.Event(), 4, 30

    def gated(_: ColumnWriter) -> Callable[[], None]:
        return lambda: void(gate.wait(SOON))

    usual = sys.getswitchinterval()
    with harness.open(threads=True) as pool:
        columns = _columns(pool._store.pinned())
        try:
            sys.setswitchinterval(1e-6)
            started = in_threads(threads, lambda _: [columns.submit(gated) for _ in range(each)])
        finally:
            sys.setswitchinterval(usual)
        futures = [f for group in started for found in group for f in found.values()]
        known = {id(f) for column in columns.columns.values() for f in column.flying}
        gate.set()
        wait(futures)
        assert known == {id(f) for f in futures}


def void(_: object) -> None:
    """For calls whose answer nobody wants."""


def _columns(store: Any) -> ColumnSet:
    """The columns of a put that is about to begin. Any: the pool's own store."""
    content = PutContent(
        key="x", version=store.new_version([]), kind=Kind.COLUMN, created_ms=0, metadata={}
    )
    geometry, devices = plan_columns(store, "x", len(BODY), exclude=set(), kind=Kind.COLUMN)
    assert isinstance(geometry, Geometry)
    headers = {d: make_header(store, content, geometry, devices, c) for c, d in enumerate(devices)}
    return ColumnSet(store, headers, floor=2, generation=store.view.record.generation)
