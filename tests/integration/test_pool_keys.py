"""Where a pool's key is, and what opens a pool whose pool.toml has none or another one (t1)."""

from __future__ import annotations

import json
import logging
import os
import pickle
import shutil
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest

import hpstore
from hpstore.config import Settings, load_config, save_config
from hpstore.devices.local import LocalDevice
from hpstore.errors import ConfigError, DeviceFull, DeviceReadOnly, PoolKeyError, TooFewDevices
from hpstore.format.pool_key import new_pool_key
from hpstore.format.records import POOL_FILE
from hpstore.pool import create_pool
from hpstore.testing.memory_pool import Harness

SMALL, BIG = b"small", bytes(range(256)) * 4096


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A pool of 2+1 on three directories, with a small and a striped object; its pool.toml."""
    settings = Settings(direct=False, run_directory=str(tmp_path / "run"), memory_bytes=64 << 20)
    devices = [tmp_path / f"d{i}" for i in range(3)]
    path = tmp_path / "pool.toml"
    with hpstore.create(
        devices, data=2, parity=1, config=path, settings=settings, unit_bytes=65536
    ) as pool:
        pool.put("small", SMALL)
        pool.put("big", BIG)
    return path


def key_line(path: Path) -> str:
    return next(line for line in path.read_text().splitlines() if line.startswith("key"))


def with_key(path: Path, line: str) -> Path:
    """Another pool.toml of the same devices, with another key line."""
    other = path.with_name("other.toml")
    other.write_text(path.read_text().replace(key_line(path), line))
    return other


def test_the_key_is_in_pool_toml_alone(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Mode 0600; in no file of a device, no status, no log, no repr; and it stays when pool.toml
    is written again."""
    secret = key_line(place).split('"')[1]
    assert len(bytes.fromhex(secret)) == 32
    assert stat.S_IMODE(place.stat().st_mode) == 0o600
    with caplog.at_level(logging.DEBUG), hpstore.open(place) as pool:
        shown = [
            json.dumps(pool.status().as_dict()),
            repr(pool),
            repr(pool.config),
            json.dumps(pool.scrub().as_dict()),
        ]
        assert pool.status().authenticated
        pool.add_device(str(place.parent / "d3"))
    assert key_line(place).split('"')[1] == secret
    assert stat.S_IMODE(place.stat().st_mode) == 0o600
    for command in (["status", str(place)], ["status", str(place), "--json"], ["ls", str(place)]):
        done = subprocess.run(
            [sys.executable, "-m", "hpstore", *command], check=True, text=True, capture_output=True
        )
        shown += [done.stdout, done.stderr]
    shown.append(caplog.text)
    raw = bytes.fromhex(secret)
    for file in place.parent.rglob("*"):
        if file.is_file() and file != place:
            data = file.read_bytes()
            assert raw not in data, file
            assert secret.encode() not in data, file
            assert secret not in str(file)
    assert not [text for text in shown if secret in text]


