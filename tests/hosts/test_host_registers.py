"""Registers that the service of one host keeps, for hosts without etcd (PROTOCOL 15)."""

from __future__ import annotations

import os
import signal
import socket
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("httptools", reason="needs the extra hosts")

import hpstore
from hpstore.agreement.host_records import HostRecords
from hpstore.agreement.register_url import HostUrl, parse_register_url
from hpstore.config import Settings
from hpstore.devices.local import LocalDevice
from hpstore.errors import (
    ConfigError,
    DeviceDenied,
    DeviceError,
    MembershipError,
    RegistersForeign,
    RegistersUnavailable,
    VersionConflict,
)
from hpstore.format.record_calls import HostRecord, RecordSwap
from hpstore.hosts import record_file
from hpstore.hosts.host_limits import HostLimits
from hpstore.hosts.host_service import HostService
from hpstore.hosts.record_file import FILE, RecordFile
from hpstore.runtime.mutual_tls import TlsFiles
from hpstore.units import MIB
from tests.hosts.rig import RigHost, rig

NAME = "pool-1/0123456789abcdef/key-0001"
OTHER = "pool-1/0123456789abcdef/key-0002"


def swap(name: str, revision: int, data: bytes = b"x") -> RecordSwap:
    return RecordSwap(name=name, revision=revision, data=data)


# --- the file -----------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Iterator[RecordFile]:
    made = RecordFile(tmp_path / "registers")
    yield made
    made.close()


def test_a_swap_is_made_only_from_the_revision_that_it_names(file: RecordFile) -> None:
    assert file.read([NAME]) == [HostRecord()]
    assert not file.swap([swap(NAME, 5)])
    assert file.swap([swap(NAME, 0, b"one")])
    assert not file.swap([swap(NAME, 0, b"other")])
    (one,) = file.read([NAME])
    assert one.data == b"one"
    assert file.swap([swap(NAME, one.revision, b"two")])
    (two,) = file.read([NAME])
    assert (two.data, two.revision > one.revision) == (b"two", True)


def test_of_several_swaps_all_are_made_or_none(file: RecordFile) -> None:
    """In the middle, too, when the second of two cannot be written."""
    file.swap([swap(NAME, 0, b"one")])
    assert not file.swap([swap(OTHER, 0), swap(NAME, 0)])
    assert file.read([OTHER]) == [HostRecord()]
    (one,) = file.read([NAME])
    assert file.swap([swap(OTHER, 0, b"a"), swap(NAME, one.revision, b"b")])
    assert [found.data for found in file.read([OTHER, NAME])] == [b"a", b"b"]


def test_a_revision_is_given_once_also_after_a_record_was_removed(file: RecordFile) -> None:
    """Else a swap that arrives late would find the revision that it was made for."""
    file.swap([swap(NAME, 0)])
    (old,) = file.read([NAME])
    file.remove([NAME, OTHER])
    assert file.read([NAME]) == [HostRecord()]
    file.swap([swap(NAME, 0)])
    assert file.read([NAME])[0].revision > old.revision
    assert not file.swap([swap(NAME, old.revision, b"late")])


def test_another_service_on_the_file_sees_and_keeps_what_was_changed(
    file: RecordFile, tmp_path: Path
) -> None:
    """As a service that is started while the old one still ends."""
    file.swap([swap(NAME, 0, b"one")])
    second = RecordFile(tmp_path / "registers")
    (one,) = second.read([NAME])
    assert one.data == b"one"
    assert second.swap([swap(NAME, one.revision, b"two")])
    assert not file.swap([swap(NAME, one.revision, b"three")])
    second.close()


def test_a_file_that_cannot_be_used_says_so(file: RecordFile, tmp_path: Path) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / FILE).write_bytes(b"no database" * 100)
    with pytest.raises(ConfigError, match="cannot be kept"):
        RecordFile(tmp_path / "bad")
    (tmp_path / "plain").write_bytes(b"")
    with pytest.raises(ConfigError, match="cannot be kept"):
        RecordFile(tmp_path / "plain")
    with sqlite3.connect(tmp_path / "registers" / FILE) as raw:
        raw.execute("DROP TABLE records")
    with pytest.raises(DeviceError, match="cannot be used"):
        file.read([NAME])


