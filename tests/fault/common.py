"""What the fault tests share: pools to break, payloads, ways to look at files from outside."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

import pytest

import hpstore
from hpstore.config import PoolConfig, Settings, find_config
from hpstore.devices.base import Device
from hpstore.devices.io_uring import Ring
from hpstore.devices.opener import Opener, device_opener
from hpstore.devices.wrappers import DeviceWrapper, FaultyDevice
from hpstore.errors import HpstoreError, ObjectNotFound
from hpstore.format.keys import parse_column_name
from hpstore.pool.pool import Pool
from hpstore.testing.loopfs import LoopFilesystem
from hpstore.units import KIB, MIB

T = TypeVar("T")
Wrap = Callable[[str, Device], Device]
GATE_SECONDS = 30.0  # a gate that nobody opens
_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1


class MakeDisks(Protocol):
    """The `make_disks` fixture."""

    def __call__(
        self, count: int, size_bytes: int = ..., inodes: int = ...
    ) -> list[LoopFilesystem]: ...


def payload(name: str, size: int) -> bytes:
    """The same bytes for the same name."""
    return random.Random(name).randbytes(size)


class Bench:
    """A pool under test: directories or filesystems, its pool.toml, its lock directory."""

    def __init__(self, root: Path) -> None:
        self.root, self.toml = root, root / "pool.toml"
        self.paths: list[str] = []

    def create(
        self,
        devices: int | Sequence[LoopFilesystem],
        *,
        data: int,
        parity: int,
        # Any: fields of Settings by name, which checks them
        **settings: Any,
    ) -> Pool:
        """Make the pool over so many directories, or over filesystems."""
        if isinstance(devices, int):
            self.paths = [str(self.root / f"d{i}") for i in range(devices)]
        else:
            self.paths = [disk.path for disk in devices]
        settings.setdefault("run_directory", str(self.root / "run"))
        return hpstore.create(
            self.paths,
            data=data,
            parity=parity,
            config=self.toml,
            settings=Settings(**settings),
        )

    def open(
        self, *, wrap: Wrap | None = None, threads: bool = True, read_only: bool = False
    ) -> Pool:
        """Open the pool; `wrap` may put something round a device, by its URL."""
        config = find_config(self.toml)
        return Pool(config, opener=wrapping(config, wrap), threads=threads, read_only=read_only)

    def files(self, key: str) -> list[Path]:
        """Files of an object on all devices."""
        found = (Path(path, "objects", *key.split("/")).glob("@*") for path in self.paths)
        return sorted(file for files in found for file in files)


class Hangs:
    """Faulty devices by path; `hang` makes one stop answering, `release` ends all hangs."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.devices: dict[str, list[FaultyDevice]] = {}
        self.plans: dict[str, str] = {}

    def wrap(self, url: str, device: Device) -> Device:
        """For Bench.open."""
        faulty = FaultyDevice(device, self.plans.get(url, ""))
        self.devices.setdefault(url, []).append(faulty)
        return faulty

    def hang(self, path: str, plan: str = "H*") -> None:
        """From now on."""
        self.plans[path] = plan
        for device in self.devices.get(path, []):
            device.plan = plan

    def release(self) -> None:
        """All hanging calls go on, later ones do not hang."""
        self.plans = {}
        for devices in self.devices.values():
            for device in devices:
                device.plan = ""
                device.released.set()


class Gates:
    """Operations of devices that wait until all are let go: (path, operation), "*" for any.

    `waiting` counts the calls that have come to one.
    """

    def __init__(self) -> None:
        self.shut: set[tuple[str, str]] = set()
        self.opened = threading.Event()
        self.waiting = 0
        self._lock = threading.Lock()  # guards waiting

    def wrap(self, url: str, device: Device) -> Device:
        """For Bench.open."""
        return _Gated(device, self)

    def come(self, url: str, operation: str) -> None:
        """A call on a device begins."""
        if self.shut & {(url, operation), ("*", operation), (url, "*")}:
            with self._lock:
                self.waiting += 1
            assert self.opened.wait(GATE_SECONDS)

    def let_go(self) -> None:
        """All go on, later ones do not wait."""
        self.shut.clear()
        self.opened.set()


class _Gated(DeviceWrapper):
    def __init__(self, inner: Device, gates: Gates) -> None:
        super().__init__(inner)
        self._gates = gates

    def around(self, operation: str, nbytes: int, call: Callable[[], T]) -> T:
        self._gates.come(self.url, operation)
        return call()


def wrapping(config: PoolConfig, wrap: Wrap | None) -> Opener:
    """The ordinary opener with something round the devices."""
    plain = device_opener(config.settings)
    return plain if wrap is None else lambda url: wrap(url, plain(url))


