"""The pool's promises on ordinary days: sizes, ranges, keys, versions, conditions, closing."""

from __future__ import annotations

import gzip
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpstore
from hpstore.config import Settings
from hpstore.errors import (
    ConfigError,
    DeviceError,
    DeviceInUse,
    DeviceReadOnly,
    FormatTooNew,
    InvalidKey,
    ObjectNotFound,
    TooFewDevices,
    VersionConflict,
)
from hpstore.format.pool_key import Use
from hpstore.format.records import NEWEST_FORMAT, seal, unseal
from hpstore.testing.memory_pool import FakeClock, Harness
from hpstore.units import KIB, MIB

UNIT = 64 * KIB


def payload(size: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(size)


@pytest.fixture
def pool(tmp_path: Path) -> hpstore.Pool:
    return hpstore.create(
        [tmp_path / f"d{i}" for i in range(6)],
        data=4,
        parity=2,
        config=tmp_path / "pool.toml",
        unit_bytes=UNIT,
        settings=Settings(memory_bytes=32 * MIB, run_directory=str(tmp_path / "run")),
    )


STRIPE = 4 * UNIT
BORDERS = [
    0,
    1,
    4095,
    4096,
    4097,
    UNIT - 1,
    UNIT,
    UNIT + 1,
    128 * KIB,
    128 * KIB + 1,
    STRIPE - 1,
    STRIPE,
    STRIPE + 1,
    2 * STRIPE - 1,
    2 * STRIPE,
    2 * STRIPE + 1,
    3 * STRIPE + UNIT,
    64 * STRIPE + 5,
]


@pytest.mark.parametrize("size", BORDERS)
def test_every_size_round_trips(pool: hpstore.Pool, size: int) -> None:
    """Objects of sizes around unit and stripe borders come back, whole and in ranges."""
    data = payload(size, size)
    with pool:
        info = pool.put("k", data)
        assert (info.size, info.losses_tolerated) == (size, 2)
        assert pool.get("k") == data
        for start, end in ((0, 1), (size // 3, 2 * size // 3), (size - 1, size), (0, size + 9)):
            if start >= 0:
                assert pool.get("k", start, end) == data[start:end]
        buffer = bytearray(size + 3)
        assert pool.read_into("k", buffer) == size
        assert bytes(buffer[:size]) == data


@pytest.mark.parametrize("unit", [4 * KIB, 12 * KIB, 256 * KIB])
def test_units_that_are_no_multiple_of_a_block_work(tmp_path: Path, unit: int) -> None:
    """Checksum blocks of 64 KiB span units of 4 and 12 KiB."""
    with hpstore.create(
        [tmp_path / f"d{i}" for i in range(4)],
        data=2,
        parity=2,
        config=tmp_path / "p.toml",
        unit_bytes=unit,
    ) as pool:
        data = payload(1_000_003)
        pool.put("k", data)
        assert pool.get("k") == data
        assert pool.get("k", 131_071, 655_361) == data[131_071:655_361]


def test_a_file_can_be_put_without_loading_it(pool: hpstore.Pool, tmp_path: Path) -> None:
    """put takes an open file; memory stays within the budget."""
    data = payload(5 * MIB + 7)
    (tmp_path / "file").write_bytes(data)
    with pool, (tmp_path / "file").open("rb") as file:
        pool.put("k", file)
        assert pool.get("k") == data
        assert pool._store.buffers.budget.peak_bytes <= 32 * MIB


def test_what_is_no_plain_file_is_refused(pool: hpstore.Pool, tmp_path: Path) -> None:
    """A pipe would be stored as empty, a gzip.open() as what is compressed; temporary files are."""
    (tmp_path / "file.gz").write_bytes(gzip.compress(b"text"))
    read, write = os.pipe()
    os.close(write)
    with pool, gzip.open(tmp_path / "file.gz") as zipped, os.fdopen(read, "rb") as pipe:
        for what in (zipped, pipe):
            with pytest.raises(TypeError, match="read"):
                pool.put("k", what)
        assert pool.list() == []
        with tempfile.NamedTemporaryFile() as named, tempfile.TemporaryFile(buffering=0) as plain:
            for file in (named, plain):
                file.write(b"data")
                file.flush()
                pool.put("k", file)
                assert pool.get("k") == b"data"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("taken", "belongs to"),
        ("x.toml", "without .toml"),
        ("m\udcff", "pool's name.* cannot be used"),
        ("n" * 300, "pool's name.* cannot be used"),
        ("../x", "not a name"),
        (None, "cannot be written"),
    ],
)
def test_a_pool_that_cannot_be_made_claims_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str | None, said: str
) -> None:
    """Its settings cannot be written, or its name cannot be had: the next try finds all free."""
    monkeypatch.setenv("HOME", str(tmp_path))
    other = [tmp_path / f"e{i}" for i in range(3)]
    hpstore.create(other, data=2, parity=1, config=tmp_path / "e.toml", name="taken").close()
    places = [tmp_path / f"d{i}" for i in range(3)]
    where = tmp_path / ("nowhere" if name is None else "") / "pool.toml"
    with pytest.raises(ConfigError, match=said):
        hpstore.create(places, data=2, parity=1, config=where, name=name)
    hpstore.create(places, data=2, parity=1, config=tmp_path / "pool.toml").close()


