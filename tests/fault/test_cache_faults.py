"""Faults under a running cache: its disk, its owner, its peers. Same bytes, counted, said once."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import shutil
import signal
import socket
import threading
from pathlib import Path

import numpy as np
import pytest

from hpstore.errors import ConfigError
from hpstore.loaders.cache import Cache, SharedAttached, disk_tier
from hpstore.loaders.cache.cache_core import Core
from hpstore.loaders.cache.disk_file import DiskFile
from hpstore.loaders.cache.disk_tier import DiskTier
from hpstore.loaders.cache.memory_tier import SharedMemory
from hpstore.loaders.cache.messages import address
from hpstore.loaders.dataset.record_layout import Int64s
from tests.fault.common import MakeDisks, exit_status, forked, poll
from tests.fault.shared_cache import COUNT, PATIENCE, SIZE, owner, said
from tests.integration.cache_sources import NumberedSource, read_checked, read_epoch

pytestmark = pytest.mark.fault


def insides(cache: Cache) -> tuple[Core, DiskTier]:
    """Of a cache with a disk tier that this process owns."""
    assert cache._owned is not None
    assert cache._owned.disk is not None
    return cache._owned.core, cache._owned.disk


class Run:
    """A cache of an eighth of a source in memory, with a disk tier, read at random."""

    def __init__(self, folder: str | Path, disk_blocks: int = COUNT) -> None:
        self.source = NumberedSource(COUNT, SIZE)
        self.cache = Cache(COUNT * SIZE // 8, disk_path=folder, disk_bytes=disk_blocks * 4096)
        self.reader = self.cache.attach(self.source, batch_blocks=10)
        self.rng = np.random.default_rng(0)

    def passes(self, count: int) -> None:
        """Passes over the source; every byte is checked."""
        for _ in range(count):
            self.reader.begin_epoch(COUNT)
            read_epoch(self.reader, self.source, self.rng.permutation(COUNT), 10)
            self.cache.flush()

    def count(self, name: str) -> float:
        return self.cache.stats().get(name, 0)

    def on_disk(self) -> int:
        part = insides(self.cache)[0].stocks[self.source.name].disk
        assert part is not None
        return int(np.count_nonzero(part.file.checks))


# --- the disk ---------------------------------------------------------------------------------


def test_the_disk_tier_may_be_deleted_at_any_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """rm -r under a running loader: its bytes go on, once said; the path can be used again."""
    run = Run(tmp_path / "tier")
    with run.cache:
        run.passes(2)
        assert run.on_disk() > COUNT // 4
        shutil.rmtree(tmp_path / "tier")
        insides(run.cache)[0].stocks[run.source.name].policy.begin_epoch(0)
        part = insides(run.cache)[0].stocks[run.source.name].disk
        assert part is not None
        part.drop([int(np.flatnonzero(part.file.checks)[0])])  # the next write looks
        run.passes(2)
        assert run.count("disk_failed_total") == 1
        assert said(caplog, "going on without it") == 1
        with Cache(1 << 20, disk_path=tmp_path / "tier", disk_bytes=1 << 20):
            run.passes(1)


@pytest.mark.root
def test_a_full_disk_keeps_what_it_has(
    make_disks: MakeDisks, caplog: pytest.LogCaptureFixture
) -> None:
    """The filesystem fills up below disk_bytes: fewer blocks, same bytes, once said."""
    (filesystem,) = make_disks(1, 16 << 20)
    filesystem.fill(keep_bytes=256 << 10)
    run = Run(filesystem.path, disk_blocks=COUNT)
    with run.cache:
        run.passes(4)
        assert run.count("disk_full_total") >= 1
        assert 10 < run.on_disk() < 100
        assert said(caplog, "is full") == 1
        before = run.count("disk_hit_total")
        run.passes(1)
        assert run.count("disk_hit_total") > before


@pytest.mark.root
def test_a_disk_that_turns_read_only_is_still_read(
    make_disks: MakeDisks, caplog: pytest.LogCaptureFixture
) -> None:
    """After the first write that fails none is tried, and no block that is there is given up.

    Blocks that had been given up for writes before that are gone: here one, as flush() waits until
    the write has failed.
    """
    (filesystem,) = make_disks(1, 32 << 20)
    run = Run(filesystem.path, disk_blocks=COUNT // 2)
    with run.cache:
        run.passes(1)
        part = insides(run.cache)[0].stocks[run.source.name].disk
        assert part is not None
        there = set(np.flatnonzero(part.file.checks).tolist())
        written = run.count("disk_written_total")
        gone = min(there)
        filesystem.read_only()
        part.drop([gone])
        run.cache.flush()
        assert run.count("disk_write_error_total") == 1
        run.passes(2)
        assert run.count("disk_write_error_total") == 1
        assert run.count("disk_written_total") == written
        assert said(caplog, "cannot be written") == 1
        assert run.count("disk_hit_total") > 0
        assert set(np.flatnonzero(part.file.checks).tolist()) == there - {gone}
    with pytest.raises(ConfigError, match="not usable"):
        Cache(1 << 20, disk_path=filesystem.path, disk_bytes=1 << 20)


@pytest.mark.root
def test_a_disk_that_vanishes_is_given_up(
    make_disks: MakeDisks, caplog: pytest.LogCaptureFixture
) -> None:
    """EIO on every read: misses, and after some of them the tier is asked no more."""
    (filesystem,) = make_disks(1, 32 << 20)
    run = Run(filesystem.path)
    with run.cache:
        run.passes(2)
        filesystem.shutdown()
        run.passes(2)
        assert run.count("disk_failed_total") == 1
        assert said(caplog, "going on without it") == 1


def test_damaged_blocks_are_read_from_their_source(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Every block on the disk is overwritten: none of it is served, all of it is counted."""
    run = Run(tmp_path)
    with run.cache:
        run.passes(2)
        there = run.on_disk()
        (path,) = tmp_path.glob("*.blocks")
        path.write_bytes(b"\x55" * path.stat().st_size)
        run.passes(2)
        assert run.count("disk_mismatch_total") >= there // 2
        assert said(caplog, "does not match its checksum") == 1


