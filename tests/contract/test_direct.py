"""The engine of direct reads over the stand-in keeps the contract, and stands what a driver does.

tests/gpu runs the same contract over cuFile.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpstore.errors import DeviceTimeout, DirectError, DirectUnavailable
from hpstore.loaders.gpu.direct.cufile_queue import DirectArena, DirectEngine, DirectFile
from hpstore.testing import PAGE, pattern
from hpstore.testing.direct_contract import DirectContract
from hpstore.testing.fake_direct import FREED_BYTE, FakeCuFile
from hpstore.units import MIB


class TestFake(DirectContract):
    """CPU memory; the driver also saw nothing that a real one would crash on."""

    driver: FakeCuFile

    def make_engine(self) -> DirectEngine:
        self.driver = FakeCuFile()
        return DirectEngine(self.driver, threads=4)

    @pytest.fixture(autouse=True)
    def _nothing_was_misused(self) -> Iterator[None]:
        yield
        assert self.driver.misuse == []
        assert not self.driver.opened


class TestFakeWithoutCounters(DirectContract):
    """A library that does not count by route."""

    def make_engine(self) -> DirectEngine:
        return DirectEngine(FakeCuFile(route=""), threads=2)


def opened(
    tmp_path: Path, driver: FakeCuFile, **options: float
) -> tuple[DirectEngine, DirectFile, DirectArena]:
    """An engine of two threads with a file of 1 MiB and an arena for it."""
    engine = DirectEngine(driver, threads=2, **options)  # type: ignore[arg-type]  # max_pending
    (tmp_path / "file").write_bytes(pattern(MIB).tobytes())
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    file = engine.register_file(fd)
    os.close(fd)
    return engine, file, engine.allocate(MIB)


@pytest.mark.parametrize(("letter", "message"), [("S", "ended after"), ("E", "not supported")])
def test_a_short_or_negative_answer_is_an_error(tmp_path: Path, letter: str, message: str) -> None:
    """cuFile gives failures back as a size: the second of three reads fails, the others do not."""
    driver = FakeCuFile(f".{letter}.")
    engine, file, arena = opened(tmp_path, driver)
    with engine:
        assert engine.read(file, 0, MIB, arena, 0).result() == MIB
        with pytest.raises(DirectError, match=message):
            engine.read(file, 0, MIB, arena, 0).result()
        assert engine.read(file, 0, MIB, arena, 0).result() == MIB
        assert engine.metrics.value("gpu_direct_error_total") == 1
        assert engine.metrics.value("gpu_direct_read_total") == 2
    assert driver.misuse == []


@pytest.mark.parametrize("what", ["open", "file", "memory"])
def test_what_the_driver_refuses_is_unavailable_and_leaks_nothing(
    tmp_path: Path, what: str
) -> None:
    """DirectUnavailable, and as many descriptors as before."""
    before = len(os.listdir("/proc/self/fd"))
    driver = FakeCuFile(refuse=what)
    with pytest.raises(DirectUnavailable, match="was told"):
        opened(tmp_path, driver)
    left = len(os.listdir("/proc/self/fd")) - before
    assert left == {"open": 0, "file": 1, "memory": 1}[what]  # the test's own descriptor


def test_memory_under_a_hung_read_is_never_freed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """PROTOCOL 21: closing gives up after its limit, counts and logs; the late bytes harm none."""
    driver = FakeCuFile("H")
    engine, file, arena = opened(tmp_path, driver, close_seconds=0.1)
    tensor = arena.tensor
    future = engine.read(file, 0, MIB, arena, 0)
    driver.hanging.wait()
    with caplog.at_level(logging.WARNING):
        engine.close()
    assert "never freed" in caplog.text
    assert engine.metrics.value("gpu_direct_abandoned_total") == 2  # the file and the arena
    driver.release.set()
    assert future.result() == MIB
    assert tensor.numpy().tobytes() == pattern(MIB).tobytes()
    assert driver.misuse == []


def test_closing_waits_for_reads_under_way(tmp_path: Path) -> None:
    """An arena is freed after its read, not under it."""
    driver = FakeCuFile("H")
    engine, file, arena = opened(tmp_path, driver)
    tensor = arena.tensor
    future = engine.read(file, 0, MIB, arena, 0)
    driver.hanging.wait()
    future.add_done_callback(lambda _: None)
    driver.release.set()
    engine.close()
    assert future.result() == MIB
    assert driver.misuse == []
    assert (tensor == FREED_BYTE).all()


def test_a_cancelled_read_that_runs_keeps_its_memory(tmp_path: Path) -> None:
    """STYLE: cancelling a wait never returns a buffer. One that waits is dropped."""
    driver = FakeCuFile("HH")
    engine, file, arena = opened(tmp_path, driver)
    running = [engine.read(file, PAGE * i, PAGE, arena, PAGE * i) for i in range(2)]
    waiting = engine.read(file, 2 * PAGE, PAGE, arena, 2 * PAGE)
    driver.hanging.wait()
    assert waiting.cancel()
    driver.release.set()
    engine.close()
    assert [future.result() for future in running] == [PAGE, PAGE]
    assert driver.reads == 2
    assert driver.misuse == []


def test_reads_that_wait_have_a_limit(tmp_path: Path) -> None:
    """The fifth read beside four is refused in its future; nothing of it is left."""
    driver = FakeCuFile("HH")
    engine, file, arena = opened(tmp_path, driver, max_pending=4)
    with engine:
        four = [engine.read(file, PAGE * i, PAGE, arena, PAGE * i) for i in range(4)]
        with pytest.raises(DeviceTimeout, match="4 calls already wait"):
            engine.read(file, 0, PAGE, arena, 4 * PAGE).result()
        driver.release.set()
        assert [future.result() for future in four] == [PAGE] * 4
    assert driver.misuse == []


def test_a_forked_child_is_refused_and_frees_nothing(tmp_path: Path) -> None:
    """PROTOCOL 22: neither CUDA nor cuFile lives through a fork; the parent goes on."""
    driver = FakeCuFile()
    engine, file, arena = opened(tmp_path, driver)
    child = os.fork()
    if not child:
        code = 1
        try:
            try:
                engine.read(file, 0, MIB, arena, 0)
            except DirectUnavailable as error:
                code = 0 if "fork" in str(error) else 2
            engine.close()
            arena.close()
            if (arena.tensor.numpy() == FREED_BYTE).any():  # torch has threads, and hangs here
                code = 3
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with engine:
        assert engine.read(file, 0, MIB, arena, 0).result() == MIB
    assert driver.misuse == []


def test_a_file_that_is_being_recycled_is_refused(tmp_path: Path) -> None:
    """PROTOCOL 11: an exclusive lock means that its blocks are about to be another object's."""
    import fcntl

    engine, _, _ = opened(tmp_path, FakeCuFile())
    with engine, (tmp_path / "other").open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(DirectUnavailable, match="cannot be opened for direct reads"):
            engine.register_file(other.fileno())