def test_memory_stays_within_the_budget(pool: hpstore.Pool) -> None:
    """Leases of a large put and get never exceed memory_bytes."""
    with pool:
        pool.put("k", payload(48 * MIB))
        assert len(pool.get("k")) == 48 * MIB
        assert 0 < pool._store.buffers.budget.peak_bytes <= 32 * MIB
        assert pool._store.buffers.budget.used_bytes == 0


def test_a_key_and_keys_below_it_are_all_objects(pool: hpstore.Pool) -> None:
    """PROTOCOL 13: `a` and `a/b` can both be objects, and both can go."""
    with pool:
        for key in ("a", "a/b", "a/b/c", "@x/%41", "a b/ü"):
            pool.put(key, key.encode())
        assert pool.list() == sorted(["a", "a/b", "a/b/c", "@x/%41", "a b/ü"])
        assert pool.list("a/b") == ["a/b", "a/b/c"]
        pool.delete("a/b")
        assert pool.get("a/b/c") == b"a/b/c"
        assert pool.list("a") == ["a", "a b/ü", "a/b/c"]


@pytest.mark.parametrize(
    "key", ["", "/a", "a/", "a//b", "..", "a/../b", "a\0b", "a\nb", "x" * 5000]
)
def test_bad_keys_are_refused(pool: hpstore.Pool, key: str) -> None:
    """A key that cannot name an object is a clear error before anything is touched."""
    with pool:
        with pytest.raises(InvalidKey):
            pool.put(key, b"x")
        with pytest.raises(InvalidKey):
            pool.get(key)
        assert pool.list() == []


def test_metadata_and_info_come_back(pool: hpstore.Pool) -> None:
    """stat gives what put returned; metadata is bounded JSON."""
    with pool:
        put = pool.put("k", b"x" * 200_000, {"run": 7, "tags": ["a"]})
        assert pool.stat("k") == put
        assert put.metadata == {"run": 7, "tags": ["a"]}
        with pytest.raises(ConfigError, match="1024"):
            pool.put("k", b"x", {"big": "y" * 2000})
        with pytest.raises(ConfigError, match="JSON"):
            pool.put("k", b"x", {"bad": object()})
        assert pool.get("k") == b"x" * 200_000


def test_absent_objects_are_not_found(pool: hpstore.Pool) -> None:
    """get, stat and delete of nothing say so; exists says False."""
    with pool:
        assert not pool.exists("k")
        for act in (pool.get, pool.stat, pool.delete):
            with pytest.raises(ObjectNotFound):
                act("k")
        pool.put("k", b"x")
        pool.delete("k")
        assert not pool.exists("k")
        with pytest.raises(ObjectNotFound):
            pool.delete("k")


def test_conditional_puts_hold(pool: hpstore.Pool) -> None:
    """PROTOCOL 6: if_absent and if_version."""
    with pool:
        first = pool.put("k", b"1", if_absent=True)
        with pytest.raises(VersionConflict):
            pool.put("k", b"2", if_absent=True)
        second = pool.put("k", b"2", if_version=first.version)
        with pytest.raises(VersionConflict):
            pool.put("k", b"3", if_version=first.version)
        assert pool.get("k") == b"2"
        pool.delete("k")
        with pytest.raises(VersionConflict):
            pool.put("k", b"3", if_version=second.version)
        pool.put("k", b"4", if_absent=True)
        assert pool.get("k") == b"4"


