"""[stores.NAME] in pool.toml, URLs that name one, and credentials by reference."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpstore.config import PoolConfig, load_config, read_stores, save_config
from hpstore.devices.remote_opener import open_remote
from hpstore.devices.store_credentials import asks_elsewhere, find_credentials, usual_facts
from hpstore.errors import ConfigError
from hpstore.format.store_settings import StorePlace, StoreSettings, parse_place, parse_stores

SECRET = "wJalrXUtnFEMI"
EAST = {"endpoint": "https://s3.example.org", "credentials": "env:EAST"}


@pytest.fixture(autouse=True)
def _no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "PROFILE", "REGION", "ENDPOINT_URL"):
        monkeypatch.delenv(f"AWS_{name}", raising=False)


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("s3://bucket", ("", "bucket", "")),
        ("s3://bucket/a/b/", ("", "bucket", "a/b")),
        ("s3a://east@bucket.name/a", ("east", "bucket.name", "a")),
        ("s3://user:pass@bucket/a", None),
        ("s3://bucket/a?key=1", None),
        ("s3://bucket/a/../b", None),
        ("s3://bucket/a//b", None),
        ("s3://b/a", None),
        ("gs://bucket/a", None),
        ("/mnt/a", None),
    ],
)
def test_where_a_url_points(url: str, place: tuple[str, str, str] | None) -> None:
    """What hpstore does not understand is left to fsspec."""
    made = None if place is None else StorePlace(store=place[0], bucket=place[1], prefix=place[2])
    assert parse_place(url) == made


def test_stores_are_written_and_read_back(tmp_path: Path) -> None:
    """By create; later changes of the devices keep the tables as they are."""
    stores = read_stores({"east": {**EAST, "capacity_bytes": "2GiB"}, "w-1": {"region": "eu"}})
    file = tmp_path / "p.toml"
    config = PoolConfig(path=file, name="p", devices=("s3://east@b/x",), stores=stores)
    save_config(config)
    assert load_config(file).stores == stores
    file.write_text(file.read_text() + "# a note\n")
    save_config(load_config(file))
    assert load_config(file).stores == stores
    assert "# a note" in file.read_text()


def test_a_file_from_before_has_no_stores(tmp_path: Path) -> None:
    file = tmp_path / "p.toml"
    file.write_text('devices = ["s3://bucket/a", "/mnt/b"]\n')
    assert load_config(file).stores == {}


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ({"secret_access_key": SECRET}, "does not belong in pool.toml"),
        ({"access_key_id": SECRET}, "does not belong in pool.toml"),
        ({"password": SECRET}, "does not belong in pool.toml"),
        ({"credentials": SECRET}, "must be a reference"),
        ({"credentials": f"env:A:{SECRET}"}, "must be a reference"),
        ({"credentials": [SECRET]}, "credentials must be str"),
        ({"endpoint": f"https://user:{SECRET}@host"}, "must not hold a user"),
        ({"endpoint": f"ftp://{SECRET}"}, "must be a URL"),
        ({"endpoint": "https://host:x"}, "must be a URL"),
        ({"ca_file": "relative.pem"}, "must be an absolute path"),
        ({"capacity_bytes": -1}, "must not be negative"),
        ({"capacity_bytes": True}, "must be int"),
        ({"endpiont": "https://x"}, "unknown setting 'endpiont'"),
    ],
)
def test_a_wrong_table_is_named_and_never_repeated(table: dict[str, object], text: str) -> None:
    """A secret in the wrong place does not reach the log by its error."""
    with pytest.raises(ConfigError, match=text) as caught:
        parse_stores({"east": table}, where="p.toml")
    assert "[stores.east]" in str(caught.value)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("name", ["", "East", "a b", "a@b", "x" * 33, "a/b"])
def test_a_name_must_fit_into_a_url(name: str) -> None:
    with pytest.raises(ConfigError, match="a store's name"):
        parse_stores({name: {}}, where="p.toml")


def test_a_store_that_is_not_listed_is_refused() -> None:
    """A record of the pool on a device may name any: this machine's file decides."""
    with pytest.raises(ConfigError, match=r"no \[stores.west\] \(it has east\)"):
        open_remote("s3://west@bucket/x", {"east": StoreSettings()}, deadline_seconds=1.0)
    with pytest.raises(ConfigError, match="is not s3://STORE@BUCKET/PREFIX"):
        open_remote("s3://east@bucket/../x", {"east": StoreSettings()}, deadline_seconds=1.0)


def test_references_are_followed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Variables, a profile, a file; each is read again, and no repr has the secret."""
    (tmp_path / ".aws").mkdir()
    text = f"[{{}}]\naws_access_key_id = K\naws_secret_access_key = {SECRET}%{{{{x\n"
    (tmp_path / ".aws/credentials").write_text(text.format("west"))
    own = tmp_path / "own.ini"
    own.write_text(text.format("default"))
    own.chmod(0o600)
    monkeypatch.setenv("EAST_ACCESS_KEY_ID", "K")
    monkeypatch.setenv("EAST_SECRET_ACCESS_KEY", f"{SECRET}%{{x")
    for reference in ("env:EAST", "profile:west", f"file:{own}"):
        found = find_credentials(reference, where="x")
        assert found is not None
        assert (found.key_id, found.secret.replace("{{", "{")) == ("K", f"{SECRET}%{{x")
        assert SECRET not in repr(found)
        assert found.hidden_in(f"no {found.secret}!") == "no ***!"
    assert find_credentials("none", where="x") is None
    assert find_credentials("", where="x") is None


def test_what_a_reference_lacks_is_said(tmp_path: Path) -> None:
    """Which variable, section or key; a file that others may read is refused."""
    own = tmp_path / "own.ini"
    own.write_text(f"aws_secret_access_key = {SECRET}\n")
    for reference, text in (
        ("env:NOPE", "NOPE_ACCESS_KEY_ID and NOPE_SECRET_ACCESS_KEY"),
        ("profile:none", "No such file"),
        (f"file:{own}", "chmod 600"),
        (f"file:{tmp_path}/absent", "No such file"),
    ):
        own.chmod(0o604)
        with pytest.raises(ConfigError, match=text):
            find_credentials(reference, where="x")
    own.chmod(0o600)
    with pytest.raises(ConfigError, match="not a file of") as caught:
        find_credentials(f"file:{own}", where="x")
    assert SECRET not in str(caught.value)
    own.write_text("[default]\nrole_arn = x\n")
    with pytest.raises(ConfigError, match="has no aws_access_key_id"):
        find_credentials(f"file:{own}", where="x")


def test_a_profile_that_asks_a_service_is_known(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Such a bare URL stays with s3fs, which knows roles and SSO. Keys in the environment win."""
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws/config").write_text("[profile p]\nsso_session = x\nregion = eu-1\n")
    assert not asks_elsewhere(where="x")
    monkeypatch.setenv("AWS_PROFILE", "p")
    assert asks_elsewhere(where="x")
    assert usual_facts(where="x")["region"] == "eu-1"
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "K")
    assert not asks_elsewhere(where="x")
