"""What a DirectDriver promises under a DirectEngine, as tests that every driver inherits.

    class TestMyDriver(DirectContract):
        def make_engine(self) -> DirectEngine: ...

Testing lies below loaders, hence no types of theirs here. Needs pytest, and a `tmp_path` on a
filesystem that the driver reads.
"""

from __future__ import annotations

import fcntl
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
import torch

from hpstore.codec.galois import Bytes
from hpstore.errors import DirectError, DirectUnavailable
from hpstore.testing import PAGE, pattern
from hpstore.units import KIB, MIB

# Any below: DirectEngine, DirectFile, DirectArena of loaders


class DirectContract(ABC):
    """Inherit, name the class Test..., fill in one method."""

    @abstractmethod
    def make_engine(self) -> Any:
        """An open DirectEngine over the driver, with at least two threads."""

    @pytest.fixture
    def engine(self) -> Iterator[Any]:
        """The engine under test, closed at the end."""
        with self.make_engine() as made:
            yield made

    def file(self, engine: Any, path: Path, data: Bytes) -> Any:
        """Those bytes as a file that the engine knows."""
        path.write_bytes(data.tobytes())
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            return engine.register_file(fd)
        finally:
            os.close(fd)

    @staticmethod
    def arrived(arena: Any, start: int, length: int) -> bytes:
        """Bytes of an arena, by the host."""
        found: torch.Tensor = arena.tensor[start : start + length].cpu()
        return found.numpy().tobytes()

    @pytest.mark.parametrize("length", [PAGE, 64 * KIB, MIB, 3 * MIB + PAGE])
    def test_a_read_lands_where_it_is_told_and_nowhere_else(
        self, engine: Any, tmp_path: Path, length: int
    ) -> None:
        """From the middle of a file into the middle of an arena; what lies around stays zero."""
        data = pattern(length + 3 * PAGE)
        file, arena = self.file(engine, tmp_path / "a", data), engine.allocate(length + 2 * PAGE)
        assert engine.read(file, 2 * PAGE, length, arena, PAGE).result() == length
        assert self.arrived(arena, PAGE, length) == data[2 * PAGE : 2 * PAGE + length].tobytes()
        assert not arena.tensor[:PAGE].any()
        assert not arena.tensor[PAGE + length :].any()

    def test_many_reads_of_many_files_at_a_time(self, engine: Any, tmp_path: Path) -> None:
        """Sixty reads of four files, in a scattered order: each lands at its own place."""
        data = [pattern(16 * 16 * KIB, seed) for seed in range(4)]
        files = [self.file(engine, tmp_path / str(i), row) for i, row in enumerate(data)]
        arena = engine.allocate(4 * 16 * 16 * KIB)
        places = [(i, j) for j in range(15) for i in range(4)]
        futures = [
            engine.read(files[i], 16 * KIB * j, 16 * KIB, arena, 16 * KIB * (15 - j + 16 * i))
            for i, j in places
        ]
        wait(futures)
        for (i, j), future in zip(places, futures, strict=True):
            assert future.result() == 16 * KIB
            found = self.arrived(arena, 16 * KIB * (15 - j + 16 * i), 16 * KIB)
            assert found == data[i][16 * KIB * j :][: 16 * KIB].tobytes()

    def test_the_file_stays_while_it_is_registered(self, engine: Any, tmp_path: Path) -> None:
        """PROTOCOL 11: the caller's descriptor closed, the name gone; reads go on, locked."""
        data = pattern(MIB)
        file, arena = self.file(engine, tmp_path / "a", data), engine.allocate(MIB)
        other = os.open(tmp_path / "a", os.O_RDONLY)
        os.unlink(tmp_path / "a")
        assert engine.read(file, 0, MIB, arena, 0).result() == MIB
        assert self.arrived(arena, 0, MIB) == data.tobytes()
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.close()
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(other)

    def test_a_file_that_ends_before_is_an_error_and_not_the_end(
        self, engine: Any, tmp_path: Path
    ) -> None:
        """Over the end and behind it: DirectError with both numbers; the next read goes well."""
        data = pattern(2 * PAGE)
        file, arena = self.file(engine, tmp_path / "a", data), engine.allocate(MIB)
        for offset in (PAGE, 4 * PAGE):
            with pytest.raises(DirectError, match=f"{2 * PAGE} bytes at {offset}"):
                engine.read(file, offset, 2 * PAGE, arena, 0).result()
        assert engine.read(file, 0, 2 * PAGE, arena, 0).result() == 2 * PAGE
        assert self.arrived(arena, 0, 2 * PAGE) == data.tobytes()

    def test_what_is_not_aligned_or_not_inside_is_refused(
        self, engine: Any, tmp_path: Path
    ) -> None:
        """Before the driver sees it: ValueError."""
        file, arena = self.file(engine, tmp_path / "a", pattern(MIB)), engine.allocate(64 * KIB)
        for offset, length, place in ((1, PAGE, 0), (0, 100, 0), (0, PAGE, 512)):
            with pytest.raises(ValueError, match="not a multiple of 4096"):
                engine.read(file, offset, length, arena, place)
        for offset, length, place in (
            (0, 0, 0),
            (-PAGE, PAGE, 0),
            (0, PAGE, -PAGE),
            (0, PAGE, 64 * KIB),
            (0, MIB, 0),
        ):
            with pytest.raises(ValueError, match="outside of an arena"):
                engine.read(file, offset, length, arena, place)
        with pytest.raises(ValueError, match="arena of 0 bytes"):
            engine.allocate(0)
        assert not arena.tensor.any()

    def test_an_arena_is_zero_and_begins_at_a_page_of_the_gpu(self, engine: Any) -> None:
        """2 MiB: registration maps such pages."""
        arena = engine.allocate(5 * PAGE)
        assert arena.tensor.data_ptr() % (2 * MIB) == 0
        assert (arena.tensor.dtype, arena.tensor.shape) == (torch.uint8, (5 * PAGE,))
        assert not arena.tensor.any()

    def test_what_is_closed_is_refused(self, engine: Any, tmp_path: Path) -> None:
        """File, arena, engine: DirectUnavailable each; closing twice is nothing."""
        data = pattern(PAGE)
        file, arena = self.file(engine, tmp_path / "a", data), engine.allocate(PAGE)
        closed_file, closed_arena = self.file(engine, tmp_path / "b", data), engine.allocate(PAGE)
        for item in (closed_file, closed_arena, closed_file, closed_arena):
            item.close()
        for one, other in ((closed_file, arena), (file, closed_arena)):
            with pytest.raises(DirectUnavailable, match="closed"):
                engine.read(one, 0, PAGE, other, 0)
        assert engine.read(file, 0, PAGE, arena, 0).result() == PAGE
        engine.close()
        with pytest.raises(DirectUnavailable, match="engine is closed"):
            engine.read(file, 0, PAGE, arena, 0)
        with pytest.raises(DirectUnavailable, match="engine is closed"):
            engine.allocate(PAGE)
        engine.close()

    def test_reads_are_counted(self, engine: Any, tmp_path: Path) -> None:
        """By the engine always; by the driver where it counts at all."""
        file, arena = self.file(engine, tmp_path / "a", pattern(MIB)), engine.allocate(MIB)
        before = engine.counters()
        for _ in range(5):
            engine.read(file, 0, MIB, arena, 0).result()
        assert engine.metrics.value("gpu_direct_read_total") == 5
        assert engine.metrics.value("gpu_direct_read_bytes") == 5 * MIB
        after = engine.counters()
        if before is not None:
            count = after.direct + after.posix - before.direct - before.posix
            assert count >= 5
            assert after.errors == before.errors

    def test_threads_share_the_engine(self, engine: Any, tmp_path: Path) -> None:
        """Four threads register, read, check and close at the same time."""
        wrong: list[int] = []

        def work(number: int) -> None:
            data = pattern(128 * KIB, number)
            for turn in range(4):
                with (
                    self.file(engine, tmp_path / f"{number}-{turn}", data) as file,
                    engine.allocate(128 * KIB) as arena,
                ):
                    engine.read(file, 0, 128 * KIB, arena, 0).result()
                    if self.arrived(arena, 0, 128 * KIB) != data.tobytes():
                        wrong.append(number)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert engine.metrics.value("gpu_direct_read_total") == 16
