"""Bytes in the page cache of a host go to the socket as they are, without a copy in its service."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("httptools", reason="needs the extra hosts")

from hpstore.devices import local_files
from hpstore.devices.host_device import HostDevice
from hpstore.devices.host_files import HostReader
from hpstore.devices.local import LocalDevice
from hpstore.devices.mount_table import MountEntry
from hpstore.errors import DeviceError
from hpstore.format.host_calls import encode_json
from hpstore.hosts import served_connection
from hpstore.hosts.host_limits import HostLimits
from hpstore.hosts.host_service import HostService
from hpstore.runtime.buffers import aligned_array
from hpstore.runtime.wire_stream import WireStream
from hpstore.testing import pattern, store
from hpstore.units import MIB

PATH = "objects/a/@1"
SIZE = 5 * MIB


@pytest.fixture
def service(tmp_path: Path) -> Iterator[HostService]:
    """Of one disk that is read by the page cache, with one call at a time."""
    with HostService("127.0.0.1", 0, limits=HostLimits(calls_of_disk=1)) as made:
        (tmp_path / "disk").mkdir()
        disk = LocalDevice(str(tmp_path / "disk"), direct=False)
        disk.prepare()
        made.export(disk)
        yield made


@pytest.fixture
def device(service: HostService) -> Iterator[HostDevice]:
    made = HostDevice(f"hpd://127.0.0.1:{service.address[1]}/0", seconds=20.0)
    store(made, PATH, pattern(SIZE))
    yield made
    made.close()


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that were sent out of files."""
    found: list[int] = []
    plain = WireStream.send_file

    def send_file(
        stream: WireStream,
        head: bytes,
        file: int,
        offset: int,
        nbytes: int,
        *rest: Any,
        **more: Any,
    ) -> None:
        plain(stream, head, file, offset, nbytes, *rest, **more)
        found.append(nbytes)

    monkeypatch.setattr(WireStream, "send_file", send_file)
    return found


@pytest.mark.parametrize("direct", [False, True])
def test_reads_are_sent_out_of_the_page_cache_unless_the_file_is_past_it(
    device: HostDevice, sent: list[int], monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    """From any page on; the bytes are the same either way."""
    if direct:
        monkeypatch.setattr(served_connection, "is_direct", lambda _: True)
    reader = device.open(PATH)
    for offset in (0, 4096, 3 * MIB):
        target = aligned_array(SIZE - offset)
        reader.read_into(offset, target)
        assert target.tobytes() == pattern(SIZE)[offset:].tobytes()
    assert sum(sent) == (0 if direct else 3 * SIZE - 3 * MIB - 4096)
    reader.close()


def test_a_file_that_ends_early_is_an_error_and_no_short_answer(
    device: HostDevice, sent: list[int], tmp_path: Path
) -> None:
    """The answer is cut; the caller asks for all at once, and the device says what is wrong."""
    reader = device.open(PATH)
    os.truncate(tmp_path / "disk" / PATH, 3 * MIB)
    with pytest.raises(DeviceError, match="file ends at"):
        reader.read_into(0, aligned_array(SIZE))
    assert sent == []
    target = aligned_array(MIB)
    reader.read_into(0, target)
    assert target.tobytes() == pattern(SIZE)[:MIB].tobytes()
    reader.close()


def test_what_fails_within_an_answer_cuts_it(
    device: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No error is sent in the place of bytes: the caller asks again, and has them all."""
    plain, calls = os.sendfile, list[int]()

    def sendfile(out: int, file: int, offset: int, nbytes: int) -> int:
        calls.append(offset)
        if len(calls) == 2:
            raise OSError(errno.EIO, "for this test")
        return plain(out, file, offset, min(nbytes, MIB))

    monkeypatch.setattr(os, "sendfile", sendfile)
    reader = device.open(PATH)
    target = aligned_array(SIZE)
    reader.read_into(0, target)
    assert calls == [0, MIB]
    assert target.tobytes() == pattern(SIZE).tobytes()
    reader.close()


def test_who_does_not_read_keeps_no_call_of_the_disk(
    device: HostDevice, service: HostService
) -> None:
    """An answer waits for its reader: other calls of the disk go on, which takes one at a time."""
    reader = device.open(PATH)
    with _who_reads_a_byte(service, device, reader):
        for _ in range(20):
            assert device.stamp(PATH) is not None
    reader.close()


@contextmanager
def _who_reads_a_byte(
    service: HostService, device: HostDevice, reader: HostReader
) -> Iterator[None]:
    """A caller who has asked for all of a file and has the first byte of the answer."""
    args = {"handle": reader._handle, "offset": 0, "nbytes": SIZE, "whole": False}
    head = (
        f"POST /v1/0/read HTTP/1.1\r\nHost: x\r\nHpd-Session: {device._links._session}\r\n"
        f"Hpd-Deadline-Ms: 20000\r\nHpd-Args: {encode_json(args).decode()}\r\n"
        "Content-Length: 0\r\n\r\n"
    )
    with socket.create_connection(service.address) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.sendall(head.encode())
        assert slow.recv(1) == b"H"
        yield


def test_who_does_not_read_for_too_long_is_cut(
    device: HostDevice, service: HostService, sent: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the limit of a piece for each that was taken."""
    reader, ended = device.open(PATH), threading.Event()
    limits = replace(service._shared.limits, body_seconds=0.05)
    service._shared = replace(service._shared, limits=limits)
    plain = WireStream.close

    def close(stream: WireStream) -> None:
        plain(stream)
        ended.set()

    with _who_reads_a_byte(service, device, reader):
        monkeypatch.setattr(WireStream, "close", close)
        assert ended.wait(10)
        assert sent == []
    reader.close()


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [(["tmpfs"], True), (["ext4"], False), ([], False), (["tmpfs", "ext4"], False)],
)
def test_a_filesystem_without_a_disk_is_known_by_the_table_of_mounts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kinds: list[str], expected: bool
) -> None:
    """That it takes O_DIRECT says nothing. What is not in it, or twice, is taken for a disk."""
    number = os.stat(tmp_path).st_dev
    rows = [
        MountEntry(
            number=f"{os.major(number)}:{os.minor(number)}",
            place="/",
            filesystem=kind,
            source="x",
            options="rw",
        )
        for kind in kinds
    ]
    monkeypatch.setattr(local_files, "read_mounts", lambda: rows)
    device = LocalDevice(str(tmp_path))
    assert device.in_memory is expected
    device.close()