def test_a_disk_that_hangs_is_given_up_and_its_memory_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Reads have a deadline; what a late one brings goes nowhere."""
    run = Run(tmp_path)
    with run.cache:
        run.passes(2)
        monkeypatch.setattr(disk_tier, "DEADLINE_SECONDS", 0.1)
        released = threading.Event()
        read = DiskFile.read

        def hang(file: DiskFile, blocks: Int64s) -> object:
            released.wait(PATIENCE)
            return read(file, blocks)

        monkeypatch.setattr(DiskFile, "read", hang)
        run.passes(2)
        released.set()
        run.passes(1)
        assert run.count("disk_failed_total") == 1
        assert said(caplog, "hangs") == 1


def test_a_write_that_hangs_over_the_close_keeps_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closed under it, their numbers could be those of a file that the training opens next."""
    run = Run(tmp_path)
    run.passes(1)
    monkeypatch.setattr(disk_tier, "JOIN_SECONDS", 0.1)
    entered, released = threading.Event(), threading.Event()
    part = insides(run.cache)[0].stocks[run.source.name].disk
    assert part is not None

    def hang() -> None:
        entered.set()
        released.wait(PATIENCE)

    part.tier.later(hang)
    assert entered.wait(PATIENCE)
    run.cache.close()
    assert min(part.file._blocks, part.file._table) >= 0
    released.set()
    poll(PATIENCE, lambda: max(part.file._blocks, part.file._table) < 0)


