"""Rebuilding in small runs: readers do not queue up behind it, and it does not wait for itself."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from hpstore.devices.base import Device
from hpstore.devices.wrappers import DeviceWrapper, FaultyDevice, SimulatedCrash
from hpstore.errors import HpstoreError
from hpstore.objects.read.read_plan import BACKGROUND_RUN_BYTES, background_run_bytes, run_bytes
from hpstore.testing.memory_pool import Harness
from hpstore.units import MIB
from tests.fault.common import payload
from tests.thorough import crash_points

T = TypeVar("T")
BODY = payload("k", 12 * MIB)


def one_lost(directory: Path) -> tuple[Harness, str, str]:
    """3+2 over six devices with an object: one of its devices, which is lost, and the spare one."""
    harness = Harness(directory, data=3, parity=2, devices=6)
    with harness.open() as pool:
        pool.put("k", BODY)
    holders = [url for url, _ in harness.columns("k")]
    harness.lose(holders[:1])
    return harness, holders[0], next(url for url in harness.urls if url not in holders)


class Noted(DeviceWrapper):
    """Keeps (operation, bytes) of all operations, in a list that several share."""

    def __init__(self, inner: Device, into: list[tuple[str, str, int]]) -> None:
        super().__init__(inner)
        self._into = into

    def around(self, operation: str, nbytes: int, call: Callable[[], T]) -> T:
        self._into.append((self.url, operation, nbytes))
        return call()


@pytest.mark.parametrize(("data", "devices"), [(3, 6), (4, 6)])
def test_no_operation_of_a_rebuild_is_larger_than_a_run(
    tmp_path: Path, data: int, devices: int
) -> None:
    """With a spare device, where columns are made again, and without, where objects are relaid."""
    harness = Harness(tmp_path, data=data, parity=2, devices=devices)
    noted: list[tuple[str, str, int]] = []
    with harness.open(lambda _, device: Noted(device, noted)) as pool:
        pool.put("k", BODY)
        assert max(n for _, kind, n in noted if kind == "write") > BACKGROUND_RUN_BYTES
        lost, _ = harness.columns("k")[0]
        harness.lose([lost])
        pool.evict(lost)
        noted.clear()
        report = pool.rebuild()
        assert report.rebuilt + report.relaid == 1
        moved = [n for _, kind, n in noted if kind in ("read", "write")]
        assert max(moved) == BACKGROUND_RUN_BYTES
        assert pool.get("k") == BODY
        assert pool.scrub().clean


def test_runs_are_no_larger_than_memory_allows() -> None:
    assert background_run_bytes(6, 1 << 40) == BACKGROUND_RUN_BYTES
    assert background_run_bytes(6, 1) == run_bytes(6, 1) < BACKGROUND_RUN_BYTES


def test_the_next_run_is_read_while_one_is_written(tmp_path: Path) -> None:
    """A write of the second run that waits for reads of the third is not waited for in vain."""
    harness, lost, spare = one_lost(tmp_path)
    offsets: list[int] = []
    ahead = threading.Event()

    class Waiting(DeviceWrapper):
        """The spare: its second run is written when the third has been read from others."""

        writes = 0

        def around(self, operation: str, nbytes: int, call: Callable[[], T]) -> T:
            if nbytes == BACKGROUND_RUN_BYTES and operation == "write" and self.url == spare:
                Waiting.writes += 1
                assert Waiting.writes != 2 or ahead.wait(20)
            if nbytes == BACKGROUND_RUN_BYTES and operation == "read":
                offsets.append(nbytes)
                if len(offsets) >= 3 * 3:
                    ahead.set()
            return call()

    with harness.open(lambda _, device: Waiting(device)) as pool:
        pool.evict(lost)
        offsets.clear()
        assert pool.rebuild().rebuilt == 1
        assert Waiting.writes > 2
        assert pool.scrub().clean


def test_memory_of_a_rebuild_that_fails_is_given_back(tmp_path: Path) -> None:
    """The run that was read ahead, too. The next rebuild, on a device that takes it, succeeds."""
    harness, lost, spare = one_lost(tmp_path)

    def wrap(url: str, device: Device) -> Device:
        return FaultyDevice(device, "WWWE*") if url == spare else device

    with harness.open(wrap) as pool:
        pool.evict(lost)
        before = pool._store.buffers.budget.used_bytes
        with contextlib.suppress(HpstoreError):
            pool.rebuild()
        assert pool._store.buffers.budget.used_bytes == before
    with harness.open() as pool:
        pool.rebuild()
        assert pool.get("k") == BODY
        assert pool.scrub().clean


def test_a_rebuild_of_many_runs_that_dies_anywhere_leaves_the_object_whole_rule_10(
    tmp_path: Path,
) -> None:
    """PROTOCOL 10: dead before operation 0, 11, 22 ..., without power; one run is read ahead."""
    died = 0
    for crash_at in crash_points():
        directory = tmp_path / str(crash_at)
        directory.mkdir()
        harness, lost, _ = one_lost(directory)
        with harness.open() as pool:
            pool.evict(lost)
        pool, _ = harness.open_crashing(crash_at)
        try:
            finished = pool.rebuild().rebuilt == 1
        except SimulatedCrash:
            finished = False
        harness.power_cut()
        with harness.open() as after:
            assert after.get("k") == BODY
            assert after.rebuild().whole
            assert after.stat("k").losses_tolerated == 2
            assert after.scrub().clean
        if finished:
            break
        died += 1
    assert died > 5
