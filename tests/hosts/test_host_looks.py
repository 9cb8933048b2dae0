"""A survey asks each host once, for all its disks, and a disk that hangs holds no other."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("httptools", reason="needs the extra hosts")

import hpstore
from hpstore.config import Settings
from hpstore.devices.base import DirectoryEntry, Usage
from hpstore.devices.host_device import HostDevice
from hpstore.devices.host_disks import look_at_disks
from hpstore.devices.host_links import HostLinks
from hpstore.devices.local import LocalDevice
from hpstore.errors import DeviceError, DeviceFull, DeviceMissing, VersionConflict
from hpstore.format.disk_looks import DiskLook, encode_looks
from hpstore.format.host_calls import MOST_LISTED
from hpstore.format.records import IDENTITY_FILE, POOL_FILE, Identity
from hpstore.hosts import host_looks, served_connection
from hpstore.hosts.host_service import HostService
from hpstore.objects.survey import survey_key, survey_keys
from hpstore.runtime.wire_stream import WireStream
from hpstore.testing import PAGE, pattern, store
from hpstore.units import MIB
from tests.fault.common import poll


class HangingDisk(LocalDevice):
    """Lists nothing while `free` is not set."""

    free: threading.Event
    failing: Exception | None = None
    waiting: int = 0

    def entries(self, path: str) -> list[DirectoryEntry]:
        self.waiting += not self.free.is_set()
        self.free.wait(60)
        if self.failing is not None:
            raise self.failing
        return super().entries(path)

    def listings(self, paths: Sequence[str]) -> list[list[DirectoryEntry]]:
        return [self.entries(path) for path in paths]


@contextmanager
def host(places: Sequence[Path]) -> Iterator[tuple[list[HangingDisk], list[str]]]:
    """A service in this process, and its disks."""
    with HostService("127.0.0.1", 0) as service:
        disks = []
        for place in places:
            place.mkdir()
            disk = HangingDisk(str(place))
            disk.free = threading.Event()
            disk.free.set()
            disk.prepare()
            service.export(disk)
            disks.append(disk)
        port = service.address[1]
        try:
            yield disks, [f"hpd://127.0.0.1:{port}/{i}" for i in range(len(disks))]
        finally:
            for disk in disks:
                disk.free.set()


@pytest.fixture(autouse=True)
def _busy_machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk is late when it hangs, and not when others keep this machine busy."""
    if "hangs" not in request.node.name:
        monkeypatch.setattr(host_looks, "WAIT_SECONDS", 10.0)


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[list[HangingDisk], list[HostDevice]]]:
    with host([tmp_path / "a", tmp_path / "b"]) as (disks, urls):
        devices = [HostDevice(url, seconds=20.0) for url in urls]
        yield disks, devices
        for device in devices:
            device.close()


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[tuple[hpstore.Pool, list[HangingDisk]]]:
    """4+2 over three hosts of two disks."""
    with ExitStack() as stack:
        disks: list[HangingDisk] = []
        urls: list[str] = []
        for name in "abc":
            made = stack.enter_context(host([tmp_path / f"{name}{i}" for i in range(2)]))
            disks += made[0]
            urls += made[1]
        settings = Settings(
            memory_bytes=64 * MIB,
            run_directory=str(tmp_path / "run"),
            tls="plain",
            device_deadline_seconds=20.0,
        )
        domains = [name for name in "abc" for _ in range(2)]
        with hpstore.create(
            urls,
            data=4,
            parity=2,
            config=tmp_path / "pool.toml",
            settings=settings,
            domains=domains,
        ) as opened:
            yield opened, disks


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Requests that this process makes, by operation; without those that only open a session."""
    found: Counter[str] = Counter()
    plain = HostLinks._send

    def send(
        links: HostLinks, stream: WireStream, operation: str, *rest: Any, **how: Any
    ) -> list[str]:
        if operation != "hello":
            found[operation] += 1
        return plain(links, stream, operation, *rest, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostLinks, "_send", send)
        yield found


def test_a_survey_is_one_request_for_each_host(
    pool: tuple[hpstore.Pool, list[HangingDisk]],
) -> None:
    """Of a key, of many, and of one that is to be written; each sees what the disks have."""
    opened = pool[0]
    for number in range(5):
        opened.put(f"k{number}", b"x" * 200_000)
    context = opened._session.store
    for keys in (["k0"], [f"k{n}" for n in range(5)], ["absent"]):
        with counted() as found:
            surveys = survey_keys(context, keys)
        assert found == {"look": 3}
        for key, survey in surveys.items():
            assert len(survey.files) == (0 if key == "absent" else 6)
            assert not survey.unknown
    with counted() as found:
        survey = survey_key(context, "k0", offers=True)
    assert found == {"look": 3}
    assert survey.offered is not None
    for device, usage in survey.offered.items():
        assert usage is not None
        assert abs(usage.free - context.view.devices[device].usage().free) < 100 * MIB
        assert usage.total == context.view.devices[device].usage().total


def test_a_small_put_and_a_small_get_take_few_requests(
    pool: tuple[hpstore.Pool, list[HangingDisk]],
) -> None:
    """A put of three copies: a look, a file and its name on each disk, and a look before it is
    acknowledged. A get: a look, and a copy with the answer that it is open."""
    opened = pool[0]
    for _ in range(2):
        opened.put("warm", b"x" * 4096)
    with counted() as found:
        opened.put("k", b"y" * 4096)
    shared = found.pop("look") - 3  # of two copies on the disks of one host
    assert found["stamp"] == 3 - 2 * shared
    del found["stamp"]
    assert found == {"new_file": 3, "commit": 3}
    assert bytes(opened.get("k")) == b"y" * 4096
    with counted() as found:
        assert bytes(opened.get("k")) == b"y" * 4096
    assert found == {"look": 3, "open": 1}
    opened.put("wide", b"z" * 200_000)
    with counted() as found:
        assert bytes(opened.get("wide")) == b"z" * 200_000
    assert found == {"look": 3, "open": 4}


def test_a_large_put_and_a_large_get_take_few_requests(
    pool: tuple[hpstore.Pool, list[HangingDisk]],
) -> None:
    """Of each column: both ends of its file go with the sync, and its table comes with the answer
    that it is open."""
    opened, data = pool[0], b"x" * (8 * MIB)
    opened.put("warm", data)
    with counted() as found:
        opened.put("k", data)
    del found["look"], found["write"]
    assert found == {"create": 6, "seal": 6, "commit": 6}
    bytes(opened.get("k"))
    with counted() as found:
        assert bytes(opened.get("k")) == data
    assert found == {"look": 3, "open": 4, "read": 8}  # two runs of a column


def test_a_disk_that_hangs_holds_no_other(
    two: tuple[list[HangingDisk], list[HostDevice]],
) -> None:
    """The answer has the other disk's names while it hangs; when it goes on, so has its own."""
    disks, devices = two
    for device in devices:
        store(device, "objects/a/@1", pattern(PAGE))
    wanted = [(device, ["objects/a"]) for device in devices]
    disks[1].free.clear()
    for _ in range(2):
        good, late = look_at_disks(wanted, usage=True)
        assert isinstance(good, DiskLook)
        assert good.listings == [[("@1", False)]]
        assert isinstance(late, DiskLook)
        assert late.late
    disks[1].free.set()
    alone = look_at_disks(wanted[1:], usage=False)[0]
    assert isinstance(alone, DiskLook)
    assert alone.listings == [[("@1", False)]]