def test_counters_rise_past_deletes_and_clocks_that_go_back(tmp_path: Path) -> None:
    """PROTOCOL 1: the counter never restarts, not after a delete, not when the clock goes back."""
    clock = FakeClock()
    harness = Harness(tmp_path, data=2, parity=1, devices=3, clock=clock)
    with harness.open() as pool:
        first = pool.put("k", b"1")
        pool.delete("k")
    clock.now_ms -= 10_000_000
    with harness.open() as pool:
        second = pool.put("k", b"2")
        assert second.version > first.version
        assert pool.get("k") == b"2"


def test_read_only_pools_write_nothing(pool: hpstore.Pool, tmp_path: Path) -> None:
    """PROTOCOL 23: a read-only pool probes without writing, and refuses to write."""
    pool.put("k", b"x")
    pool.close()

    def snapshot() -> dict[str, int]:
        paths = (Path(r) / f for r, _, files in os.walk(tmp_path) for f in files)
        return {str(p): p.stat().st_mtime_ns for p in paths}

    before = snapshot()
    with hpstore.open(tmp_path / "pool.toml", read_only=True) as reader:
        assert reader.get("k") == b"x"
        for act in (
            lambda: reader.put("k", b"y"),
            lambda: reader.delete("k"),
            lambda: reader.scrub(),
            lambda: reader.evict(str(tmp_path / "d0")),
        ):
            with pytest.raises(DeviceReadOnly):
                act()
    assert snapshot() == before


def test_files_are_private(pool: hpstore.Pool, tmp_path: Path) -> None:
    """Files are 0600 and directories 0700 unless the settings say otherwise."""
    with pool:
        pool.put("a/b", b"x" * 300_000)
    for root, directories, files in os.walk(tmp_path / "d0"):
        for name in directories:
            assert (Path(root) / name).stat().st_mode & 0o777 == 0o700
        for name in files:
            assert (Path(root) / name).stat().st_mode & 0o777 == 0o600


def test_wrong_geometries_are_refused(tmp_path: Path) -> None:
    """Bad k, m, units and device lists change nothing on disk."""
    devices = [tmp_path / f"d{i}" for i in range(3)]
    for data, parity in ((0, 1), (2, 0), (2, 9), (30, 3), (-1, 2)):
        with pytest.raises(ConfigError):
            hpstore.create(devices, data=data, parity=parity, config=tmp_path / "p.toml")
    with pytest.raises(ConfigError, match="at least 3"):
        hpstore.create(devices[:2], data=2, parity=2, config=tmp_path / "p.toml")
    with pytest.raises(ConfigError, match="twice"):
        hpstore.create([*devices, devices[0]], data=2, parity=1, config=tmp_path / "p.toml")
    with pytest.raises(ConfigError, match="4 KiB"):
        hpstore.create(devices, data=2, parity=1, config=tmp_path / "p.toml", unit_bytes=5000)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="not a directory"):
        hpstore.create([*devices, tmp_path / "file"], data=2, parity=1, config=tmp_path / "p.toml")
    assert not (tmp_path / "p.toml").exists()
    assert not any((d / "hpstore.json").exists() for d in devices)


def test_a_device_belongs_to_one_pool(pool: hpstore.Pool, tmp_path: Path) -> None:
    """Creating over a device of another pool is refused and claims nothing."""
    pool.close()
    fresh = [tmp_path / "e0", tmp_path / "e1", tmp_path / "d0"]
    with pytest.raises(DeviceInUse):
        hpstore.create(fresh, data=2, parity=1, config=tmp_path / "q.toml")
    assert not (tmp_path / "e0" / "hpstore.json").exists()


def test_leftovers_of_a_pool_are_not_claimed(tmp_path: Path) -> None:
    """Objects without an identity are refused: they may be somebody's data."""
    (tmp_path / "d0" / "objects" / "somebody's").mkdir(parents=True)
    with pytest.raises(DeviceInUse, match="objects"):
        hpstore.create(
            [tmp_path / f"d{i}" for i in range(3)], data=2, parity=1, config=tmp_path / "p.toml"
        )


