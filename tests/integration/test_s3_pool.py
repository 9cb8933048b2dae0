"""A pool over six buckets of two S3 servers: what it does, and what it survives."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import hpstore
from hpstore.checkpoint import Checkpointer
from hpstore.config import Settings, load_config
from hpstore.devices import remote_opener
from hpstore.devices.base import Device
from hpstore.devices.object_store import ObjectStoreDevice
from hpstore.devices.store_client import StoreClient
from hpstore.errors import ConfigError, DeviceError, HpstoreError
from tests.s3_servers import KEY, SECRET, S3Server, needed

pytest.importorskip("obstore", reason="obstore is not installed (hpstore[s3])")
if needed():
    pytest.skip(needed(), allow_module_level=True)


class TwoEndpoints:
    """Two servers, three buckets each, and the settings of a pool over them."""

    def __init__(self, place: Path) -> None:
        self.east = S3Server(place / "east")
        try:
            self.west = S3Server(place / "west")
        except BaseException:
            self.east.stop()
            raise
        self.servers = {"east": self.east, "west": self.west}

    def urls(self, buckets: int = 3) -> list[str]:
        return [
            f"s3://{name}@{server.make_bucket(f'pool{i}')}/main"
            for name, server in self.servers.items()
            for i in range(buckets)
        ]

    @property
    def stores(self) -> dict[str, dict[str, object]]:
        return {
            name: {"endpoint": server.endpoint, "credentials": f"env:{name.upper()}"}
            for name, server in self.servers.items()
        }


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoEndpoints]:
    """Both run for the tests of this file."""
    made = TwoEndpoints(tmp_path_factory.mktemp("endpoints"))
    yield made
    made.east.stop()
    made.west.stop()


@pytest.fixture
def keys(two: TwoEndpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their keys, by reference."""
    two.east.set_keys(monkeypatch, "EAST")
    two.west.set_keys(monkeypatch, "WEST")


def make(two: TwoEndpoints, tmp_path: Path, **kwargs: object) -> hpstore.Pool:
    """3+3: an endpoint may go."""
    settings = Settings(run_directory=str(tmp_path / "run"), device_deadline_seconds=10.0)
    return hpstore.create(
        two.urls(),
        data=3,
        parity=3,
        config=tmp_path / "pool.toml",
        settings=settings,
        stores=two.stores,
        **kwargs,  # type: ignore[arg-type]
    )


def plain(device: Device) -> ObjectStoreDevice:
    """Without what is round it."""
    while (inner := getattr(device, "inner", None)) is not None:
        device = inner
    assert isinstance(device, ObjectStoreDevice)
    return device


@pytest.mark.usefixtures("keys")
def test_a_pool_over_two_endpoints_does_what_any_pool_does(
    two: TwoEndpoints, tmp_path: Path
) -> None:
    """Put, get, list, delete, a checkpoint; open again by its pool.toml."""
    data = os.urandom(20_000_000)
    with make(two, tmp_path) as pool:
        pool.put("large", data)
        pool.put("small", b"x" * 100)
        pool.put("gone", b"y" * 5000)
        pool.delete("gone")
        weights = torch.arange(300_000.0)
        state = {"w": weights, "step": 7}
        with Checkpointer(pool, "run") as saver:
            saver.save(7, state)
            saver.wait()
    with hpstore.open(tmp_path / "pool.toml") as pool:
        assert pool.get("large") == data
        assert pool.get("small") == b"x" * 100
        assert [key for key in pool.list() if not key.startswith("run")] == [
            "large",
            "small",
        ]
        read = torch.zeros(300_000)
        back = {"w": read, "step": 0}
        with Checkpointer(pool, "run") as saver:
            assert saver.restore(back) == 7
        assert torch.equal(read, weights)
        status = pool.status()
    assert {device.driver for device in status.devices} == {"obstore"}
    assert {device.state for device in status.devices} == {"online"}
    assert not status.room_known
    assert [d.total_bytes for d in status.devices] == [0] * 6


