"""Mutual TLS: who is let in, what a role may do, and certificates that end or are renewed."""

from __future__ import annotations

import shutil
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("httptools", reason="needs the extra hosts")
pytest.importorskip("cryptography", reason="needs the extra hosts")

import hpstore
from hpstore.config import Settings
from hpstore.devices.base import DEBTS
from hpstore.devices.horizon_guard import HORIZON, MARK
from hpstore.devices.host_device import HostDevice
from hpstore.devices.host_links import HostLinks
from hpstore.devices.local import LocalDevice
from hpstore.errors import ConfigError, DeviceDenied, DeviceError, DeviceMissing
from hpstore.format.records import IDENTITY_FILE, POOL_FILE
from hpstore.hosts.admission import admit_certified, role_of
from hpstore.hosts.caller_roles import CallerRole
from hpstore.hosts.certificates import make_caller, make_host
from hpstore.hosts.host_service import HostService
from hpstore.runtime.mutual_tls import AUTHORITY, CERTIFICATE, KEY, TlsFiles, caller_of
from hpstore.testing import PAGE, fetch, pattern, store
from hpstore.units import MIB

PATH = "objects/a/@1"


@pytest.fixture
def tls(tmp_path: Path) -> Path:
    """An authority, a host on the loopback, and a caller of each role."""
    make_host(tmp_path / "tls", "a", ["127.0.0.1"], 30)
    for role in CallerRole:
        make_caller(tmp_path / "tls", role.name.lower(), role, 30)
    return tmp_path / "tls"


@pytest.fixture
def service(tls: Path, tmp_path: Path) -> Iterator[HostService]:
    admit = admit_certified(TlsFiles(tls / "hosts/a", server=True))
    with HostService("127.0.0.1", 0, admit=admit) as made:
        (tmp_path / "disk").mkdir()
        device = LocalDevice(str(tmp_path / "disk"))
        device.prepare()
        made.export(device)
        yield made


def device_of(service: HostService, files: Path | None) -> HostDevice:
    secure = None if files is None else TlsFiles(files, server=False).call
    return HostDevice(f"hpd://127.0.0.1:{service.address[1]}/0", seconds=5.0, secure=secure)


def test_a_keeper_writes_and_reads_over_tls(service: HostService, tls: Path) -> None:
    """Bodies of more than a TLS record and more than a piece."""
    device = device_of(service, tls / "callers/keeper")
    data = pattern(5 * MIB)
    store(device, PATH, data)
    assert fetch(device, PATH) == data.tobytes()
    device.close()


def test_each_role_may_do_what_it_needs_and_no_more(service: HostService, tls: Path) -> None:
    keeper = device_of(service, tls / "callers/keeper")
    store(keeper, PATH, pattern(PAGE))
    keeper.write_small(POOL_FILE, b"record")
    writer, reader = (
        device_of(service, tls / "callers/writer"),
        device_of(service, tls / "callers/reader"),
    )
    for device in (writer, reader):
        assert fetch(device, PATH) == pattern(PAGE).tobytes()
        assert device.read_small(POOL_FILE, 100) == b"record"
        device.entries("objects")
        device.usage()
        device.probe(write=False)
        for_keepers: tuple[Callable[[HostDevice], object], ...] = (
            lambda d: d.write_small(POOL_FILE, b"forged"),
            lambda d: d.write_small(IDENTITY_FILE, b"forged"),
            lambda d: d.delete(POOL_FILE),
            lambda d: d.retire(POOL_FILE),
            lambda d: d.quarantine(POOL_FILE),
            lambda d: d.raise_counter(HORIZON, 5),
            lambda d: d.prepare(),
            lambda d: d.takes_records(),
        )
        for forbidden in for_keepers:
            with pytest.raises(DeviceDenied, match=r"needs the role (keeper|writer)"):
                forbidden(device)
    for_writers: tuple[Callable[[HostDevice], object], ...] = (
        lambda d: d.create(PAGE),
        lambda d: d.write_small(f"{DEBTS}/x.json", b"x"),
        lambda d: d.delete(PATH),
        lambda d: d.retire(PATH),
        lambda d: d.hold(0, 512),
        lambda d: d.raise_counter(MARK, 5),
        lambda d: d.sweep(),
        lambda d: d.probe(write=True),
    )
    for forbidden in for_writers:
        with pytest.raises(DeviceDenied, match="needs the role writer"):
            forbidden(reader)
    store(writer, "objects/b/@1", pattern(PAGE))
    assert writer.raise_counter(MARK, 5) == 5
    writer.write_small(f"{DEBTS}/x.json", b"x")
    writer.delete("objects/b/@1")
    assert keeper.read_small(POOL_FILE, 100) == b"record"
    for device in (keeper, writer, reader):
        device.close()