def test_a_newer_format_is_refused(pool: hpstore.Pool, tmp_path: Path) -> None:
    """A pool.json of a later version, with the pool's MAC, stops the open with a clear error."""
    pool.close()
    path, key = tmp_path / "d0" / "pool.json", pool.config.key
    assert key is not None
    body = unseal(path.read_bytes(), where="test", newest=NEWEST_FORMAT)
    del body["mac"]
    body["format"] = NEWEST_FORMAT + 1
    text = json.dumps(body, sort_keys=True, ensure_ascii=False)
    path.write_bytes(seal({**body, "mac": key.mac(Use.RECORD, text.encode()).hex()}))
    with pytest.raises(FormatTooNew, match=r"upgrade|reads up to"):
        hpstore.open(tmp_path / "pool.toml")


def test_closing_twice_is_fine_and_use_after_is_an_error(pool: hpstore.Pool) -> None:
    """close() is idempotent; a closed pool says that it is closed."""
    pool.close()
    pool.close()
    with pytest.raises(ConfigError, match="closed"):
        pool.get("k")


def test_too_few_devices_means_reads_only(tmp_path: Path) -> None:
    """PROTOCOL 3: with k' = 0 nothing is written and everything still reads."""
    harness = Harness(tmp_path, data=2, parity=2, devices=4)
    with harness.open() as pool:
        pool.put("k", b"x" * 300_000)
    harness.lose(harness.urls[:2])
    with harness.open() as pool:
        assert pool.status().effective_data == 0
        assert pool.get("k") == b"x" * 300_000
        with pytest.raises(TooFewDevices, match="reading goes on"):
            pool.put("k", b"y")
        assert pool.get("k") == b"x" * 300_000


def test_what_is_refused_leaves_no_directories(pool: hpstore.Pool, tmp_path: Path) -> None:
    """create and add remove the directories that they made, and no others, not even empty ones."""
    used, empty = tmp_path / "used", tmp_path / "empty"
    used.mkdir()
    empty.mkdir()
    (used / "file").write_bytes(b"x")
    before = set(tmp_path.iterdir())
    for bad in (used, tmp_path / "no/such"):
        with pytest.raises(DeviceError):
            hpstore.create(
                [tmp_path / "new", empty, bad], scheme="2+1", config=tmp_path / "other.toml"
            )
        with pytest.raises(DeviceError):
            pool.add_device(str(bad))
    with pytest.raises(ConfigError, match="failure domain"):
        pool.add_device(str(tmp_path / "new"), domain="x" * 256)
    assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize("domain", ["", "a\nb", "\x1b[31m", "\ud800", "é" * 128, 5])
def test_a_failure_domain_is_a_short_printable_name(
    pool: hpstore.Pool, tmp_path: Path, domain: Any
) -> None:
    places = [tmp_path / f"new{i}" for i in range(3)]
    with pytest.raises(ConfigError, match="cannot name a failure domain"):
        hpstore.create(places, scheme="2+1", config=tmp_path / "x.toml", domains=["a", "b", domain])
    with pytest.raises(ConfigError, match="cannot name a failure domain"):
        pool.add_device(str(places[0]), domain=domain)
    assert not any(place.exists() for place in places)
    assert len(pool.status().devices) == 6


def test_a_record_that_could_not_be_read_back_is_not_written(
    pool: hpstore.Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No pool opens with one: `add` went on until its devices' names were 4 MiB."""
    size = max(path.stat().st_size for path in tmp_path.glob("*/pool.json"))
    monkeypatch.setattr("hpstore.format.records.MAX_RECORD_BYTES", size + 20)
    with pytest.raises(ConfigError, match=f"{size + 20} at most are read"):
        pool.add_device(str(tmp_path / "new"))
    assert not (tmp_path / "new/hpstore.json").exists()
    with hpstore.open(tmp_path / "pool.toml") as other:
        other.put("a", b"b")
        assert len(other.status().devices) == 6
    with pytest.raises(ConfigError, match="Nothing was changed"):
        hpstore.create(
            [tmp_path / ("long" * 40 + str(i)) for i in range(9)],
            scheme="2+1",
            config=tmp_path / "other.toml",
        )
    assert not list(tmp_path.glob("long*"))
    monkeypatch.undo()
    pool.add_device(str(tmp_path / "new"))
