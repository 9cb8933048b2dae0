"""Files written ahead for puts and first saves to overwrite (PROTOCOL 11)."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import hpstore
from hpstore.checkpoint import Checkpointer, SaveOptions
from hpstore.checkpoint.save import prewrite_saves
from hpstore.checkpoint.save.prewrite_saves import SpaceMaker
from hpstore.config import Settings
from hpstore.devices.base import Device, Usage, recycled_path
from hpstore.devices.local import LocalDevice
from hpstore.devices.opener import device_opener
from hpstore.devices.wrappers import FaultyDevice
from hpstore.testing import PAGE, pattern
from hpstore.units import GIB, MIB

SIZE = 9 * MIB  # 4.5 MiB a column of 2+1
CHUNKS = 5  # of a file
WIDTH = 3


def settings(path: Path, **changes: object) -> Settings:
    return Settings(run_directory=str(path / "run"), **changes)  # type: ignore[arg-type]


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[hpstore.Pool]:
    """2+1 over three directories, which recycle."""
    places = [tmp_path / f"d{i}" for i in range(WIDTH)]
    config = tmp_path / "pool.toml"
    made = hpstore.create(places, data=2, parity=1, config=config, settings=settings(tmp_path))
    with made:
        yield made


def files(tmp_path: Path, directory: str) -> list[Path]:
    return sorted(tmp_path.glob(f"d?/{directory}/*"))


def counters(pool: hpstore.Pool) -> tuple[int, int]:
    """Columns that overwrote a kept file, devices that could not be prepared."""
    found = pool.metrics.snapshot()
    return int(found.get("column_recycled_total", 0)), int(
        found.get("space_prepare_error_total", 0)
    )


def test_puts_overwrite_what_was_prepared(pool: hpstore.Pool, tmp_path: Path) -> None:
    """Two copies serve two puts, the third writes anew; the bytes are those that were put."""
    assert pool.admin.prepare_space([SIZE], 2) == 2 * WIDTH
    assert pool.admin.prepare_space([SIZE], 2) == 0  # they are there
    assert sum(d.kept_bytes for d in pool.status().devices) == sum(
        f.stat().st_size for f in files(tmp_path, "recycle")
    )
    for number, recycled in ((1, WIDTH), (2, 2 * WIDTH), (3, 2 * WIDTH)):
        data = os.urandom(SIZE)
        pool.put(f"k{number}", data)
        assert counters(pool)[0] == recycled
        assert pool.get(f"k{number}") == data
    assert files(tmp_path, "recycle") == files(tmp_path, "tmp") == []


def test_a_prepared_file_is_written_whole_and_no_column(pool: hpstore.Pool, tmp_path: Path) -> None:
    """PROTOCOL 11: the header is blank, every other page was written; scans see nothing."""
    pool.admin.prepare_space([SIZE])
    for file in files(tmp_path, "recycle"):
        data = file.read_bytes()
        assert str(len(data)) == file.name.split("-")[0]
        assert data[:PAGE] == bytes(PAGE)
        assert all(any(data[at : at + PAGE]) for at in range(PAGE, len(data), PAGE))
    assert pool.list() == []
    assert pool.status().objects == 0


def test_small_objects_and_memory_devices_need_no_space(pool: hpstore.Pool) -> None:
    """Below 1 MiB a fresh file is as cheap; memory overwrites no faster."""
    assert pool.admin.prepare_space([MIB, 100]) == 0
    assert pool.admin.recycles


def test_no_more_is_kept_than_the_settings_say(tmp_path: Path) -> None:
    """recycle_bytes a device: with room for one file, one of three is written."""
    places = [tmp_path / f"d{i}" for i in range(WIDTH)]
    local = settings(tmp_path, recycle_bytes=5 * MIB)
    with hpstore.create(
        places, data=2, parity=1, config=tmp_path / "pool.toml", settings=local
    ) as pool:
        assert pool.admin.prepare_space([SIZE], 3) == WIDTH
        assert pool.admin.prepare_space([SIZE], 3) == 0


def test_the_reserve_is_left(
    pool: hpstore.Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device whose new space would pass below the reserve gets no file."""
    monkeypatch.setattr(
        LocalDevice, "usage", lambda _: Usage(total=200 * GIB, free=GIB + 8 * MIB, kept=0)
    )
    assert pool.admin.prepare_space([SIZE], 3) == WIDTH
    assert len(files(tmp_path, "recycle")) == WIDTH