def test_registers_have_a_limit(file: RecordFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_file, "MOST_RECORDS", 1)
    assert file.swap([swap(NAME, 0)])
    with pytest.raises(DeviceError, match="its limit"):
        file.swap([swap(OTHER, 0)])
    (one,) = file.read([NAME])
    assert file.swap([swap(NAME, one.revision)])


def test_what_is_read_at_once_has_a_limit(file: RecordFile) -> None:
    """Also of one register that is asked for often: each is in the answer."""
    file.swap([swap(NAME, 0, b"x" * 1000), swap(OTHER, 0, b"y" * 500)])
    assert file.nbytes([NAME, OTHER, NAME]) == 2500
    assert len(file.read([NAME, OTHER], most_bytes=1500)) == 2
    with pytest.raises(DeviceError, match="more than 1499 bytes"):
        file.read([NAME, OTHER], most_bytes=1499)


# --- over the network ---------------------------------------------------------------------------


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[RigHost]]:
    with rig(tmp_path, hosts=3, disks=2) as made:
        yield made


def grow(tmp_path: Path, hosts: list[RigHost], seconds: float = 2.0) -> hpstore.Pool:
    """A pool over the hosts, whose registers the second keeps."""
    pool = hpstore.create(
        [url for host in hosts for url in host.urls()],
        data=4,
        parity=2,
        config=tmp_path / "pool.toml",
        domains=[host.name for host in hosts for _ in host.disks],
        settings=Settings(
            memory_bytes=64 * MIB,
            run_directory=str(tmp_path / "run"),
            tls="plain",
            device_deadline_seconds=10.0,
            registers_deadline_seconds=seconds,
        ),
    )
    pool.put("before", b"x", if_absent=True)
    pool.admin.move_registers(f"host://127.0.0.1:{hosts[1].port}")
    return pool


def store_of(host: RigHost, pool: str = "p") -> HostRecords:
    url = HostUrl(host="127.0.0.1", port=host.port)
    return HostRecords(url, f"{pool}/0", seconds=5.0, secure=None)


def test_registers_move_to_a_host_and_back_while_the_pool_is_used(
    hosts: list[RigHost], tmp_path: Path
) -> None:
    """Conditional puts are judged there, by every process; another process finds the place."""
    with grow(tmp_path, hosts) as pool:
        found = pool.admin.registers_report()
        assert (found.kind, found.problem) == ("outside", "")
        assert found.endpoints == {found.url: ""}
        pool.put("k", b"1", if_absent=True)
        with hpstore.open(tmp_path / "pool.toml") as other:
            for key in ("before", "k"):
                with pytest.raises(VersionConflict):
                    other.put(key, b"2", if_absent=True)
            other.put("k", b"2", if_version=other.stat("k").version)
        assert bytes(pool.get("k")) == b"2"
        pool.admin.move_registers("devices")
        pool.put("k2", b"1", if_absent=True)
        with pytest.raises(VersionConflict):
            pool.put("k", b"3", if_absent=True)
    with sqlite3.connect(tmp_path / "registers-b" / FILE) as raw:
        assert raw.execute("SELECT count(*) FROM records").fetchone()[0] >= 4096


def test_while_that_host_is_stopped_conditional_puts_and_changes_are_refused_and_all_else_goes_on(
    hosts: list[RigHost], tmp_path: Path
) -> None:
    """SIGSTOP: its connections stay. When it goes on, so do they; the same after a restart."""
    with grow(tmp_path, hosts) as pool:
        pool.put("k", b"x", if_absent=True)
        hosts[1].stop()
        try:
            for _ in range(2):
                with pytest.raises(RegistersUnavailable, match="Nothing was changed"):
                    pool.put("new", b"x", if_absent=True)
            with pytest.raises((RegistersUnavailable, MembershipError)):
                pool.evict(hosts[0].urls()[0])
            pool.put("plain", b"x")
            assert bytes(pool.get("k")) == b"x"
            pool.delete("plain")
            assert "does not answer" in pool.admin.registers_report().problem
        finally:
            hosts[1].send(signal.SIGCONT)
        pool.put("new", b"x", if_absent=True)
        hosts[1].kill()
        with pytest.raises(RegistersUnavailable):
            pool.put("newer", b"x", if_absent=True)
        hosts[1].start()
        pool.put("newer", b"x", if_absent=True)
        with pytest.raises(VersionConflict):
            pool.put("new", b"x", if_absent=True)