def test_the_key_outlives_a_power_cut(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pool.toml is synced, and then the name of it: no other copy of the key exists."""
    synced: list[str] = []

    def fsync(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))

    with hpstore.open(place) as pool:
        monkeypatch.setattr("hpstore.config.os.fsync", fsync)
        save_config(pool.config)
    assert len(synced) == 2
    assert synced[0].startswith(str(place.parent / ".pool.toml."))
    assert synced[1] == str(place.parent)


def test_another_reader_of_the_files_may_read_the_key(tmp_path: Path) -> None:
    """A pool whose files are for a group, too, has a pool.toml for that group."""
    settings = Settings(
        direct=False,
        file_mode=0o660,
        directory_mode=0o770,
        group=str(os.getgid()),
        run_directory=str(tmp_path / "run"),
    )
    devices = [tmp_path / f"d{i}" for i in range(3)]
    hpstore.create(devices, data=2, parity=1, config=tmp_path / "p.toml", settings=settings).close()
    assert stat.S_IMODE((tmp_path / "p.toml").stat().st_mode) == 0o660


@pytest.mark.parametrize("line", ["", f'key = "{"ab" * 32}"'], ids=["none", "another"])
@pytest.mark.parametrize("read_only", [True, False])
def test_without_the_key_a_pool_is_refused_and_unchanged(
    place: Path, line: str, read_only: bool
) -> None:
    """PoolKeyError names the file, and says what helps; no byte of a device changes."""
    files = {f: f.read_bytes() for f in place.parent.glob("d*/**/*") if f.is_file()}
    with pytest.raises(PoolKeyError) as told:
        hpstore.open(with_key(place, line), read_only=read_only)
    for text in ("other.toml", "key = ...", 'key = "lost"', "Nothing was read or changed"):
        assert text in str(told.value)
    assert ("it has no key" in str(told.value)) == (line == "")
    assert {f: f.read_bytes() for f in place.parent.glob("d*/**/*") if f.is_file()} == files


def test_the_command_line_has_an_exit_code_for_it(place: Path) -> None:
    """One line, exit code 9."""
    other = with_key(place, "")
    done = subprocess.run(
        [sys.executable, "-m", "hpstore", "ls", str(other)],
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 9
    assert "does not open this pool" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_pool_of_before_is_refused_with_a_key(tmp_path: Path) -> None:
    """pool.toml has a key, the devices say that there is none: nobody takes a pool back."""
    harness = Harness(tmp_path, data=2, parity=1, devices=3, keyed=False)
    with harness.open() as pool:
        pool.put("small", SMALL)
        assert not pool.status().authenticated
    harness.config = replace(harness.config, key=new_pool_key())
    with pytest.raises(PoolKeyError, match="this pool has none"):
        harness.open()


def test_a_lost_key_lets_a_pool_be_read(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Read-only, every object, also decoded; status and log say that nothing is checked."""
    other = with_key(place, 'key = "lost"')
    with pytest.raises(PoolKeyError, match="can be read, and not be written"):
        hpstore.open(other)
    with hpstore.open(other, read_only=True) as pool:
        assert "forged bytes go unnoticed" in caplog.text
        assert (pool.get("small"), pool.get("big")) == (SMALL, BIG)
        assert pool.list() == ["big", "small"]
        assert not pool.status().authenticated
        with pytest.raises(DeviceReadOnly):
            pool.put("x", b"")
    shutil.rmtree(place.parent / "d1")
    with hpstore.open(other, read_only=True) as pool:
        assert (pool.get("small"), pool.get("big")) == (SMALL, BIG)
    for command, code in ((["get", str(other), "big", "out"], 0), (["put", str(other), "x"], 9)):
        if command[0] == "put":
            command.append(str(place))
        done = subprocess.run(
            [sys.executable, "-m", "hpstore", *command], check=False, cwd=place.parent
        )
        assert done.returncode == code
    assert (place.parent / "out").read_bytes() == BIG


def test_a_copy_of_pool_toml_opens_the_pool_elsewhere(place: Path, tmp_path: Path) -> None:
    """On another host: the file is copied, with other places; and by URL, by fsspec."""
    other = tmp_path / "elsewhere" / "pool.toml"
    other.parent.mkdir()
    text = place.read_text()
    for i in range(3):
        shutil.copytree(place.parent / f"d{i}", other.parent / f"d{i}")
        text = text.replace(str(place.parent / f"d{i}"), str(other.parent / f"d{i}"))
    other.write_text(text)
    with hpstore.open(other) as pool:
        assert pool.get("big") == BIG
        pool.put("big", SMALL)
    assert fsspec.filesystem("hpstore", pool=str(other)).cat("big") == SMALL


def test_a_pickled_pool_has_its_key(place: Path) -> None:
    """As loaders and Ray hand it to worker processes."""
    with hpstore.open(place) as pool:
        code = (
            "import pickle, sys; pool = pickle.load(sys.stdin.buffer); "
            "sys.stdout.buffer.write(pool.get('big')); pool.close()"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], input=pickle.dumps(pool), check=True, capture_output=True
        )
    assert done.stdout == BIG


def test_pools_have_keys_of_their_own(place: Path, tmp_path: Path) -> None:
    """Another pool, another key."""
    (tmp_path / "b").mkdir()
    devices = [tmp_path / "b" / f"d{i}" for i in range(3)]
    hpstore.create(devices, data=2, parity=1, config=tmp_path / "b.toml").close()
    first, second = load_config(place).key, load_config(tmp_path / "b.toml").key
    assert None not in (first, second)
    assert first != second


@pytest.mark.parametrize("fails", ["pool.toml", "record"])
def test_a_create_that_fails_late_leaves_no_devices_with_a_lost_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """pool.toml could not be written, or the last device took no record: the devices were claimed
    by a pool whose key was nowhere. They are free, and there is no pool.toml."""
    places = [str(tmp_path / f"d{i}") for i in range(3)]
    config = tmp_path / "pool.toml"

    def full(*_: object, **__: object) -> None:
        raise ConfigError("no space")

    with monkeypatch.context() as patch:
        if fails == "pool.toml":
            patch.setattr(create_pool, "save_config", full)
        else:
            write = LocalDevice.write_small

            def refuse(device: LocalDevice, path: str, data: bytes) -> None:
                if path == POOL_FILE and device.url.endswith("d2"):
                    raise DeviceFull("no space")
                write(device, path, data)

            patch.setattr(LocalDevice, "write_small", refuse)
        with pytest.raises((ConfigError, DeviceFull), match="no space"):
            hpstore.create(places, data=1, parity=1, config=config)
    assert not config.exists()
    with hpstore.create(places, data=1, parity=1, config=config) as pool:
        pool.put("k", b"x")
        assert pool.get("k") == b"x"


@pytest.mark.parametrize("stored", [False, True])
def test_settings_with_the_only_key_are_not_to_be_deleted_where_objects_are(
    tmp_path: Path, stored: bool
) -> None:
    """The memberships are lost on all devices. What a create that was cut off leaves looks like
    that, too, and holds nothing."""
    places, toml = [tmp_path / f"d{i}" for i in range(3)], tmp_path / "pool.toml"
    with hpstore.create(places, data=2, parity=1, config=toml) as pool:
        if stored:
            pool.put("k", b"what the key belongs to")
    for place in places:
        (place / POOL_FILE).unlink()
    with pytest.raises(TooFewDevices, match="no device answers with a membership record") as said:
        hpstore.open(toml)
    assert ("delete this file" in str(said.value)) != stored
