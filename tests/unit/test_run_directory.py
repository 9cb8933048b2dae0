"""Run directories: registers of pools on stores, and directories that others could write."""

from __future__ import annotations

import itertools
import os
import resource
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpstore.agent import Agent, AgentConfig
from hpstore.agreement.registers import REPAIR
from hpstore.config import PoolConfig, Settings, is_believable, private_directory, save_config
from hpstore.devices import RemoteDevice
from hpstore.devices.opener import device_opener
from hpstore.errors import (
    ConfigError,
    LockTimeout,
    RegistersForeign,
    RegistersUnavailable,
    VersionConflict,
)
from hpstore.format.records import unseal
from hpstore.locks import file_lock
from hpstore.membership import run_registers
from hpstore.membership.agent_observations import STATUS_FILE, read_status
from hpstore.membership.members import create_members
from hpstore.membership.run_registers import TOKEN_FILE
from hpstore.pool.pool import Pool
from hpstore.runtime.text_files import write_atomically
from hpstore.testing.memory_pool import FakeClock, Harness
from hpstore.units import MIB

_NUMBERS = itertools.count(1)  # memory:// is one store for the whole process


@pytest.fixture
def stores(tmp_path: Path) -> PoolConfig:
    """A pool of 1+1 on three stores, which have no locks."""
    number = next(_NUMBERS)
    urls = [f"memory://run-{os.getpid()}-{number}/d{i}" for i in range(3)]
    config = PoolConfig(
        path=tmp_path / "pool.toml",
        name="test",
        devices=tuple(urls),
        settings=Settings(
            memory_bytes=32 * MIB, run_directory=str(tmp_path / "run"), lock_deadline_seconds=0.2
        ),
    )
    save_config(config)
    opener = device_opener(config.settings)
    create_members(urls, None, opener, config, data=1, parity=1, unit_bytes=64 * 1024)
    return config


def elsewhere(config: PoolConfig, place: Path) -> PoolConfig:
    return replace(config, settings=replace(config.settings, run_directory=str(place)))


def test_processes_with_one_run_directory_exclude_each_other_on_stores_rule_15(
    stores: PoolConfig,
) -> None:
    """A conditional put has one winner, a rebuild waits for the other."""
    with Pool(stores) as a, Pool(stores) as b:
        version = a.put("k", b"a", if_absent=True).version
        with pytest.raises(VersionConflict):
            b.put("k", b"b", if_absent=True)
        b.put("k", b"b", if_version=version)
        with (
            a.admin.registers.hold(REPAIR, "first"),
            pytest.raises(LockTimeout, match="second"),
            b.admin.registers.hold(REPAIR, "second", deadline_seconds=0.0),
        ):
            pass