def test_what_was_answered_survives_the_death_of_the_service(hosts: list[RigHost]) -> None:
    """Killed amid swaps: each that was answered is there, and what was not is there or not."""
    store = store_of(hosts[0])
    answered = threading.Event()
    done = 0

    def count() -> None:
        nonlocal done
        try:
            while True:
                now = store.read("key-0001", 5.0)
                if store.swap("key-0001", b"%d" % (done + 1), now.revision, 5.0):
                    done += 1
                if done == 20:
                    answered.set()
        except RegistersUnavailable:
            answered.set()

    thread = threading.Thread(target=count, daemon=True)
    thread.start()
    assert answered.wait(60)
    hosts[0].kill()
    thread.join(60)
    hosts[0].start()
    found = store.read("key-0001", 5.0)
    assert found.data is not None
    assert int(found.data) - done in (0, 1)
    store.close()


def test_lost_registers_are_noticed_and_reset(hosts: list[RigHost], tmp_path: Path) -> None:
    """Another directory, or an empty one, has no records: that is told from records that were
    never written."""
    with grow(tmp_path, hosts) as pool:
        hosts[1].kill()
        hosts[1].registers = tmp_path / "empty"
        hosts[1].start()
        with pytest.raises(RegistersForeign, match="registers reset"):
            pool.put("k", b"x", if_absent=True)
        assert bytes(pool.get("before")) == b"x"
        pool.admin.reset_registers()
        pool.put("k", b"x", if_absent=True)
        with pytest.raises(VersionConflict):
            pool.put("before", b"y", if_absent=True)


def test_a_service_that_keeps_none_says_how_it_would(hosts: list[RigHost], tmp_path: Path) -> None:
    hosts[1].kill()
    hosts[1].registers = None
    hosts[1].start()
    with pytest.raises(RegistersUnavailable, match="--registers DIRECTORY"):
        grow(tmp_path, hosts)


def test_a_url_of_a_host_is_read() -> None:
    assert parse_register_url("host://b") == HostUrl(host="b", port=7200)
    assert parse_register_url("host://[fd00::2]:7300/") == HostUrl(host="fd00::2", port=7300)
    assert str(HostUrl(host="fd00::2", port=7300)) == "host://[fd00::2]:7300"
    for text in ("host://", "host://b/x", "host://b?x=1", "host://a,b", "host://u@b", "host://b:0"):
        with pytest.raises(ConfigError, match="names no registers"):
            parse_register_url(text)


# --- roles --------------------------------------------------------------------------------------


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[tuple[HostUrl, Path]]:
    """A service over mutual TLS, and the certificates of its callers."""
    pytest.importorskip("cryptography", reason="needs the extra hosts")
    from hpstore.hosts.admission import admit_certified
    from hpstore.hosts.caller_roles import CallerRole
    from hpstore.hosts.certificates import make_caller, make_host

    make_host(tmp_path / "tls", "a", ["127.0.0.1"], 30)
    for role in CallerRole:
        make_caller(tmp_path / "tls", role.name.lower(), role, 30)
    records = RecordFile(tmp_path / "registers")
    (tmp_path / "disk").mkdir()
    admit = admit_certified(TlsFiles(tmp_path / "tls/hosts/a", server=True))
    with HostService("127.0.0.1", 0, admit=admit, records=records) as service:
        service.export(LocalDevice(str(tmp_path / "disk")))
        yield HostUrl(host="127.0.0.1", port=service.address[1]), tmp_path / "tls/callers"
    records.close()