def test_a_disk_that_hangs_keeps_few_threads_of_the_service(
    two: tuple[list[HangingDisk], list[HostDevice]],
) -> None:
    """The thread that stands still in it, and those of its lane; not one for each look. What came
    by the connection of that thread goes on by another one."""
    disks, devices = two
    wanted = [(device, ["objects"]) for device in devices]
    disks[1].free.clear()
    for _ in range(6):
        good, late = look_at_disks(wanted, usage=False)
        assert isinstance(good, DiskLook)
        assert not good.late
        assert isinstance(late, DiskLook)
        assert late.late
        assert devices[0].stamp("objects/none") is None
    assert 1 <= disks[1].waiting <= 3


def test_who_ends_while_a_disk_hangs_holds_nothing_on_another(
    two: tuple[list[HangingDisk], list[HostDevice]], tmp_path: Path
) -> None:
    """The thread that stands still in it keeps no session: what the process had open is gone."""
    disks, devices = two
    devices[0].create(PAGE)
    assert len(list((tmp_path / "a" / "tmp").iterdir())) == 1
    disks[1].free.clear()
    look_at_disks([(device, ["objects"]) for device in devices], usage=False)
    devices[0].close()
    poll(20.0, lambda: not list((tmp_path / "a" / "tmp").iterdir()))
    assert not disks[1].free.is_set()


