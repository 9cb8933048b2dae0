"""Calls on several hosts that one thread makes together: no other is woken, and nothing is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("httptools", reason="needs the extra hosts")

import hpstore
from hpstore.config import Settings
from hpstore.devices.host_device import HostDevice
from hpstore.devices.host_links import HostLinks
from hpstore.devices.local import LocalDevice
from hpstore.errors import DeviceError
from hpstore.format.host_calls import PROTOCOL
from hpstore.hosts.admission import Admit, admit_all, admit_certified
from hpstore.hosts.caller_roles import CallerRole
from hpstore.hosts.certificates import make_caller, make_host
from hpstore.hosts.host_service import HostService
from hpstore.runtime import split_calls
from hpstore.runtime.mutual_tls import TlsFiles
from hpstore.runtime.scheduler import Scheduler
from hpstore.units import MIB

LIMIT_SECONDS = 20.0


@pytest.fixture
def tls() -> str:
    """As the setting; tests ask for another."""
    return "plain"


@pytest.fixture
def services(tmp_path: Path, tls: str) -> Iterator[list[HostService]]:
    """Three, of two disks each."""
    admit: Admit = admit_all
    if tls != "plain":
        make_host(tmp_path / "tls", "a", ["127.0.0.1"], 30)
        make_caller(tmp_path / "tls", "me", CallerRole.KEEPER, 30)
        admit = admit_certified(TlsFiles(tmp_path / "tls/hosts/a", server=True))
    with ExitStack() as stack:
        made = []
        for host in "abc":
            service = stack.enter_context(HostService("127.0.0.1", 0, admit=admit))
            for number in range(2):
                (tmp_path / f"{host}{number}").mkdir()
                disk = LocalDevice(str(tmp_path / f"{host}{number}"))
                disk.prepare()
                service.export(disk)
            made.append(service)
        yield made


@pytest.fixture
def pool(
    services: list[HostService], tls: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[hpstore.Pool]:
    """Over all services. Every answer comes soon enough, and no put raises the mark of versions."""
    monkeypatch.setattr(split_calls, "SOON_SECONDS", LIMIT_SECONDS)
    settings = Settings(
        memory_bytes=64 * MIB,
        run_directory=str(tmp_path / "run"),
        tls=tls,
        certificates=str(tmp_path / "tls/callers/me"),
        device_deadline_seconds=LIMIT_SECONDS,
    )
    urls = [f"hpd://127.0.0.1:{s.address[1]}/{n}" for s in services for n in range(2)]
    with hpstore.create(
        urls,
        data=4,
        parity=2,
        config=tmp_path / "pool.toml",
        settings=settings,
        domains=["a", "a", "b", "b", "c", "c"],
    ) as opened:
        context = opened._session.store
        context.counter.cover(context.clock.wall_ms() + 3_600_000)
        for number in range(3):  # connections are made, and a session on each disk
            opened.put(f"warm{number}", b"x" * 100_000, if_absent=True)
            opened.put(f"warm{number}", b"x" * 100_000)
            assert opened.get(f"warm{number}") == b"x" * 100_000
        yield opened


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Devices on whose lanes calls were made."""
    found: list[str] = []
    plain = Scheduler.submit

    def submit(self: Scheduler, device: str, call: Callable[[], Any], **how: Any) -> Any:
        if len(device) > 1:  # else a disk of a service, which is in this process here
            found.append(device)
        return plain(self, device, call, **how)

    monkeypatch.setattr(Scheduler, "submit", submit)
    return found


@pytest.mark.parametrize("tls", ["plain", "mutual"])
def test_small_objects_wake_no_thread(pool: hpstore.Pool, submitted: list[str]) -> None:
    """Put, overwritten, read, as copies and in columns, conditional puts included."""
    for size in (0, 4096, 20_000, 60_000):
        for byte in (b"a", b"b"):
            pool.put("k", byte * size)
            assert pool.get("k") == byte * size
    pool.put("new", b"c", if_absent=True)
    assert submitted == []