def test_a_caller_without_a_role_hears_why_for_a_request_with_a_body(
    guarded: tuple[HostUrl, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service takes the body before it ends the connection: else the caller cannot send the
    rest, and does not come to the answer."""
    from hpstore.hosts.caller_roles import CallerRole
    from hpstore.hosts.certificates import make_caller

    url, callers = guarded
    monkeypatch.setattr("hpstore.hosts.certificates.ROLE_URI", "urn:other:role:")
    make_caller(callers.parent, "outsider", CallerRole.KEEPER, 30)
    secure = TlsFiles(callers / "outsider", server=False).call
    for _ in range(4):
        store = HostRecords(url, "p/0", seconds=5.0, secure=secure)
        with pytest.raises(DeviceDenied, match="the certificate of outsider has no role"):
            store._links.call("records_swap", bodies=[bytes(6 * MIB)])
        store.close()


def test_a_reader_may_not_write_registers_and_only_a_keeper_the_membership(
    guarded: tuple[HostUrl, Path],
) -> None:
    """All may look. Who is refused is told so at once, and by an error that is no lack of an
    answer: it is not tried again."""
    url, callers = guarded

    def store(role: str) -> HostRecords:
        secure = TlsFiles(callers / role, server=False).call
        return HostRecords(url, "p/0", seconds=5.0, secure=secure)

    reader, writer, keeper = map(store, ("reader", "writer", "keeper"))
    assert keeper.swap("record", b"members", "", 5.0)
    assert writer.swap("key-0001", b"claim", "", 5.0)
    for one in (reader, writer, keeper):
        assert one.read("key-0001", 5.0).data == b"claim"
        assert one.read("record", 5.0).data == b"members"
    revision = keeper.read("record", 5.0).revision
    refused: tuple[Callable[[], object], ...] = (
        lambda: reader.swap("key-0001", b"x", "1", 5.0),
        lambda: reader.remove("key-0001", 5.0),
        lambda: writer.swap("record", b"x", revision, 5.0),
        lambda: writer.remove("record", 5.0),
    )
    for call in refused:
        with pytest.raises(RegistersForeign, match=r"needs the role (writer|keeper)"):
            call()
    assert keeper.read("record", 5.0).data == b"members"
    for one in (reader, writer, keeper):
        one.close()


def test_a_large_answer_waits_for_memory_and_has_a_limit(tmp_path: Path) -> None:
    """What the service holds for answers that are not taken is within its --memory."""
    big = MIB // 2
    records = RecordFile(tmp_path / "registers")
    names = [f"key-{number:04d}" for number in range(20)]
    records.swap([swap(f"p/0/{name}", 0, b"x" * big) for name in names])
    (tmp_path / "disk").mkdir()
    limits = HostLimits(arena_bytes=4 * MIB, piece_bytes=MIB, deadline_seconds=0.2)
    with HostService("127.0.0.1", 0, limits=limits, records=records) as service:
        service.export(LocalDevice(str(tmp_path / "disk")))
        store = HostRecords(
            HostUrl(host="127.0.0.1", port=service.address[1]), "p/0", seconds=5.0, secure=None
        )
        assert len(store.read_many(names[:2], 5.0)) == 2
        with pytest.raises(RegistersUnavailable, match="ask for fewer at once"):
            store.read_many(names, 5.0)
        lease = service._shared.arena.lease(3 * MIB)
        with pytest.raises(RegistersUnavailable, match="short of memory"):
            store.read_many(names[:2], 5.0)
        lease.release()
        assert len(store.read_many(names[:2], 5.0)) == 2
        store.close()
    records.close()


def test_what_tls_breaks_off_may_have_been_changed(guarded: tuple[HostUrl, Path]) -> None:
    """Bytes that are no TLS come after a request was sent: that it was not carried out is not
    certain, which an error of rights would say."""
    url, callers = guarded
    files = TlsFiles(callers / "keeper", server=False)
    spoilt = TlsFiles(callers.parent / "hosts/a", server=True)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            secured, _ = spoilt.answer(server.accept()[0])
            secured.recv(1000)
            os.write(secured.fileno(), b"no record of TLS")
            secured.close()

        thread = threading.Thread(target=answer)
        thread.start()
        there = HostUrl(host=url.host, port=server.getsockname()[1])
        store = HostRecords(there, "p/0", seconds=5.0, secure=files.call)
        with pytest.raises(RegistersUnavailable, match="may have happened"):
            store.swap("key-0001", b"x", "", 5.0)
        thread.join()
        store.close()


def test_registers_on_a_disk_that_hangs_keep_no_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each holds one of the connections by which the disks of this host are reached, too."""
    monkeypatch.setattr("hpstore.hosts.record_file._TURN_SECONDS", 0.05)
    file = RecordFile(tmp_path)
    ended = threading.Event()

    def calls() -> None:
        for call in (lambda: file.read(["p/0/a"]), lambda: file.remove(["p/0/a"])):
            with pytest.raises(DeviceError, match="its disk hangs"):
                call()
        file.close()
        ended.set()

    with file._turn:  # as a call does that is in a sync
        threading.Thread(target=calls, daemon=True).start()
        assert ended.wait(10)
    assert file.read(["p/0/a"])[0].data is None
    file.close()