def rings() -> bool:
    """Whether io_uring can be used here."""
    try:
        Ring(2).close()
    except OSError:
        return False
    return True


needs_ring = pytest.mark.skipif(not rings(), reason="no io_uring here")


def value(pool: Pool, key: str) -> bytes | None:
    """The object's bytes, None when there is none. Other errors are raised."""
    try:
        return pool.get(key)
    except ObjectNotFound:
        return None


def tree(root: str) -> dict[str, tuple[int, int, int]]:
    """Every path below a directory with inode, size, time of change: equal when untouched."""
    found = {}
    for directory, _, names in os.walk(root):
        for name in (".", *names):
            status = os.lstat(os.path.join(directory, name))
            where = os.path.relpath(os.path.join(directory, name), root)
            found[where] = (status.st_ino, status.st_size, status.st_mtime_ns)
    return found


def column_number(file: Path) -> int:
    """Which column of its object a file holds."""
    found = parse_column_name(file.name)
    assert found is not None
    return found.column


def flip(file: Path, offset: int) -> None:
    """Change one bit in place."""
    fd = os.open(file, os.O_RDWR)
    try:
        byte = os.pread(fd, 1, offset)
        os.pwrite(fd, bytes([byte[0] ^ 0x10]), offset)
    finally:
        os.close(fd)


def empty(root: str) -> None:
    """Wipe a device: everything under its root goes."""
    for directory, directories, names in os.walk(root, topdown=False):
        for name in names:
            os.unlink(os.path.join(directory, name))
        for name in directories:
            os.rmdir(os.path.join(directory, name))


class Call:
    """A call on a thread of its own, so that a test can say that it ends in time."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        self._error: BaseException | None = None
        self._result: object = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._call()
        except BaseException as error:  # noqa: BLE001 (handed to the test)
            self._error = error

    def ended(self, limit_seconds: float) -> bool:
        """Whether it is over, after waiting at most so long."""
        self._thread.join(limit_seconds)
        return not self._thread.is_alive()

    def result(self) -> object:
        """What it returned; raises what it raised."""
        if self._error is not None:
            raise self._error
        return self._result


def within(limit_seconds: float, call: Callable[[], T]) -> T:
    """The result of a call that must be over in time."""
    running = Call(call)
    if not running.ended(limit_seconds):
        raise AssertionError(f"not over after {limit_seconds} s")
    return running.result()  # type: ignore[return-value]  # what `call` returned


def poll(
    limit_seconds: float, done: Callable[[], bool], what: Callable[[], str] = lambda: "done"
) -> None:
    """Wait for another process or thread; fails with "not `what`" when it takes too long."""
    until = time.monotonic() + limit_seconds
    while not done():
        if time.monotonic() > until:
            raise AssertionError(f"not {what()} after {limit_seconds} s")
        time.sleep(0.005)


def end_with(parent: int) -> None:
    """This process, just forked by a thread of `parent`, is killed as soon as that ends.

    A test that is killed cannot end its children, and what one of them reads from a device that
    hangs would keep the device's mount and loop for ever.
    """
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it had ended before
        os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def forked(child: Callable[[], object]) -> Iterator[int]:
    """Run `child` in a forked process (exit status 0 unless it raises); killed at the end.

    Also when this thread ends without coming to that.
    """
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            end_with(parent)
            child()
            status = 0
        except BaseException as error:  # noqa: BLE001 (the child must end here)
            os.write(2, f"child: {type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(status)
    try:
        yield pid
    finally:
        with suppress(ProcessLookupError, ChildProcessError):
            if os.waitpid(pid, os.WNOHANG) == (0, 0):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def exit_status(pid: int, limit_seconds: float) -> int:
    """Wait for a child to end by itself."""
    found: list[int] = []

    def over() -> bool:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            found.append(os.waitstatus_to_exitcode(status))
        return bool(found)

    poll(limit_seconds, over)
    return found[0]


def attempt(call: Callable[[], object]) -> bool:
    """Whether an operation was acknowledged; hpstore's own errors mean that it was not."""
    try:
        call()
    except HpstoreError:
        return False
    return True


OLD = {"old/small": 2 * KIB, "old/large": 2 * MIB}


def put_old(pool: Pool) -> None:
    """What must read back whatever happens later."""
    for key, size in OLD.items():
        pool.put(key, payload(key, size))


def old_is_whole(pool: Pool) -> bool:
    """Whether it does."""
    return all(value(pool, key) == payload(key, size) for key, size in OLD.items())