def test_a_full_disk_costs_its_own_files_alone(
    pool: hpstore.Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ENOSPC on one device: counted, the others are prepared, and kept files are not freed."""
    pool.admin.prepare_space([SIZE])
    real, full = os.posix_fallocate, os.stat(tmp_path / "d1").st_ino

    def allocate(fd: int, offset: int, length: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if os.stat(path.parents[1]).st_ino == full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    assert pool.admin.prepare_space([SIZE], 2) == WIDTH - 1
    assert counters(pool)[1] == 1
    assert len(list((tmp_path / "d1/recycle").iterdir())) == 1
    assert files(tmp_path, "tmp") == []


def faulty_pool(tmp_path: Path, plans: dict[str, FaultyDevice]) -> hpstore.Pool:
    """The pool of `tmp_path` again, its devices wrapped and collected in `plans`."""
    config = hpstore.config.load_config(tmp_path / "pool.toml")
    plain = device_opener(config.settings)

    def opener(url: str) -> Device:
        plans[Path(url).name] = FaultyDevice(plain(url))
        return plans[Path(url).name]

    return hpstore.Pool(config, opener=opener)


def test_a_hung_device_holds_nobody_up(tmp_path: Path) -> None:
    """PROTOCOL 21: it is left out at its deadline; its file goes when the call comes back."""
    places = [tmp_path / f"d{i}" for i in range(WIDTH)]
    local = settings(tmp_path, device_deadline_seconds=1.0)
    hpstore.create(places, data=2, parity=1, config=tmp_path / "pool.toml", settings=local).close()
    plans: dict[str, FaultyDevice] = {}
    with faulty_pool(tmp_path, plans) as pool:
        plans["d2"].plan = "WH"
        assert pool.admin.prepare_space([SIZE]) == WIDTH - 1
        assert counters(pool)[1] == 1
        plans["d2"].released.set()
    assert files(tmp_path, "tmp") == []


@pytest.mark.parametrize("wrap", [lambda d: d, FaultyDevice])
def test_a_spare_file_is_taken_by_create_through_wrappers(
    tmp_path: Path, wrap: Callable[[Device], Device]
) -> None:
    """What is published as one is overwritten by the next file, which says so."""
    plain = LocalDevice(str(tmp_path))
    plain.prepare()
    device = wrap(plain)
    spare = device.create_spare(2 * MIB)
    assert spare is not None
    assert not spare.recycled
    spare.write(0, [pattern(2 * MIB)])
    spare.publish(recycled_path(2 * MIB))
    made = device.create(2 * MIB)
    assert made.recycled
    made.abort()
    assert device.entries("recycle") == device.entries("tmp") == []


@pytest.mark.parametrize("rounds", range(CHUNKS + 1))
def test_stopping_leaves_nothing_half_written(
    pool: hpstore.Pool, tmp_path: Path, rounds: int
) -> None:
    """At every chunk: what is whole stays, what is not goes."""
    asked = iter(range(100))
    written = pool.admin.prepare_space([SIZE], proceed=lambda: next(asked) < rounds)
    assert written == (WIDTH if rounds == CHUNKS else 0)
    assert len(files(tmp_path, "recycle")) == written
    assert files(tmp_path, "tmp") == []


HALF = """
import signal, sys, hpstore
asked = iter(range(100))
def proceed():
    if next(asked) == 1:
        print("half written", flush=True)
        signal.pause()
    return True
hpstore.open(sys.argv[1]).admin.prepare_space([int(sys.argv[2])], proceed=proceed)
"""


def test_a_kill_in_the_middle_leaves_what_frees_itself(pool: hpstore.Pool, tmp_path: Path) -> None:
    """SIGKILL between two chunks: orphans in tmp/ that the next open sweeps, nothing else."""
    pool.put("there", b"x" * SIZE)
    command = [sys.executable, "-c", HALF, str(tmp_path / "pool.toml"), str(SIZE)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "half written\n"
        child.kill()
    half = files(tmp_path, "tmp")
    assert len(half) == WIDTH
    assert files(tmp_path, "recycle") == []
    for file in half:
        os.utime(file, (0, 0))  # its writer has been gone for long
    with hpstore.open(tmp_path / "pool.toml") as again:
        assert files(tmp_path, "tmp") == []
        assert again.get("there") == b"x" * SIZE


# --- by a Checkpointer ---------------------------------------------------------------------------


def state_of(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((SIZE // 4,), value)}


def test_the_first_saves_overwrite_prepared_files(pool: hpstore.Pool) -> None:
    """keep_last=1 needs two sets; both first saves take one, and their values come back."""
    with Checkpointer(pool, "run", keep_last=1, example=state_of(0)) as checkpointer:
        assert checkpointer.saver.wait_prewritten(60)
        for step in (1, 2):
            checkpointer.save(step, state_of(step)).result()
            checkpointer.wait()
            assert counters(pool)[0] == step * WIDTH
        target = state_of(0)
        assert checkpointer.restore(target) == 2
        assert torch.equal(target["w"], state_of(2)["w"])
    # a restart finds a step and what retention left: there is nothing to prepare
    before = pool.metrics.snapshot()["space_prepared_files_total"]
    with Checkpointer(pool, "run", keep_last=1) as checkpointer:
        assert checkpointer.saver.wait_prewritten(60)
    assert pool.metrics.snapshot()["space_prepared_files_total"] == before


def test_a_restart_prepares_from_the_newest_manifest(pool: hpstore.Pool, tmp_path: Path) -> None:
    """Without an example: one set for the save that comes before retention gives one up."""
    with Checkpointer(pool, "run", keep_last=1, save=SaveOptions(prewrite=False)) as checkpointer:
        checkpointer.save(1, state_of(1)).result()
    assert files(tmp_path, "recycle") == []
    with Checkpointer(pool, "run", keep_last=1) as checkpointer:
        assert checkpointer.saver.wait_prewritten(60)
        assert len(files(tmp_path, "recycle")) == WIDTH


@pytest.mark.parametrize("options", [{"save": SaveOptions(prewrite=False)}, {"keep_last": None}])
def test_nothing_is_prepared_unasked(
    pool: hpstore.Pool, tmp_path: Path, options: dict[str, object]
) -> None:
    """prewrite=False; or all steps are kept, so that no file would ever be overwritten."""
    with Checkpointer(pool, "run", example=state_of(0), **{"keep_last": 1, **options}) as made:  # type: ignore[arg-type]
        assert made.saver.wait_prewritten(60)
    assert files(tmp_path, "recycle") == []


Prepare = Callable[..., int]


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Preparing begins without the moment that it leaves to a restore."""
    monkeypatch.setattr(prewrite_saves, "BEGIN_SECONDS", 0.0)


def maker(prepare: Prepare, steps: Sequence[int] = (), keep_last: int = 2) -> SpaceMaker:
    """A SpaceMaker on a pool that does what `prepare` says."""
    pool = SimpleNamespace(admin=SimpleNamespace(prepare_space=prepare, recycles=True))
    listed = SimpleNamespace(all=lambda: list(steps), prefix="run")
    return SpaceMaker(pool, listed, keep_last, "fast")  # type: ignore[arg-type]


@pytest.mark.usefixtures("at_once")
def test_a_save_comes_first() -> None:
    """Nothing is prepared between the begin of a save and its end."""
    released, seen = threading.Event(), []

    def prepare(sizes: Sequence[int], copies: int, **_: object) -> int:
        seen.append((released.is_set(), copies))
        return 1

    made = maker(prepare)
    with made.held():
        made.start([SIZE])
    released.set()
    made.release()
    assert made.wait(60)
    assert seen
    assert all(after for after, _ in seen)


@pytest.mark.usefixtures("at_once")
def test_a_restore_comes_first() -> None:
    """Nothing is prepared while a restore reads; it is afterwards."""
    asked: list[int] = []

    def prepare(sizes: Sequence[int], copies: int, **_: object) -> int:
        asked.append(copies)
        return 0

    made = maker(prepare)
    with made.resting():
        made.start([SIZE])
        assert not made.wait(0.2)
        assert not asked
    assert made.wait(60)
    assert asked


def test_restore_lets_preparing_rest(
    pool: hpstore.Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpointer.restore() does so, also of a pool that holds no step."""
    resting: list[bool] = []
    with Checkpointer(pool, "run", keep_last=1, example=state_of(0)) as checkpointer:
        assert checkpointer.saver.wait_prewritten(60)

        def look(*_: object) -> None:
            resting.append(not checkpointer.saver._space._go.is_set())

        monkeypatch.setattr("hpstore.checkpoint.checkpointer.restore_together", look)
        assert checkpointer.restore(state_of(0)) is None
        assert resting == [True]
        assert checkpointer.saver._space._go.is_set()


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize(
    ("steps", "saves", "most"), [([], 0, 3), ([], 1, 2), ([], 3, 0), ([7], 0, 2), ([7, 8, 9], 0, 1)]
)
def test_no_more_sets_than_saves_that_write_anew(steps: list[int], saves: int, most: int) -> None:
    """keep_last + 1 files are in use at most; steps that are there and saves that came have one."""
    asked: list[int] = []

    def prepare(sizes: Sequence[int], copies: int, **_: object) -> int:
        asked.append(copies)
        return 1 if asked.count(copies) == 1 else 0

    made = maker(prepare, steps)
    for _ in range(saves):
        with made.held():
            made.release()
    made.start([SIZE])
    assert made.wait(60)
    assert max(asked, default=0) == most
    assert asked == sorted(asked)


def test_closing_stops_it_in_the_middle() -> None:
    """close() while a save holds it and while it writes: the thread ends, no error."""
    begun = threading.Event()

    def prepare(
        sizes: Sequence[int], copies: int, *, proceed: Callable[[], bool], **_: object
    ) -> int:
        begun.set()
        while proceed():
            pass
        return 0

    made = maker(prepare)
    made.start([SIZE])
    assert begun.wait(60)
    with made.held():
        made.close()
    assert made.wait(0)