def test_a_read_that_goes_on_over_the_close_keeps_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are closed when it has ended: it has its blocks, and no error of the disk is counted."""
    run = Run(tmp_path)
    run.passes(1)
    part = insides(run.cache)[0].stocks[run.source.name].disk
    assert part is not None
    tier, there = part.tier, np.flatnonzero(part.file.checks)[:1]
    read, entered, released = DiskFile.read, threading.Event(), threading.Event()

    def slow(file: DiskFile, blocks: Int64s) -> object:
        entered.set()
        assert released.wait(PATIENCE)
        return read(file, blocks)

    monkeypatch.setattr(DiskFile, "read", slow)
    found: list[object] = []
    reader = threading.Thread(target=lambda: found.extend(tier.read(part, there)))
    reader.start()
    assert entered.wait(PATIENCE)
    join, still_open = tier._reads.close, list[bool]()

    def joining(limit_seconds: float) -> None:
        still_open.append(min(part.file._blocks, part.file._table) >= 0)
        released.set()
        join(limit_seconds)

    monkeypatch.setattr(tier._reads, "close", joining)
    run.cache.close()
    reader.join(PATIENCE)
    assert still_open == [True]
    assert [one is None for one in found] == [False]
    assert max(part.file._blocks, part.file._table) < 0


def test_two_caches_on_one_path_are_refused_with_the_holders_name(tmp_path: Path) -> None:
    """In this process and in another one; free again when the holder is killed."""

    def hold() -> None:
        Cache(1 << 20, disk_path=tmp_path, disk_bytes=1 << 20)
        (tmp_path / "held").touch()
        signal.pause()

    with forked(hold) as pid:
        poll(PATIENCE, (tmp_path / "held").exists)
        with pytest.raises(ConfigError, match=f"in use by another cache: process {pid} on"):
            Cache(1 << 20, disk_path=tmp_path, disk_bytes=1 << 20)
        os.kill(pid, signal.SIGKILL)
        exit_status(pid, PATIENCE)
        with (
            Cache(1 << 20, disk_path=tmp_path, disk_bytes=1 << 20),
            pytest.raises(ConfigError, match=f"process {os.getpid()} on"),
        ):
            Cache(1 << 20, disk_path=tmp_path, disk_bytes=1 << 20)


def test_a_process_killed_while_it_writes_leaves_no_wrong_bytes(tmp_path: Path) -> None:
    """SIGKILL at some moment, several times over one directory; then all bytes are checked."""
    for turn in range(4):

        def write(turn: int = turn) -> None:
            run = Run(tmp_path / "tier", disk_blocks=60)
            run.rng = np.random.default_rng(turn)
            while True:
                run.passes(1)
                (tmp_path / f"pass{turn}").touch()

        with forked(write) as pid:
            poll(PATIENCE, (tmp_path / f"pass{turn}").exists)
            os.kill(pid, signal.SIGKILL)
            exit_status(pid, PATIENCE)
    run = Run(tmp_path / "tier", disk_blocks=60)
    with run.cache:
        assert run.on_disk() > 20
        run.passes(1)
        assert run.count("disk_hit_total") > 0


# --- processes that share one cache -----------------------------------------------------------


def shm_names() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "hpstore" in name}


def abstract_names() -> str:
    """Addresses of sockets in use on this machine."""
    return Path("/proc/net/unix").read_text()


def test_processes_of_a_node_share_one_memory(tmp_path: Path) -> None:
    """What the owner has read is a hit elsewhere; what is read elsewhere is kept for all."""
    name = f"test-{os.getpid()}-share"
    with forked(owner(name, tmp_path / "ready")):
        poll(PATIENCE, (tmp_path / "ready").exists)
        source = NumberedSource(COUNT, SIZE)
        with Cache(1 << 20, share=name) as cache, cache.attach(source, batch_blocks=10) as reader:
            assert isinstance(reader, SharedAttached)
            read_epoch(reader, source, np.arange(COUNT // 2), 10)
            assert not source.fetches.any()
            read_epoch(reader, source, np.arange(COUNT), 10)
            assert source.fetches.tolist() == [0] * (COUNT // 2) + [1] * (COUNT // 2)
            other = NumberedSource(COUNT, SIZE)
            with cache.attach(other, batch_blocks=10) as again:
                read_epoch(again, other, np.arange(COUNT), 10)
            assert not other.fetches.any()
            assert cache.stats()["memory_hit_total"] == 2 * COUNT


def test_memory_of_a_shared_cache_cannot_be_written_by_others(tmp_path: Path) -> None:
    """The kernel refuses it: the owner is the only writer."""
    name = f"test-{os.getpid()}-sealed"
    with forked(owner(name, tmp_path / "ready")):
        poll(PATIENCE, (tmp_path / "ready").exists)
        source = NumberedSource(COUNT, SIZE)
        with Cache(1 << 20, share=name) as cache, cache.attach(source) as reader:
            assert isinstance(reader, SharedAttached)
            assert reader._mapped is not None
            assert not reader._mapped.pages.rows.flags.writeable
            with pytest.raises(ValueError, match="read-only"):
                reader._mapped.first[0] = 1
    with SharedMemory(1 << 20) as memory:
        memory.data[:] = 7
        with pytest.raises(PermissionError):
            mmap.mmap(memory.fds["data"], 1 << 20)
        with pytest.raises(PermissionError):
            os.ftruncate(memory.fds["data"], 0)


def test_a_second_source_in_a_shared_cache_is_seen_by_all(tmp_path: Path) -> None:
    """The memory is laid out anew under readers that map it: right bytes, and hits again."""
    name = f"test-{os.getpid()}-layout"
    with forked(owner(name, tmp_path / "ready")):
        poll(PATIENCE, (tmp_path / "ready").exists)
        source, small = NumberedSource(COUNT, SIZE), NumberedSource(50, 700, name="val/0")
        with Cache(1 << 20, share=name) as cache, cache.attach(source, batch_blocks=10) as reader:
            read_epoch(reader, source, np.arange(COUNT), 10)
            with cache.attach(small, batch_blocks=10) as second:
                for _ in range(2):
                    read_epoch(reader, source, np.arange(COUNT), 10)
                    read_epoch(second, small, np.arange(50), 10)
            before = source.fetches.copy()
            read_epoch(reader, source, np.arange(COUNT), 10)
            assert np.array_equal(source.fetches, before)


def test_readers_go_on_when_the_owner_is_killed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """SIGKILL under them: the source's bytes, counted, once said. Nothing is left behind, and the
    next cache of that name has a new owner."""
    name, left = f"test-{os.getpid()}-killed", shm_names()
    with forked(owner(name, tmp_path / "ready")) as pid:
        poll(PATIENCE, (tmp_path / "ready").exists)
        source = NumberedSource(COUNT, SIZE)
        with Cache(1 << 20, share=name) as cache:
            reader = cache.attach(source, batch_blocks=10)
            read_epoch(reader, source, np.arange(COUNT), 10)
            os.kill(pid, signal.SIGKILL)
            exit_status(pid, PATIENCE)
            for _ in range(2):
                read_epoch(reader, source, np.arange(COUNT), 10)
            assert source.fetches.max() >= 2
            assert cache.stats()["owner_lost_total"] == 1
            assert said(caplog, "reading without it") == 1
            with pytest.raises(ConfigError, match="make the cache again"):
                cache.attach(source)
        assert shm_names() == left
        assert address(name).decode().strip("\0") not in abstract_names()
        with Cache(1 << 20, share=name) as cache, cache.attach(source, batch_blocks=10) as reader:
            assert not isinstance(reader, SharedAttached)
            read_epoch(reader, source, np.arange(COUNT), 10)


def test_a_reader_killed_in_mid_fetch_holds_nobody_up(tmp_path: Path) -> None:
    """Another process fetches a block and is killed: who waits for it fetches it himself."""
    name = f"test-{os.getpid()}-peer"
    source = NumberedSource(COUNT, SIZE)

    def fetch_for_ever() -> None:
        stuck = NumberedSource(COUNT, SIZE)
        stuck.gate = threading.Event()
        with Cache(1 << 20, share=name) as cache:
            cache.attach(stuck, batch_blocks=10).read(np.arange(10), np.zeros((10, SIZE), np.uint8))

    with Cache(1 << 20, share=name) as cache:
        reader = cache.attach(source, batch_blocks=10)
        assert cache._owned is not None
        flights = cache._owned.core.stocks[source.name].flights
        with forked(fetch_for_ever) as pid:
            poll(PATIENCE, lambda: len(flights) == 10)
            waiting = threading.Thread(target=read_checked, args=(reader, source, np.arange(5)))
            waiting.start()
            poll(PATIENCE, lambda: any(f.waiting for f in list(flights.values())))
            assert not source.calls
            os.kill(pid, signal.SIGKILL)
            waiting.join(PATIENCE)
            assert not waiting.is_alive()
        poll(PATIENCE, lambda: not flights)
        assert source.fetches[:5].tolist() == [1] * 5
        assert cache.stats()["peer_gone_total"] == 1


def test_the_owners_disk_serves_the_others(tmp_path: Path) -> None:
    """Blocks of the disk tier come through the owner; the reader does not touch its source."""
    run = Run(tmp_path / "tier")
    run.passes(2)
    part = insides(run.cache)[0].stocks[run.source.name].disk
    assert part is not None
    there = np.flatnonzero(part.file.checks)
    run.cache.close()
    name = f"test-{os.getpid()}-disk"
    with forked(owner(name, tmp_path / "ready", tmp_path / "tier")):
        poll(PATIENCE, (tmp_path / "ready").exists)
        source = NumberedSource(COUNT, SIZE)
        with Cache(1 << 20, share=name) as cache, cache.attach(source, batch_blocks=10) as reader:
            read_epoch(reader, source, there, 10)
            assert not source.fetches.any()


def test_a_stranger_on_the_socket_is_cut_off(caplog: pytest.LogCaptureFixture) -> None:
    """Nonsense ends that connection alone; nothing is unpickled."""
    name = f"test-{os.getpid()}-stranger"
    caplog.set_level(logging.ERROR)
    with Cache(1 << 20, share=name) as cache:
        source = NumberedSource(COUNT, SIZE)
        reader = cache.attach(source, batch_blocks=10)
        for nonsense in (
            b"\xff" * 64,
            b"\x02\0\0\0\0\0\0\0\0\0\0\0[]",
            b"\x02\0\0\0" + b"\0" * 8 + b"{}",
        ):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.connect(address(name))
                connection.sendall(nonsense)
                connection.settimeout(PATIENCE)
                with contextlib.suppress(ConnectionResetError):
                    assert connection.recv(1) == b""
        read_epoch(reader, source, np.arange(COUNT), 10)