def test_what_is_interrupted_leaves_nothing_open(
    pool: hpstore.Pool, services: list[HostService], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C between requests and answers: the next calls give up what had been opened."""
    pool.put("k", b"y" * 4096)

    def held() -> int:
        return sum(service._shared.sessions._count for service in services)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    plain = HostLinks.begin
    for operation in ("open", "new_file", "hold"):
        interrupted = operation

        def begin(links: HostLinks, asked: str, *rest: Any, **how: Any) -> Any:
            sent = plain(links, asked, *rest, **how)
            if asked == interrupted and sent is not None:  # noqa: B023 (used within this turn)
                sent.arrived = interrupt
            return sent

        with monkeypatch.context() as patch:
            patch.setattr(HostLinks, "begin", begin)
            with pytest.raises(KeyboardInterrupt):
                _use(pool, operation)
        for _ in range(2):
            for device in pool._session.store.view.devices.values():
                device.stamp("pool.json")
        assert held() == 0
        assert pool.get("k") == b"y" * 4096
        pool.put("k", b"y" * 4096, if_version=pool.stat("k").version)


def _use(pool: hpstore.Pool, operation: str) -> None:
    if operation == "open":
        pool.get("k")
    else:
        pool.put("k", b"z" * 4096, if_absent=operation == "hold")


def test_a_range_is_free_when_its_last_write_has_failed(services: list[HostService]) -> None:
    """By one thread, and in two halves."""
    device = HostDevice(f"hpd://127.0.0.1:{services[0].address[1]}/0", seconds=LIMIT_SECONDS)
    hold = device.hold(0, 512)
    with pytest.raises(DeviceError, match="beyond the range"):
        hold.finish(500, bytes(100))
    assert not hold.taken
    again = device.hold(0, 512)
    assert again.taken
    sent = again.begin_finish(0, b"x")
    assert sent is not None
    sent.finish()
    assert not again.taken
    after = device.hold(0, 512)
    assert after.taken
    assert after.content[:1] == b"x"
    device.close()


def test_a_lock_that_nobody_ends_goes_with_the_next_call(services: list[HostService]) -> None:
    """Ctrl-C came between its grant and who would have released it."""
    device = HostDevice(f"hpd://127.0.0.1:{services[0].address[1]}/0", seconds=LIMIT_SECONDS)
    hold = device.hold(0, 512)
    assert hold.taken
    del hold
    device.stamp("pool.json")
    assert device.hold(0, 512).taken
    device.close()


@pytest.mark.parametrize("older", ["hpstore.hosts.device_calls", "hpstore.devices.host_links"])
def test_an_older_service_or_process_is_refused_by_name(
    services: list[HostService], monkeypatch: pytest.MonkeyPatch, older: str
) -> None:
    """When the device is opened, before anything is asked of it; the error says what to do."""
    monkeypatch.setattr(f"{older}.PROTOCOL", PROTOCOL - 1)
    with pytest.raises(DeviceError, match=f"speaks protocol .*{PROTOCOL}.*upgrade the older"):
        HostDevice(f"hpd://127.0.0.1:{services[0].address[1]}/0", seconds=LIMIT_SECONDS)


def test_a_service_that_was_upgraded_meanwhile_is_refused_by_name(
    services: list[HostService], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the first call that opens something there after its restart."""
    device = HostDevice(f"hpd://127.0.0.1:{services[0].address[1]}/0", seconds=LIMIT_SECONDS)
    monkeypatch.setattr("hpstore.hosts.device_calls.PROTOCOL", PROTOCOL + 1)
    device._links._anchor = (
        None  # as after a restart: the connection that keeps the session is gone
    )
    with pytest.raises(DeviceError, match=f"speaks protocol {PROTOCOL + 1}.*upgrade the older"):
        device.create(4096)
    device.close()