def test_of_two_that_begin_at_once_neither_locks_the_other_out_rule_15(
    stores: PoolConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One names the directory after the other has seen that nobody has. It was named by a token
    that lay nowhere, and every conditional put was refused from then on."""
    lock, overtakes = file_lock, []
    with Pool(stores) as a, Pool(stores) as b:

        def overtaken(directory: Path, name: str, *words: Any) -> Any:
            if name == "token.lock":
                monkeypatch.setattr(run_registers, "file_lock", lock)
                overtakes.append(name)
                b.put("b", b"1", if_absent=True)
            return lock(directory, name, *words)

        monkeypatch.setattr(run_registers, "file_lock", overtaken)
        a.put("a", b"1", if_absent=True)
        assert overtakes == ["token.lock"]
        b.put("b", b"2", if_version=b.stat("b").version)


class _FillsUp:
    """An opened object of one byte; while it is read, the disks of this process become full."""

    pinned, size = True, 1

    def read_into(self, buffer: object, offset: int = 0) -> int:
        del buffer, offset
        _set_full(full=True)
        return 1


def _set_full(*, full: bool) -> None:
    """Have the kernel refuse to write files, or write them again."""
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (0 if full else hard, hard))


def test_a_full_run_directory_is_an_error_of_registers_rule_15(stores: PoolConfig) -> None:
    """A bare OSError hid that a put may have been stored."""
    with Pool(stores) as pool:
        pool.put("k", b"a", if_absent=True)
        for key, source, maybe in [("new", b"a", False), ("late", _FillsUp(), True)]:
            try:
                _set_full(full=not maybe)
                with pytest.raises(
                    RegistersUnavailable, match=r"run directory .* too large"
                ) as found:
                    pool.put(key, source, if_absent=True)
                with (
                    pytest.raises(RegistersUnavailable, match="too large"),
                    pool.admin.registers.hold(REPAIR, "repair"),
                ):
                    pass
            finally:
                _set_full(full=False)
            assert found.value.maybe_visible is maybe
            assert pool.exists(key) is maybe
        with pytest.raises(OSError, match="of the caller"), pool.admin.registers.hold(REPAIR, "x"):
            raise OSError("of the caller")


def test_another_run_directory_is_refused_on_stores_with_the_setting_to_change_rule_15(
    stores: PoolConfig, tmp_path: Path
) -> None:
    """Conditional puts, changes and repairs; reading and plain puts go on."""
    with Pool(stores) as pool:
        pool.put("k", b"a", if_absent=True)
    with Pool(elsewhere(stores, tmp_path / "other")) as pool:
        assert pool.get("k") == b"a"
        pool.put("plain", b"x")
        for call in (
            lambda: pool.put("new", b"b", if_absent=True),
            lambda: pool.evict(stores.devices[0]),
            lambda: pool.rebuild(),
        ):
            with pytest.raises(RegistersForeign, match=r"Set run_directory in pool\.toml to that"):
                call()
    with Pool(stores) as pool:
        pool.put("k2", b"a", if_absent=True)


def test_after_a_restart_of_the_machine_the_run_directory_may_be_gone(
    stores: PoolConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies in a temporary directory went with the last boot, and so did who used it."""
    with Pool(stores) as pool:
        pool.put("k", b"a", if_absent=True)
        (pool.admin.run_directory / TOKEN_FILE).unlink()
    with Pool(stores) as pool:
        with pytest.raises(RegistersForeign):
            pool.put("k2", b"a", if_absent=True)
        monkeypatch.setattr(
            "hpstore.membership.run_registers._machine", lambda: (machine(pool), "next boot")
        )
        pool.put("k2", b"a", if_absent=True)


def test_a_machine_of_the_same_image_is_another_one_rule_15(
    stores: PoolConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers of one image have its machine-id, on hosts with boots of their own: each took the
    registers over from the one before, which excluded nobody any more."""
    with Pool(stores) as pool:
        pool.put("k", b"a", if_absent=True)
        recorded = machine(pool)
        (pool.admin.run_directory / TOKEN_FILE).unlink()  # it has a directory of its own
    monkeypatch.setattr(socket, "gethostname", lambda: "another-pod")
    name, _ = run_registers._machine()
    assert name != recorded
    monkeypatch.setattr(run_registers, "_machine", lambda: (name, "another boot"))
    with Pool(stores) as pool, pytest.raises(RegistersForeign, match="on machine"):
        pool.put("k2", b"a", if_absent=True)


def test_who_has_lost_the_registers_to_another_hears_of_it_rule_15(
    stores: PoolConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An administrator removes the token from the devices though a process still uses the pool."""
    with Pool(stores) as first:
        first.put("k", b"a", if_absent=True)
        for url in stores.devices:
            RemoteDevice(url).delete(TOKEN_FILE)
        with Pool(elsewhere(stores, tmp_path / "other")) as second:
            second.put("k2", b"a", if_absent=True)
        monkeypatch.setattr(run_registers, "_PROOF_SECONDS", 0.0)
        with pytest.raises(RegistersForeign):
            first.put("k3", b"a", if_absent=True)
        first.put("plain", b"x")


def test_a_machine_that_an_older_hpstore_recorded_is_known() -> None:
    assert run_registers._is_machine("0123abcd", "0123abcd host")
    assert run_registers._is_machine("0123abcd host", "0123abcd host")
    assert not run_registers._is_machine("0123abcd other", "0123abcd host")
    assert not run_registers._is_machine("0123", "0123abcd host")


def machine(pool: Pool) -> str:
    device = RemoteDevice(next(iter(pool.admin.devices.places.values())))
    return str(unseal(device.read_small(TOKEN_FILE, 1 << 16), where="a test")["machine"])


@pytest.mark.parametrize("how", ["writable", "link", "file", "writable above"])
def test_a_run_directory_that_others_could_write_is_refused(tmp_path: Path, how: str) -> None:
    """Nothing is written there, and nothing there is believed; the error names the setting."""
    base = tmp_path / f"hpstore-{os.getuid()}"
    base.mkdir(mode=0o700)
    path = base / "pool"
    if how == "link":
        (tmp_path / "other").mkdir()
        path.symlink_to(tmp_path / "other")
    elif how == "file":
        path.write_text("")
    else:
        path.mkdir(mode=0o700)
        (path if how == "writable" else base).chmod(0o777)
    with pytest.raises(ConfigError, match=r"set run_directory in pool\.toml"):
        private_directory(path)
    assert not is_believable(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be two users")
@pytest.mark.parametrize("whose", ["own", "above"])
def test_a_run_directory_of_another_user_is_refused(tmp_path: Path, whose: str) -> None:
    """Whoever makes a known name in a temporary directory first owns it (t4_tmpsquat)."""
    base = tmp_path / f"hpstore-{os.getuid()}"
    path = base / "pool"
    path.mkdir(mode=0o700, parents=True)
    os.chown(path if whose == "own" else base, 65534, 65534)
    with pytest.raises(ConfigError, match="belongs to user 65534"):
        private_directory(path)
    assert not is_believable(path)


def test_an_agent_writes_nothing_into_a_directory_that_others_can_write(tmp_path: Path) -> None:
    """It ends with the setting to change; puts and evictions need no run directory."""
    harness = Harness(tmp_path, data=2, parity=1, devices=4, clock=FakeClock())
    with harness.open() as pool:
        pool.admin.run_directory.mkdir(parents=True)
        pool.admin.run_directory.chmod(0o777)
        with pytest.raises(ConfigError, match="set run_directory"):
            Agent(pool, AgentConfig(smart_hours=0.0), threads=False)
        (pool.admin.run_directory / STATUS_FILE).write_text(
            f'{{"at_ms": {pool.admin.clock.wall_ms()}}}'
        )
        assert read_status(pool.admin.run_directory, pool.admin.clock.wall_ms()) is None
        pool.put("k", b"x", if_absent=True)
        pool.evict("memory://d0")
        pool.rebuild()


def test_status_is_written_under_a_name_that_cannot_be_known(tmp_path: Path) -> None:
    """A link that lies where an earlier release wrote first is not followed."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / f".status.json.{os.getpid()}").symlink_to(victim)
    write_atomically(tmp_path / "status.json", "{}", durable=False)
    assert victim.read_text() == "precious"
    assert (tmp_path / "status.json").read_text() == "{}"
