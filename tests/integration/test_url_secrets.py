"""Passwords in device URLs open devices, and are shown nowhere."""

from __future__ import annotations

import json
import logging
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

import hpstore
from hpstore.config import Settings, load_config
from hpstore.errors import HpstoreError
from hpstore.format.device_urls import without_secrets, without_secrets_of

SECRET = "S3C:RET"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("sftp://user:S3CRET@host:22/d", "sftp://user@host:22/d"),
        ("ftp://user:p@ss:S3CRET@host/d", "ftp://user@host/d"),
        ("smb://:S3CRET@host/share", "smb://@host/share"),
        ("s3://bucket/x?access_key=S3CRET&region=a", "s3://bucket/x?access_key=&region=a"),
        ("https://a/b?X-Amz-Signature=S3CRET#c", "https://a/b?X-Amz-Signature=#c"),
        ("az://c/d?sig=S3CRET&SAS_Token=S3CRET", "az://c/d?sig=&SAS_Token="),
        ("memory://host/a:b@c", "memory://host/a:b@c"),
        ("sftp://user@host/d", "sftp://user@host/d"),
        ("/mnt/a:b@c", "/mnt/a:b@c"),
    ],
)
def test_what_is_shown_of_a_url(url: str, shown: str) -> None:
    """Equal for equal places, whatever opens them."""
    assert without_secrets(url) == shown
    assert without_secrets(shown) == shown
    assert "S3CRET" not in without_secrets_of(url, f"no way to {url}")


@pytest.fixture
def urls() -> Iterator[list[str]]:
    """Stores whose URLs hold a password; `memory://` stands for servers."""
    base = uuid.uuid4().hex
    yield [f"memory://user:{SECRET}@{base}{i}/d" for i in range(6)]
    memory = fsspec.filesystem("memory")
    for path in {file.split("/d/")[0] for file in memory.find("/") if base in file}:
        memory.rm(path, recursive=True)


def test_a_password_opens_devices_and_reaches_nothing_else(
    urls: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """t8: records on the other devices, status, logs, errors and reprs had it, and pool.toml was
    readable for all."""
    caplog.set_level(logging.DEBUG, "hpstore")
    toml, memory = tmp_path / "pool.toml", fsspec.filesystem("memory")
    settings = Settings(run_directory=str(tmp_path / "run"))
    with hpstore.create(urls[:4], data=2, parity=2, config=toml, settings=settings) as pool:
        texts = [repr(pool), repr(pool.config), repr(pool.admin.record)]
        pool.put("a", b"1" * 10_000)
        pool.add_device(urls[4])
        assert stat.S_IMODE(toml.stat().st_mode) == 0o600
        assert urls[4] in load_config(toml).devices
        pool.evict(without_secrets(urls[1]))
        pool.readmit(urls[1])
        assert set(load_config(toml).devices) == set(urls[:5])
        texts.append(json.dumps(pool.status().as_dict(), default=str))
        texts.append(str(dict(pool.admin.devices.places)))
        with pytest.raises(HpstoreError) as unknown:
            pool.evict(f"memory://user:{SECRET}@other/d")
        texts.append(str(unknown.value))
    places = [url.partition("@")[2] for url in urls]
    held = [p for p in memory.find("/") if p.endswith("pool.json") and places[0][:32] in p]
    assert len(held) == 5
    texts += [memory.cat(path).decode() for path in held]
    with hpstore.open(toml) as again:
        assert again.get("a") == b"1" * 10_000
        assert len(again.admin.devices.places) == 5
    for path in held:
        if any(place in path for place in places[:3]):
            memory.rm(path.rpartition("/")[0], recursive=True)
    with pytest.raises(HpstoreError) as missing:
        hpstore.open(toml)
    texts += [str(missing.value), caplog.text]
    assert not [text for text in texts if SECRET in text]
    assert "memory://user@" in str(missing.value)


def test_a_pool_toml_without_passwords_keeps_its_mode(tmp_path: Path) -> None:
    """It may be for a group."""
    toml, places = tmp_path / "pool.toml", [str(tmp_path / f"d{i}") for i in range(4)]
    with hpstore.create(places[:3], data=1, parity=1, config=toml) as pool:
        toml.chmod(0o640)
        pool.add_device(places[3])
    assert stat.S_IMODE(toml.stat().st_mode) == 0o640
