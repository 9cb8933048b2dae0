"""Every engine of Registers: memory, devices, a run directory, etcd, S3 (PROTOCOL 15)."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpstore.agreement.etcd_gateway import ClientCertificates, EtcdGateway
from hpstore.agreement.register_url import EtcdUrl, HostUrl, S3Url, parse_register_url
from hpstore.agreement.registers import LocalRegisters, Registers
from hpstore.agreement.s3_records import S3Records
from hpstore.agreement.swap_registers import SwapRegisters
from hpstore.agreement.swap_store import SwapStore
from hpstore.devices.local import LocalDevice
from hpstore.membership.run_registers import RunRegisters
from hpstore.runtime.clock import SystemClock
from hpstore.testing.agreement_contract import AgreementContract
from hpstore.testing.memory_pool import Harness
from hpstore.testing.memory_swaps import MemoryRecords, MemorySwaps
from tests.register_servers import etcd_or_skip, s3_or_skip

Pair = tuple[Registers, Registers]


def over(store: SwapStore) -> SwapRegisters:
    """Registers of one process over a store."""
    return SwapRegisters(
        store,
        SystemClock(),
        where="a test",
        deadline_seconds=10.0,
        hold_seconds=15.0,
        lock_deadline_seconds=5.0,
    )


class TestLocal(AgreementContract):
    """Threads of one process."""

    @pytest.fixture
    def pair(self) -> Pair:
        registers = LocalRegisters(SystemClock())
        return registers, registers


class TestMemorySwaps(AgreementContract):
    """The engine over compare-and-swap, without a server."""

    @pytest.fixture
    def pair(self) -> Iterator[Pair]:
        shared = MemoryRecords()
        a, b = over(MemorySwaps(shared)), over(MemorySwaps(shared))
        yield a, b
        a.close()
        b.close()


class TestDevices(AgreementContract):
    """A pool's own devices, in memory."""

    @pytest.fixture
    def pair(self, tmp_path: Path) -> Iterator[Pair]:
        harness = Harness(tmp_path, data=2, parity=1, devices=4)
        with harness.open() as a, harness.open() as b:
            yield a.admin.registers.devices, b.admin.registers.devices


class TestDegradedDevices(AgreementContract):
    """With a device away, so that rounds are begun."""

    @pytest.fixture
    def pair(self, tmp_path: Path) -> Iterator[Pair]:
        harness = Harness(tmp_path, data=2, parity=1, devices=4)
        harness.lose(["memory://d1"])
        with harness.open() as a, harness.open() as b:
            yield a.admin.registers.devices, b.admin.registers.devices


class TestRunDirectory(AgreementContract):
    """Files of one host."""

    few = "hpstore.membership.run_registers.claim_registers"

    @pytest.fixture
    def pair(self, tmp_path: Path) -> Iterator[Pair]:
        harness = Harness(tmp_path, data=2, parity=1, devices=4)
        with harness.open() as a, harness.open() as b:
            made = [
                RunRegisters(pool._session.store, lambda: tmp_path / "run" / "p") for pool in (a, b)
            ]
            yield made[0], made[1]


class TestEtcd(AgreementContract):
    """Three members; the second process knows them in another order."""

    @pytest.fixture(scope="class")
    @classmethod
    def url(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
        cluster = etcd_or_skip(tmp_path_factory.mktemp("etcd"))
        yield cluster.url
        cluster.close()

    @pytest.fixture
    def pair(self, url: str, request: pytest.FixtureRequest) -> Iterator[Pair]:
        """Keys of its own for each test."""
        parsed = parse_register_url(url)
        assert isinstance(parsed, EtcdUrl)
        turned = EtcdUrl(endpoints=parsed.endpoints[::-1], prefix=parsed.prefix, tls=False)
        name = request.node.name
        a, b = (over(EtcdGateway(one, name, ClientCertificates())) for one in (parsed, turned))
        yield a, b
        a.close()
        b.close()


class TestHost(AgreementContract):
    """The service of a host, which keeps them in a file."""

    @pytest.fixture(scope="class")
    @classmethod
    def url(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
        pytest.importorskip("httptools", reason="needs the extra hosts")
        from hpstore.hosts.host_service import HostService
        from hpstore.hosts.record_file import RecordFile

        place = tmp_path_factory.mktemp("host")
        (place / "disk").mkdir()
        records = RecordFile(place / "registers")
        with HostService("127.0.0.1", 0, records=records) as service:
            service.export(LocalDevice(str(place / "disk")))
            yield "host://{}:{}".format(*service.address)
        records.close()

    @pytest.fixture
    def pair(self, url: str, request: pytest.FixtureRequest) -> Iterator[Pair]:
        """Keys of its own for each test."""
        from hpstore.agreement.host_records import HostRecords

        parsed = parse_register_url(url)
        assert isinstance(parsed, HostUrl)
        prefix = f"{zlib.crc32(request.node.name.encode()):x}/0"
        a, b = (over(HostRecords(parsed, prefix, seconds=10.0, secure=None)) for _ in range(2))
        yield a, b
        a.close()
        b.close()


class TestS3(AgreementContract):
    """A server of moto, which enforces conditions."""

    threads, rounds = 3, 4
    few = "hpstore.agreement.swap_registers.claim_registers"

    @pytest.fixture(scope="class")
    @classmethod
    def url(cls) -> Iterator[str]:
        with s3_or_skip() as url:
            yield url

    @pytest.fixture
    def pair(self, url: str, request: pytest.FixtureRequest) -> Pair:
        parsed = parse_register_url(url)
        assert isinstance(parsed, S3Url)
        a, b = (over(S3Records(parsed, request.node.name)) for _ in range(2))
        return a, b