def test_a_look_that_cannot_be_answered_ends_its_connection_where_a_disk_hangs(
    two: tuple[list[HangingDisk], list[HostDevice]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller asks again at once, not when the disk has come back."""
    disks, devices = two
    refused: list[bool] = []

    def encode(looks: Sequence[DiskLook]) -> bytes:
        if not refused:
            refused.append(True)
            raise DeviceError("short of memory")
        return encode_looks(looks)

    monkeypatch.setattr(served_connection, "encode_looks", encode)
    disks[1].free.clear()
    began = time.monotonic()
    good, late = look_at_disks([(device, ["objects"]) for device in devices], usage=False)
    assert refused
    assert isinstance(good, DiskLook)
    assert isinstance(late, DiskLook)
    assert (good.late, late.late) == (False, True)
    assert time.monotonic() - began < 15  # the limit of a call is 20 s


def test_a_survey_goes_on_without_a_disk_that_hangs(
    pool: tuple[hpstore.Pool, list[HangingDisk]],
) -> None:
    """What it holds is unknown, as of a local disk that hangs; the other disk of its host is seen,
    and reads and writes work."""
    opened, disks = pool
    opened.put("k", b"x" * 200_000)
    disks[3].free.clear()
    context = opened._session.store
    hung = _served(opened, disks[3])
    survey = survey_key(context, "k", patience=0.25)
    assert survey.unknown == {hung}
    assert len(survey.files) == 5
    assert bytes(opened.get("k")) == b"x" * 200_000
    opened.put("k", b"y" * 200_000)
    disks[3].free.set()
    assert bytes(opened.get("k")) == b"y" * 200_000


def _served(opened: hpstore.Pool, disk: LocalDevice) -> str:
    """The id of the member that lies on a disk of a host."""
    data = Path(disk.url, IDENTITY_FILE).read_bytes()
    return Identity.decode(data, where=disk.url).device_id


def test_what_a_disk_raises_comes_with_the_answer_of_the_others(
    two: tuple[list[HangingDisk], list[HostDevice]],
) -> None:
    """By its class, with the URL of the disk that raised it; so does a disk that is not there."""
    disks, devices = two
    disks[1].failing = DeviceFull("no room for this test")
    good, bad = look_at_disks([(device, ["objects"]) for device in devices], usage=False)
    assert isinstance(good, DiskLook)
    assert isinstance(bad, DeviceFull)
    assert devices[1].url in str(bad)
    devices[1].number = 9
    good, bad = look_at_disks([(device, ["objects"]) for device in devices], usage=False)
    assert isinstance(good, DiskLook)
    assert "no such disk" in str(bad)


def test_a_disk_whose_space_is_not_known_shows_its_names_all_the_same(
    two: tuple[list[HangingDisk], list[HostDevice]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that is asked by itself: it takes nothing, and what it has is seen."""
    disks, devices = two

    def fails() -> Usage:
        raise DeviceError("no usage for this test")

    monkeypatch.setattr(disks[1], "usage", fails)
    good, poor = look_at_disks([(device, ["objects"]) for device in devices], usage=True)
    assert isinstance(good, DiskLook)
    assert good.usage is not None
    assert isinstance(poor, DiskLook)
    assert (poor.usage, list(poor.listings)) == (None, [[]])


def test_more_directories_than_one_request_names_are_several(
    two: tuple[list[HangingDisk], list[HostDevice]],
) -> None:
    """In the order that was asked for."""
    devices = two[1]
    store(devices[0], "objects/last/@7", pattern(PAGE))
    paths = [f"objects/k{n}" for n in range(MOST_LISTED)] + ["objects/last"]
    with counted() as found:
        first, second = look_at_disks([(device, paths) for device in devices], usage=True)
    assert found == {"look": 3}
    assert isinstance(first, DiskLook)
    assert isinstance(second, DiskLook)
    assert first.listings == [[]] * MOST_LISTED + [[("@7", False)]]
    assert second.listings == [[]] * (MOST_LISTED + 1)
    assert first.usage is not None


@pytest.mark.parametrize("together", [True, False])
def test_many_names_count_as_memory_until_they_are_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, together: bool
) -> None:
    """Callers that do not read what they have asked for keep no more than the service's limit."""
    held: list[int] = []
    plain = WireStream.send
    with HostService("127.0.0.1", 0) as service:
        (tmp_path / "a").mkdir()
        disk = LocalDevice(str(tmp_path / "a"))
        disk.prepare()
        service.export(disk)
        for number in range(400):
            (tmp_path / "a" / "objects" / f"{number:0200d}").touch()
        budget = service._shared.arena.budget

        def send(stream: WireStream, parts: Sequence[bytes | memoryview]) -> None:
            if sum(map(len, parts)) > 400 * 200:
                held.append(budget.used_bytes)
            plain(stream, parts)

        monkeypatch.setattr(WireStream, "send", send)
        device = HostDevice(f"hpd://127.0.0.1:{service.address[1]}/0", seconds=20.0)
        if together:
            (look,) = look_at_disks([(device, ["objects"])], usage=False)
            assert isinstance(look, DiskLook)
            assert len(look.listings[0]) == 400
        else:
            assert len(device.entries("objects")) == 400
        device.close()
    assert len(held) == 1
    assert held[0] >= 400 * 200
    assert budget.used_bytes == 0


def test_a_disk_that_was_wiped_is_unknown_and_not_empty(
    pool: tuple[hpstore.Pool, list[HangingDisk]],
) -> None:
    """Its record is gone: what it does not show may be there."""
    opened, disks = pool
    opened.put("k", b"x")
    Path(disks[0].url, POOL_FILE).unlink()
    context = opened._session.store
    survey = survey_key(context, "k")
    wiped = _served(opened, disks[0])
    assert survey.unknown == {wiped}
    with pytest.raises(DeviceMissing, match="wiped"):
        context.generation_on(wiped, context.view.devices[wiped])


def test_a_membership_that_moved_is_seen_by_the_commit_itself(
    pool: tuple[hpstore.Pool, list[HangingDisk]], tmp_path: Path
) -> None:
    """A put makes no look of its own before it gives a name: the service compares the record in
    one step with the rename (PROTOCOL 4), and the put is planned again."""
    opened, disks = pool
    opened.put("k", b"1")
    plain = HostLinks._send
    moved: list[int] = []

    def send(
        links: HostLinks, stream: WireStream, operation: str, *rest: Any, **how: Any
    ) -> list[str]:
        if operation == "commit" and not moved:
            moved.append(1)
            with hpstore.open(tmp_path / "pool.toml") as other:
                other.admin.devices.begin_drain(_served(opened, disks[0]))
        return plain(links, stream, operation, *rest, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostLinks, "_send", send)
        opened.put("k", b"2")
    assert moved
    assert opened._session.store.metrics.snapshot()["put_replanned_total"] >= 1
    assert bytes(opened.get("k")) == b"2"
    version = opened.stat("k").version
    opened.put("k", b"3", if_version=version)
    with pytest.raises(VersionConflict):
        opened.put("k", b"4", if_version=version)
