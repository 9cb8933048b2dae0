"""What a metered device notes of its calls, and what it leaves alone."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from hpstore.devices.base import Device, Stamp
from hpstore.devices.local import LocalDevice
from hpstore.devices.memory import MemoryDevice
from hpstore.devices.wrappers import FaultyDevice, ThrottledDevice
from hpstore.errors import DeviceError, DeviceFull, DeviceMissing, DeviceReadOnly
from hpstore.health.detect.evidence import Media, Traits
from hpstore.health.detect.io_recorder import IoOutcome, IoRecorder, Operation
from hpstore.health.detect.media import traits_of
from hpstore.health.detect.metered_device import DeviceMeter, MeteredDevice
from hpstore.testing import PAGE, ManualClock, fetch, pattern, store
from tests.fault.common import poll

PATH = "objects/a/@0"
READ, WRITE, SYNC, META = Operation.READ, Operation.WRITE, Operation.SYNC, Operation.META


def metered(inner: Device, clock: ManualClock | None = None) -> tuple[MeteredDevice, IoRecorder]:
    recorder = IoRecorder()
    now = (clock or ManualClock()).monotonic
    return MeteredDevice(inner, DeviceMeter(recorder, now, lambda: None)), recorder


def test_every_call_is_noted_with_its_operation_and_bytes() -> None:
    device, recorder = metered(MemoryDevice())
    store(device, PATH, pattern(3 * PAGE))
    assert fetch(device, PATH) == pattern(3 * PAGE).tobytes()
    rows = recorder.drain()
    found = list(zip(rows.operation.tolist(), rows.nbytes.tolist(), strict=True))
    size = 3 * PAGE
    assert found == [
        (META, size),
        (WRITE, size),
        (SYNC, 0),
        (META, 0),
        (SYNC, 0),
        (META, 0),
        (READ, size),
    ]
    assert set(rows.outcome) == {IoOutcome.OK}
    assert set(rows.in_flight) == {1}


def test_the_time_is_that_of_the_device_call_by_the_clock() -> None:
    """Two seconds a page."""
    clock = ManualClock()
    device, recorder = metered(ThrottledDevice(MemoryDevice(), PAGE / 2, clock), clock)
    store(device, PATH, pattern(PAGE))
    rows = recorder.drain()
    assert rows.seconds[rows.operation == WRITE].tolist() == [2.0]


@pytest.mark.parametrize(
    ("letter", "kind", "counts"),
    [
        ("E", DeviceError, True),
        ("D", DeviceError, True),
        ("N", DeviceFull, False),
        ("O", DeviceReadOnly, False),
    ],
)
def test_errors_count_but_a_full_or_read_only_device_is_no_failing_one(
    letter: str, kind: type[DeviceError], counts: bool
) -> None:
    inner = FaultyDevice(MemoryDevice(), letter)
    device, recorder = metered(inner)
    with pytest.raises(kind):
        device.stamp(PATH)
    assert recorder.drain().outcome.tolist() == [IoOutcome.ERROR if counts else IoOutcome.OK]
    assert recorder.oldest_seconds(1e9) == 0


def test_a_name_that_is_not_there_is_no_error() -> None:
    device, recorder = metered(MemoryDevice())
    with pytest.raises(FileNotFoundError):
        device.open("objects/none")
    assert recorder.drain().outcome.tolist() == [IoOutcome.OK]


@pytest.mark.parametrize("kind", ["local", "host", "store"])
def test_a_host_or_store_that_is_away_makes_no_failing_disks(kind: str) -> None:
    """It restarts, and they are well. A local device that went is none to trust."""
    remote = kind != "local"

    class Away(MemoryDevice):
        host_disk = object() if kind == "host" else None

        def stamp(self, path: str) -> Stamp | None:
            raise DeviceMissing("connection refused")

    away = Away()
    away.mode = "remote" if kind == "store" else away.mode
    device, recorder = metered(away)
    for _ in range(20):
        with pytest.raises(DeviceMissing):
            device.stamp(PATH)
    assert recorder.drain().outcome.tolist() == ([] if remote else [IoOutcome.ERROR] * 20)
    assert recorder.oldest_seconds(1e9) == 0


def test_a_late_call_is_seen_in_flight_and_timed_when_it_ends() -> None:
    """PROTOCOL 21: nobody waits for it any more, and it still counts."""
    clock = ManualClock()
    inner = FaultyDevice(MemoryDevice(), "H")
    device, recorder = metered(inner, clock)
    thread = threading.Thread(target=device.stamp, args=(PATH,), daemon=True)
    thread.start()
    poll(20, lambda: recorder.oldest_seconds(clock.monotonic() + 1) > 0)
    clock.advance(7.0)
    assert recorder.oldest_seconds(clock.monotonic()) == 7.0
    inner.released.set()
    thread.join(20)
    assert recorder.drain().seconds.tolist() == [7.0]


def test_open_files_keep_their_descriptor_for_batches(tmp_path: Path) -> None:
    """And a device that must see each read keeps it from them."""
    plain = LocalDevice(str(tmp_path))
    plain.prepare()
    store(plain, PATH, pattern(PAGE))
    device, _ = metered(plain)
    handle = device.open(PATH)
    assert os.fstat(handle.descriptor).st_size == PAGE
    handle.close()
    hidden = metered(FaultyDevice(plain))[0].open(PATH)
    assert hidden.descriptor == -1
    hidden.close()


def disk(root: Path, directory: Path, name: str, rotates: str, *, partition: bool = False) -> None:
    """A block device in a made-up /sys that `directory` lies on."""
    number = os.stat(directory).st_dev
    block = root / "devices" / name
    (block / "queue").mkdir(parents=True)
    (block / "device").mkdir()
    (block / "queue" / "rotational").write_text(f"{rotates}\n")
    (block / "device" / "model").write_text("  ACME 9000 \n")
    target = block / f"{name}p1" if partition else block
    target.mkdir(exist_ok=True)
    links = root / "dev" / "block"
    links.mkdir(parents=True)
    (links / f"{os.major(number)}:{os.minor(number)}").symlink_to(target)


@pytest.mark.parametrize(
    ("name", "rotates", "media"),
    [
        ("nvme0n1", "0", Media.NVME),
        ("sda", "0", Media.SSD),
        ("sda", "1", Media.HDD),
        ("vda", "1", Media.UNKNOWN),
        ("loop3", "1", Media.UNKNOWN),
    ],
)
@pytest.mark.parametrize("partition", [True, False])
def test_the_kind_of_a_disk_is_what_the_system_says(
    tmp_path: Path, name: str, rotates: str, media: Media, partition: bool
) -> None:
    """Of a whole disk and a partition; of virtual ones it says nothing that could be trusted."""
    disk(tmp_path / "sys", tmp_path, name, rotates, partition=partition)
    found = traits_of(f"file://{tmp_path}", sys_root=str(tmp_path / "sys"))
    assert found.media is media
    assert found.model == ("ACME 9000" if media is not Media.UNKNOWN else "")


def test_what_is_no_disk_is_of_an_unknown_kind(tmp_path: Path) -> None:
    assert traits_of(str(tmp_path), sys_root=str(tmp_path / "none")) == Traits()
    assert traits_of(str(tmp_path / "gone")) == Traits()
    assert traits_of("memory://x") == Traits()
    assert traits_of("s3://bucket/x").media is Media.REMOTE


@pytest.mark.parametrize(
    ("below", "media"),
    [
        ({"nvme0n1": "0", "nvme1n1": "0"}, Media.NVME),
        ({"sda": "1"}, Media.HDD),
        ({"sda": "1", "nvme0n1": "0"}, Media.UNKNOWN),
        ({"vda": "1"}, Media.UNKNOWN),
        ({}, Media.UNKNOWN),
    ],
)
def test_a_mapped_disk_is_of_the_kind_of_those_below(
    tmp_path: Path, below: dict[str, str], media: Media
) -> None:
    """LVM, encryption and md: where all below are of one kind; a partition is its disk."""
    root = tmp_path / "sys"
    disk(root, tmp_path, "dm-0", "1")
    slaves = root / "devices" / "dm-0" / "slaves"
    slaves.mkdir()
    for name, rotates in below.items():
        block = root / "devices" / name
        (block / "queue").mkdir(parents=True)
        (block / "queue" / "rotational").write_text(rotates)
        (block / f"{name}p1").mkdir()
        (slaves / f"{name}p1").symlink_to(block / f"{name}p1")
    assert traits_of(str(tmp_path), sys_root=str(root)).media is media


@pytest.mark.parametrize(
    ("kind", "media"), [("nfs4", Media.REMOTE), ("ext4", Media.HDD), ("tmpfs", Media.HDD)]
)
def test_a_file_system_of_a_network_is_remote(tmp_path: Path, kind: str, media: Media) -> None:
    """By the table of mounts; lines that are none are passed over."""
    number = os.stat(tmp_path).st_dev
    disk(tmp_path / "sys", tmp_path, "sda", "1")
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "\nx\n22 1 0:1 / /proc rw - proc proc rw\n"
        f"36 22 {os.major(number)}:{os.minor(number)} / /mnt rw shared:1 - {kind} a:/b rw\n"
    )
    found = traits_of(str(tmp_path), sys_root=str(tmp_path / "sys"), mounts=str(mounts))
    assert found.media is media
