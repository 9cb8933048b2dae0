"""Two pools that take one place at the same moment: one of them gets it, the other an error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import hpstore
from hpstore.devices.local import LocalDevice
from hpstore.devices.memory import MemoryDevice
from hpstore.devices.unused_places import alone, claim, mark
from hpstore.errors import DeviceError, DeviceInUse, DeviceTimeout
from hpstore.format.records import IDENTITY_FILE, Identity
from hpstore.membership.members import _let_go

MINE = Identity(pool_id="a" * 32, device_id="1" * 32, domain="d")
OTHER = Identity(pool_id="b" * 32, device_id="2" * 32, domain="d")


@pytest.fixture
def in_a_claim(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], list[object]]:
    """Once, another process acts between the look at a place and its claim; what it met."""

    def set_up(act: Callable[[], object]) -> list[object]:
        met: list[object] = []
        probe = LocalDevice.probe

        def acting(device: LocalDevice, *, write: bool) -> None:
            if not met and write and device.stamp(IDENTITY_FILE) is None:
                met.append(None)
                try:
                    act()
                except DeviceInUse as error:
                    met[0] = str(error)
            probe(device, write=write)

        monkeypatch.setattr(LocalDevice, "probe", acting)
        return met

    return set_up


def make(tmp_path: Path, name: str, count: int = 4) -> hpstore.Pool:
    devices = [tmp_path / f"d{number}" for number in range(count)]
    return hpstore.create(devices, data=2, parity=1, config=tmp_path / name)


def test_of_two_pools_that_are_made_of_the_same_places_one_is_made(
    tmp_path: Path, in_a_claim: Callable[[Callable[[], object]], list[object]]
) -> None:
    """And the other one takes no directory away that it had made."""
    met = in_a_claim(lambda: make(tmp_path, "other.toml", 5))
    with make(tmp_path, "pool.toml") as pool:
        pool.put("k", b"v" * 99)
        assert pool.get("k") == b"v" * 99
        assert pool.status().losses_tolerated == 1
    assert "is being made into a device by another process" in str(met[0])
    assert not (tmp_path / "other.toml").exists()


def test_a_place_that_two_pools_add_becomes_a_device_of_one(
    tmp_path: Path, in_a_claim: Callable[[Callable[[], object]], list[object]]
) -> None:
    devices = [tmp_path / f"e{number}" for number in range(3)]
    with (
        make(tmp_path, "pool.toml") as pool,
        hpstore.create(devices, data=2, parity=1, config=tmp_path / "other.toml") as other,
    ):
        met = in_a_claim(lambda: other.add_device(str(tmp_path / "new")))
        added = pool.add_device(str(tmp_path / "new"))
        assert "is being made into a device by another process" in str(met[0])
        assert added in {device.device for device in pool.status().devices}
        assert len(other.status().devices) == 3
        other.put("k", b"v")
    with hpstore.open(tmp_path / "other.toml") as other:
        assert other.get("k") == b"v"


def test_a_place_that_another_process_claims_is_not_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rights are those of the pool that gets it."""
    first, second = LocalDevice(str(tmp_path)), LocalDevice(str(tmp_path))
    with alone(first):
        monkeypatch.setattr(LocalDevice, "prepare", lambda _: pytest.fail("it was changed"))
        with pytest.raises(DeviceInUse, match="by another process"):
            claim(second, OTHER)
        mark(first, MINE)
    assert first.read_small(IDENTITY_FILE, 4096) == MINE.encode()
    first.close()
    second.close()


def test_a_place_that_is_let_go_can_be_claimed(tmp_path: Path) -> None:
    """A pool that was not made leaves no lock, and nothing in places that were not there."""
    (tmp_path / "d3").mkdir()
    (tmp_path / "d3" / "thesis.txt").write_text("mine")
    with pytest.raises(DeviceInUse, match="thesis"):
        make(tmp_path, "pool.toml")
    assert [path.name for path in tmp_path.iterdir()] == ["d3"]
    (tmp_path / "d3" / "thesis.txt").unlink()
    make(tmp_path, "pool.toml").close()


def test_a_store_keeps_the_first_of_two_identities() -> None:
    """Stores have no locks: the identity is written where there is none, and read again."""
    obstore = pytest.importorskip("obstore", reason="obstore is not installed (hpstore[s3])")
    from hpstore.devices.object_store import ObjectStoreDevice
    from hpstore.devices.store_client import StoreClient

    store = obstore.store.MemoryStore()
    device = ObjectStoreDevice(StoreClient(store, url="memory:"), "a")
    write = device.write_new

    def late(path: str, data: bytes) -> bool:
        obstore.put(store, f"a/{IDENTITY_FILE}", OTHER.encode())
        return write(path, data)

    device.write_new = late  # type: ignore[method-assign]
    with pytest.raises(DeviceInUse, match="by another process"):
        claim(device, MINE)
    assert device.read_small(IDENTITY_FILE, 4096) == OTHER.encode()


def test_a_place_whose_lock_is_not_answered_is_not_claimed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another process may have it: that locks do not work there is another error."""

    def silent(*_: int) -> None:
        raise DeviceTimeout("no answer")

    device = MemoryDevice("memory:a")
    monkeypatch.setattr(device, "hold", silent)
    with pytest.raises(DeviceTimeout):
        claim(device, MINE)
    assert device.stamp(IDENTITY_FILE) is None


def test_what_a_process_that_died_at_its_look_has_left_is_no_hindrance(tmp_path: Path) -> None:
    """And a process that looks at this moment probes in tmp/, too."""
    (tmp_path / "d1/tmp").mkdir(parents=True)
    (tmp_path / "d1/tmp/00000000000000000001-probe-00").write_text("x")
    make(tmp_path, "pool.toml").close()


def test_a_pool_that_was_not_made_leaves_the_identity_of_another_one() -> None:
    """Which was written over its own, where nothing locks."""
    device = MemoryDevice("memory:a")
    device.write_small(IDENTITY_FILE, OTHER.encode())
    _let_go(device, MINE)
    assert device.read_small(IDENTITY_FILE, 4096) == OTHER.encode()
    _let_go(device, OTHER)
    assert device.stamp(IDENTITY_FILE) is None


def test_a_place_without_locks_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some network file systems have none."""

    def refused(*_: int) -> None:
        raise DeviceError("no locks")

    device = MemoryDevice("memory:a")
    monkeypatch.setattr(device, "hold", refused)
    claim(device, MINE)
    assert device.read_small(IDENTITY_FILE, 4096) == MINE.encode()