def test_who_shows_no_certificate_of_the_authority_is_not_let_in(
    service: HostService, tls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain bytes, another authority, a host's certificate as a caller's, no role, two roles."""
    make_caller(tmp_path / "other", "keeper", CallerRole.KEEPER, 30)
    foreign = tmp_path / "other/callers/keeper"
    with pytest.raises((DeviceDenied, DeviceMissing)):
        device_of(service, foreign)  # which does not know the host either
    shutil.copy(tls / "authority" / AUTHORITY, foreign / AUTHORITY)
    for files in (foreign, tls / "hosts/a"):
        with pytest.raises((DeviceDenied, DeviceMissing)):
            device_of(service, files)
    with monkeypatch.context() as patch:
        patch.setattr("hpstore.hosts.certificates.ROLE_URI", "urn:other:role:")
        make_caller(tls, "outsider", CallerRole.KEEPER, 30)
    for _ in range(4):  # the reason comes before the end of the connection
        with pytest.raises(
            DeviceDenied, match=r"the certificate of outsider has no role, or several"
        ):
            device_of(service, tls / "callers/outsider")
    with pytest.raises((DeviceMissing, DeviceError)):
        device_of(service, None)
    roles = ("urn:hpstore:role:writer", "urn:hpstore:role:keeper", "urn:hpstore:role:root")
    for uris in ((), roles[:2], roles[2:]):
        certificate: dict[str, object] = {
            "subject": ((("commonName", "x"),),),
            "notAfter": "Jan  1 00:00:00 2099 GMT",
            "subjectAltName": tuple(("URI", uri) for uri in uris),
        }
        assert role_of(caller_of(certificate)) is None
    device_of(service, tls / "callers/reader").close()  # the service goes on


def test_a_host_that_is_another_is_not_called(
    service: HostService, tls: Path, tmp_path: Path
) -> None:
    """Its certificate is right, but names other addresses."""
    make_host(tls, "b", ["10.9.8.7"], 30)
    for name in (CERTIFICATE, KEY):
        (tls / "hosts/b" / name).replace(tls / "hosts/a" / name)
    with pytest.raises(DeviceDenied, match="refused by TLS: IP address mismatch"):
        device_of(service, tls / "callers/reader")


def test_an_expired_certificate_is_refused_on_either_side(
    service: HostService, tls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller's by the service, the host's by the caller; each says so. One that ends while the
    connection is open ends that, and the call is made over another one, by the files of now."""
    device = device_of(service, tls / "callers/reader")
    expire(monkeypatch)
    make_caller(tls, "old", CallerRole.READER, 1)
    for _ in range(4):  # the reason comes before the end of the connection
        with pytest.raises(DeviceDenied, match="refused by TLS: SSLV3_ALERT_CERTIFICATE_EXPIRED"):
            device_of(service, tls / "callers/old")
    make_host(tls, "a", ["127.0.0.1"], 1)
    with pytest.raises(DeviceDenied, match="certificate has expired"):
        device_of(service, tls / "callers/reader")
    monkeypatch.setattr("hpstore.hosts.served_connection.time.monotonic", lambda: 1e12)
    with pytest.raises(DeviceDenied, match="certificate has expired"):
        device.usage()
    monkeypatch.undo()
    make_host(tls, "a", ["127.0.0.1"], 1)
    kept = device._links._take(5.0, fresh=True)
    device._links._put_back(kept, ends=False)
    device.usage()
    monkeypatch.setattr("hpstore.hosts.served_connection.time.monotonic", lambda: 1e12)
    device.usage()
    assert kept not in device._links._idle
    device.close()


def test_what_a_caller_holds_outlives_the_renewal_of_its_certificate(
    service: HostService, tls: Path
) -> None:
    """Files and locks that were opened over connections of before are used over those of now."""
    device = device_of(service, tls / "callers/keeper")
    writer = device.create(2 * PAGE)
    writer.write(0, [pattern(PAGE)])
    device._links.keep_session()
    with device._links._lock:
        idle, device._links._idle = device._links._idle, []
    make_caller(tls, "keeper", CallerRole.KEEPER, 60)
    writer.write(PAGE, [pattern(PAGE, 1)])
    writer.abort()
    for stream in idle:
        stream.close()
    device.close()


def expire(patch: pytest.MonkeyPatch) -> None:
    """Certificates of a day, made from now on, ended a day ago."""
    import datetime

    class Past(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Past:
            return super().now(tz) - datetime.timedelta(days=2)

    patch.setattr("hpstore.hosts.certificates.datetime.datetime", Past)


def test_certificates_are_renewed_without_a_restart(service: HostService, tls: Path) -> None:
    """Both sides read files that were replaced; half of a new pair is passed over."""
    files = TlsFiles(tls / "callers/reader", server=False)
    url = f"hpd://127.0.0.1:{service.address[1]}/0"
    HostDevice(url, seconds=5.0, secure=files.call).close()
    before = files.context()
    kept = (tls / "callers/reader" / KEY).read_bytes()
    make_caller(tls, "reader", CallerRole.READER, 60)
    whole = (tls / "callers/reader" / KEY).read_bytes()
    (tls / "callers/reader" / KEY).write_bytes(kept)
    assert files.context() is before  # the new certificate and the old key are no pair
    (tls / "callers/reader" / KEY).write_bytes(whole)
    assert files.context() is not before
    make_host(tls, "a", ["127.0.0.1"], 60)
    seen: list[object] = []

    def noted(sock: object, host: str) -> ssl.SSLSocket:
        secured = files.call(sock, host)  # type: ignore[arg-type]
        assert isinstance(secured, ssl.SSLSocket)
        seen.append((secured.getpeercert() or {})["serialNumber"])
        return secured

    for days in (61, 62):
        HostDevice(url, seconds=5.0, secure=noted).close()
        make_host(tls, "a", ["127.0.0.1"], days)
    assert len(set(seen)) == 2


def test_a_key_that_others_can_read_is_refused(tls: Path) -> None:
    (tls / "callers/reader" / KEY).chmod(0o644)
    with pytest.raises(ConfigError, match="read by other users"):
        TlsFiles(tls / "callers/reader", server=False)
    with pytest.raises(ConfigError, match="hpstore host init"):
        TlsFiles(tls / "nowhere", server=False)


def test_a_peer_that_begins_no_handshake_holds_up_no_other(service: HostService, tls: Path) -> None:
    """Each handshake is on its connection's own thread."""
    import socket

    with socket.create_connection(service.address):
        device = device_of(service, tls / "callers/reader")
        device.close()


def test_a_pool_of_a_reader_reads(tmp_path: Path, tls: Path) -> None:
    """The settings name the certificates; a reader opens the pool to read, a stranger cannot."""
    admit = admit_certified(TlsFiles(tls / "hosts/a", server=True))
    with HostService("127.0.0.1", 0, admit=admit) as service:
        places = [tmp_path / f"d{i}" for i in range(3)]
        for place in places:
            place.mkdir()
            service.export(LocalDevice(str(place)))
        urls = [f"hpd://127.0.0.1:{service.address[1]}/{i}" for i in range(3)]

        def settings(role: str) -> Settings:
            return Settings(
                memory_bytes=16 * MIB,
                run_directory=str(tmp_path / "run"),
                certificates=str(tls / "callers" / role),
            )

        config = tmp_path / "pool.toml"
        with hpstore.create(
            urls, data=2, parity=1, config=config, settings=settings("keeper")
        ) as pool:
            pool.put("a", b"a" * 100_000)
        text = config.read_text()
        config.write_text(text.replace("callers/keeper", "callers/writer"))
        with hpstore.open(config) as pool:
            pool.put("b", b"b")
            pool.delete("b")
        config.write_text(text.replace("callers/keeper", "callers/reader"))
        with hpstore.open(config, read_only=True) as pool:
            assert bytes(pool.get("a")) == b"a" * 100_000
        config.write_text(text.replace("callers/keeper", "callers/none"))
        with pytest.raises((ConfigError, hpstore.HpstoreError), match="hpstore host init"):
            hpstore.open(config, read_only=True)


def test_an_operation_for_which_the_role_is_too_low_says_so(tmp_path: Path, tls: Path) -> None:
    """The certificate was replaced while the pool is open: not that devices are lost. What
    answers again has no problem any more."""
    places = [tmp_path / f"d{number}" for number in range(3)]
    files = tmp_path / "files"
    shutil.copytree(tls / "callers/keeper", files)

    def serve(port: int) -> HostService:
        admit = admit_certified(TlsFiles(tls / "hosts/a", server=True))
        service = HostService("127.0.0.1", port, admit=admit)
        for place in places:
            place.mkdir(exist_ok=True)
            service.export(LocalDevice(str(place)))
        return service

    service = serve(0)
    settings = Settings(
        memory_bytes=16 * MIB, run_directory=str(tmp_path / "run"), certificates=str(files)
    )
    urls = [f"hpd://127.0.0.1:{service.address[1]}/{number}" for number in range(3)]
    make_caller(tmp_path / "other", "keeper", CallerRole.KEEPER, 30)  # of another authority
    shutil.copy(tls / "authority" / AUTHORITY, tmp_path / "other/callers/keeper" / AUTHORITY)
    config = tmp_path / "pool.toml"
    with hpstore.create(urls, data=2, parity=1, config=config, settings=settings) as pool:
        pool.put("a", b"a")
        for given, reason in (
            (tls / "callers/reader", "needs the role writer"),
            (tmp_path / "other/callers/keeper", "refused by TLS"),
        ):
            shutil.copytree(given, files, dirs_exist_ok=True)
            service.close()
            service = serve(service.address[1])
            with pytest.raises(DeviceDenied, match=reason):
                pool.put("a", b"b")
        shutil.copytree(tls / "callers/keeper", files, dirs_exist_ok=True)
        pool.put("a", b"b")
        assert bytes(pool.get("a")) == b"b"
        assert [device.problem for device in pool.status().devices] == [""] * 3
    service.close()


def test_threads_of_one_process_share_a_session_over_tls(service: HostService, tls: Path) -> None:
    """One handle, read by several threads on connections of their own."""
    device = device_of(service, tls / "callers/keeper")
    data = pattern(16 * PAGE)
    store(device, PATH, data)
    reader = device.open(PATH)
    wrong: list[int] = []

    def read(number: int) -> None:
        target = pattern(PAGE, number)
        reader.read_into(number * PAGE, target)
        if target.tobytes() != data[number * PAGE :][:PAGE].tobytes():
            wrong.append(number)

    threads = [threading.Thread(target=read, args=(n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    reader.close()
    device.close()
    assert isinstance(device._links, HostLinks)