@pytest.mark.usefixtures("keys")
def test_secrets_are_nowhere(
    two: TwoEndpoints, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not in pool.toml, nor in what lies in the buckets, status, reprs, logs and errors."""
    caplog.set_level(logging.DEBUG)
    with make(two, tmp_path) as pool:
        pool.put("a", b"1" * 10_000)
        texts = [repr(pool), repr(pool.config), repr(pool.admin.record)]
        texts.append(json.dumps(pool.status().as_dict(), default=str))
        for device in pool._session.store.view.devices.values():
            texts.append(device.read_small("pool.json", 1 << 20).decode())
            inner = plain(device)
            texts += [repr(vars(inner)), repr(vars(inner.client)), repr(inner.client.store)]
    texts += [(tmp_path / "pool.toml").read_text(), caplog.text]
    assert not [text for text in texts if SECRET in text or f'"{KEY}"' in text]


@pytest.mark.usefixtures("keys")
def test_a_bucket_that_is_gone_is_made_up_for(two: TwoEndpoints, tmp_path: Path) -> None:
    """Reads go on; a new one takes its place and is filled; the error names what is missing."""
    with make(two, tmp_path) as pool:
        for number in range(6):
            pool.put(f"k{number}", bytes([number]) * 400_000)
    urls = load_config(tmp_path / "pool.toml").devices
    bucket = urls[0].split("@")[1].split("/")[0]
    two.east.remove_bucket(bucket)
    with hpstore.open(tmp_path / "pool.toml") as pool:
        row = next(d for d in pool.status().devices if d.url == urls[0])
        assert row.state == "missing"
        assert "bucket does not exist" in row.problem
        for number in range(6):
            assert pool.get(f"k{number}") == bytes([number]) * 400_000
        pool.evict(urls[0])
        pool.add_device(f"s3://east@{two.east.make_bucket('new')}/main")
        report = pool.rebuild()
        assert not report.failed
        status = pool.status()
        assert (status.degraded, status.losses_tolerated) == (0, 3)


@pytest.mark.usefixtures("keys")
def test_an_endpoint_goes_and_comes_back(two: TwoEndpoints, tmp_path: Path) -> None:
    """Three of six devices at once: what is there is read; afterwards the pool is whole again."""
    with make(two, tmp_path) as pool:
        pool.put("before", b"b" * 700_000)
        two.west.stop()
        try:
            assert pool.get("before") == b"b" * 700_000
            with hpstore.open(tmp_path / "pool.toml", read_only=True) as other:
                assert other.get("before") == b"b" * 700_000
                away = [d for d in other.status().devices if d.state == "missing"]
            assert len(away) == 3
            assert all("no connection to" in d.problem for d in away)
        finally:
            two.west.start()
        pool.rebuild()
        pool.put("after", b"a" * 700_000)
        status = pool.status()
        assert (status.degraded, status.unreadable) == (0, 0)
        assert {d.state for d in status.devices} == {"online"}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"EAST_SECRET_ACCESS_KEY": "wrong"},
            "does not take the key (HTTP 403 SignatureDoesNotMatch)",
        ),
        ({"EAST_ACCESS_KEY_ID": "nobody"}, "does not take the key (HTTP 403 InvalidAccessKeyId)"),
    ],
)
@pytest.mark.usefixtures("keys")
def test_a_wrong_key_is_named_by_its_reference(
    two: TwoEndpoints,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, str],
    text: str,
) -> None:
    """Nothing is claimed, and no secret is in the error or its causes."""
    for name, value in change.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(DeviceError) as caught:
        make(two, tmp_path)
    assert text in str(caught.value)
    assert "'env:EAST'" in str(caught.value)
    error: BaseException | None = caught.value
    while error is not None:
        assert SECRET not in repr(error)
        assert "wrong" not in str(error)
        error = error.__cause__ or error.__context__
    assert not (tmp_path / "pool.toml").exists()


def test_keys_that_are_not_there_are_named(
    two: TwoEndpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which variable is missing; nothing is sent."""
    monkeypatch.delenv("EAST_ACCESS_KEY_ID", raising=False)
    two.west.set_keys(monkeypatch, "WEST")
    with pytest.raises(ConfigError, match="EAST_ACCESS_KEY_ID"):
        make(two, tmp_path)


@pytest.mark.usefixtures("keys")
def test_a_store_without_a_table_is_a_missing_device(two: TwoEndpoints, tmp_path: Path) -> None:
    """Of another machine's pool.toml: the rest opens, and the reason names the table."""
    make(two, tmp_path).close()
    toml = tmp_path / "pool.toml"
    toml.write_text(toml.read_text().replace("[stores.west]", "[stores.other]"))
    with hpstore.open(toml, read_only=True) as pool:
        away = [d for d in pool.status().devices if d.state == "missing"]
    assert len(away) == 3
    assert all("has no [stores.west]" in d.problem for d in away)


@pytest.mark.usefixtures("keys")
def test_a_quota_is_counted(two: TwoEndpoints, tmp_path: Path) -> None:
    """With capacity_bytes room is known after a count, falls by puts, rises by deletes."""
    stores = {name: {**table, "capacity_bytes": "1GiB"} for name, table in two.stores.items()}
    settings = Settings(run_directory=str(tmp_path / "run"))
    with hpstore.create(
        two.urls(1),
        data=1,
        parity=1,
        config=tmp_path / "pool.toml",
        settings=settings,
        stores=stores,
    ) as pool:
        devices = list(pool._session.store.view.devices.values())
        inner = list(map(plain, devices))
        for device in inner:
            device.usage()
            device.quota.wait()
        before = [device.usage() for device in inner]
        assert all(usage.total == 1 << 30 for usage in before)
        pool.put("a", b"1" * 3_000_000)
        during = [device.usage().free for device in inner]
        assert all(b.free - d > 3_000_000 for b, d in zip(before, during, strict=True))
        pool.delete("a")
        after = [device.usage().free for device in inner]
        assert all(a - d > 2_900_000 for a, d in zip(after, during, strict=True))
        assert pool.status().room_known


def test_what_the_process_asks_before_is_refused_in_a_child() -> None:
    """A fork would hang in the parent's connections: HpstoreError at once instead."""
    import obstore

    device = ObjectStoreDevice(StoreClient(obstore.store.MemoryStore(), url="s3://m/d"), "d")
    device.write_small("a", b"1")
    child = os.fork()
    if child == 0:
        try:
            device.read_small("a", 10)
        except HpstoreError as error:
            os._exit(0 if "spawn" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.usefixtures("keys")
def test_without_obstore_a_named_store_goes_through_s3fs(
    two: TwoEndpoints,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Both endpoints in one process; it is said once, counted and shown, and a pool that was made
    by one client is read by the other."""
    pytest.importorskip("s3fs", reason="s3fs is not installed (hpstore[s3])")
    with make(two, tmp_path) as pool:
        pool.put("by obstore", b"1" * 300_000)
    monkeypatch.setattr(remote_opener, "has_obstore", lambda: False)
    monkeypatch.setattr(remote_opener, "_said", set())
    with hpstore.open(tmp_path / "pool.toml") as pool:
        assert pool.get("by obstore") == b"1" * 300_000
        pool.put("by s3fs", b"2" * 300_000)
        status = pool.status()
        assert {d.driver for d in status.devices} == {remote_opener.S3FS}
        assert status.counters["devices_through_s3fs_total"] == 6
        assert SECRET not in repr(pool)
    said = [r for r in caplog.records if "reached through s3fs" in r.getMessage()]
    assert len(said) == 1
    monkeypatch.undo()
    two.east.set_keys(monkeypatch, "EAST")
    two.west.set_keys(monkeypatch, "WEST")
    with hpstore.open(tmp_path / "pool.toml") as pool:
        assert pool.get("by s3fs") == b"2" * 300_000
