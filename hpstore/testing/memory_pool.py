"""Pools over memory devices for tests: lose devices, crash between operations, bring them back.

A power cut (`power_cut`) loses what was never synced; the death of a process (`restart`) loses only
locks. Both can be combined with devices that are missing and return later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from hpstore.config import PoolConfig, Settings, load_config, save_config
from hpstore.devices.base import Device
from hpstore.devices.memory import MemoryDevice
from hpstore.devices.wrappers import CrashCounter
from hpstore.format.keys import object_directory, parse_column_name
from hpstore.format.pool_key import new_pool_key
from hpstore.membership.members import create_members
from hpstore.pool.pool import Pool
from hpstore.runtime.clock import Clock, SystemClock
from hpstore.units import KIB, MIB

Wrap = Callable[[str, Device], Device]


class FakeClock:
    """A clock that stands still until a test moves it."""

    def __init__(self, wall_ms: int = 1_700_000_000_000) -> None:
        self.now_ms, self.elapsed = wall_ms, 0.0

    def wall_ms(self) -> int:
        return self.now_ms

    def monotonic(self) -> float:
        return self.elapsed

    def wait(self, seconds: float) -> None:
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.elapsed += seconds
        self.now_ms += int(seconds * 1000)


class Harness:
    """Memory devices d0, d1, ... and pools opened over them. Not thread-safe itself."""

    def __init__(
        self,
        directory: Path,
        *,
        data: int,
        parity: int,
        devices: int,
        unit_bytes: int = 64 * KIB,
        domains: list[str] | None = None,
        recycle_bytes: int = 0,
        clock: Clock | None = None,
        settings: Settings | None = None,
        keyed: bool = True,
    ) -> None:
        """`keyed`: whether the pool has a key, as every new one; else one of before."""
        self.clock: Clock = clock or SystemClock()
        self.recycle_bytes = recycle_bytes
        self.urls = [f"memory://d{i}" for i in range(devices)]
        self.devices = {url: self._fresh(url) for url in self.urls}
        base = settings or Settings(memory_bytes=64 * MIB)
        if clock is None:  # what is left by a crash is waited for in real time
            base = replace(base, claim_seconds=0.05)
        run = str(directory / "run")
        self.config = PoolConfig(
            path=directory / "pool.toml",
            name="test",
            devices=tuple(self.urls),
            settings=replace(base, run_directory=run),
            key=new_pool_key() if keyed else None,
        )
        save_config(self.config)
        create_members(
            list(self.urls),
            domains,
            self._open_url,
            self.config,
            data=data,
            parity=parity,
            unit_bytes=unit_bytes,
        )

    def _fresh(self, url: str) -> MemoryDevice:
        return MemoryDevice(url, recycle_bytes=self.recycle_bytes)

    def _open_url(self, url: str) -> Device:
        return self.devices.setdefault(url, self._fresh(url))

    def open(
        self, wrap: Wrap | None = None, *, threads: bool = False, read_only: bool = False
    ) -> Pool:
        """A pool over the devices, each behind `wrap(url, device)`."""

        def opener(url: str) -> Device:
            device = self._open_url(url)
            return device if wrap is None else wrap(url, device)

        known = replace(self.config, devices=load_config(self.config.path).devices)
        return Pool(known, opener=opener, clock=self.clock, threads=threads, read_only=read_only)

    def open_crashing(self, crash_at: int) -> tuple[Pool, list[int]]:
        """A pool whose devices die together before operation `crash_at`, counted from now on."""
        operations = [-(10**9)]  # opening does not count
        pool = self.open(lambda _, device: CrashCounter(device, operations, crash_at))
        operations[0] = 0
        return pool, operations

    def restart(self) -> None:
        """All processes died: locks are free, all that was written is there."""
        for device in self.devices.values():
            device.restart()

    def power_cut(self) -> None:
        """The machine lost power: what was never synced is gone."""
        for device in self.devices.values():
            device.crash()

    def lose(self, urls: Iterable[str]) -> None:
        """Devices stop answering."""
        for url in urls:
            self.devices[url].missing = True

    def bring_back(self) -> None:
        """All devices answer again."""
        for device in self.devices.values():
            device.missing = False

    def wipe(self, url: str) -> None:
        """A device is replaced by an empty one."""
        self.devices[url].files.clear()
        self.devices[url]._durable_names.clear()

    def columns(self, key: str) -> list[tuple[str, str]]:
        """(url, path) of every file of an object, past the code under test."""
        prefix = object_directory(key) + "/"
        return [
            (url, path)
            for url, device in self.devices.items()
            for path in sorted(device.files)
            if path.startswith(prefix) and parse_column_name(path[len(prefix) :]) is not None
        ]

    def flip(self, url: str, path: str, offset: int) -> None:
        """Flip a bit of a file, past the code under test."""
        file = self.devices[url].files[path]
        file.bytes[offset % len(file.bytes)] ^= 1
        file.durable = bytes(file.bytes)
