"""Calls on disks of other hosts as text and bytes: what is taken, what is not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpstore.errors import ConfigError, IntegrityError
from hpstore.format.host_calls import (
    DEFAULT_PORT,
    check_directory_path,
    check_file_path,
    decode_listings,
    encode_listings,
    host_domain,
    parse_url,
)
from hpstore.format.keys import object_directory
from hpstore.membership.members import _by_host

NAMES = st.text(st.characters(blacklist_characters="\0/", codec="utf-8"), min_size=1, max_size=60)


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("hpd://b:7300/3", ("b", 7300, 3)),
        ("hpd://10.0.0.2/0", ("10.0.0.2", DEFAULT_PORT, 0)),
        ("hpd://[fd00::2]:7200/1/", ("fd00::2", 7200, 1)),
    ],
)
def test_urls_name_host_port_and_disk(url: str, place: tuple[str, int, int]) -> None:
    assert parse_url(url) == place


@pytest.mark.parametrize(
    "url",
    [
        "hpd://b",
        "hpd://b:0/0",
        "hpd://b:70000/0",
        "hpd://b/x",
        "hpd://b/-1",
        "hpd://b/01",
        "hpd:///0",
        "hpd://u:p@b/0",
        "hpd://b/0?x=1",
        "hpd://b/0/1",
        "http://b/0",
    ],
)
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="hpd://HOST:PORT/NUMBER"):
        parse_url(url)


def test_disks_of_a_host_are_one_failure_domain() -> None:
    """Unless the caller of create says otherwise; local devices beside them are their own."""
    assert host_domain("hpd://b:7200/1") == host_domain("hpd://b:7201/0") == "host-b"
    assert host_domain("/mnt/a") is None
    assert _by_host(["/mnt/a", "hpd://b/0", "hpd://b/1"]) == ["d000", "host-b", "host-b"]
    assert _by_host(["/mnt/a", "/mnt/b"]) is None


@given(st.lists(NAMES.filter(lambda n: n not in (".", "..")), min_size=1, max_size=5))
def test_paths_of_all_keys_pass(parts: list[str]) -> None:
    """Those that a pool makes of any key, folded or not."""
    key = "/".join(part[:20] for part in parts)
    for folding in (False, True):
        try:
            path = f"{object_directory(key, folding=folding)}/@{'0' * 100}"
        except (ConfigError, ValueError):
            continue
        assert check_file_path(path) == path


PARTS = st.sampled_from(["..", ".", "", "a", "@1", "objects"])
BELOW = st.lists(PARTS, min_size=1, max_size=4).map(lambda parts: "/".join(["objects", *parts]))


@given(st.one_of(BELOW, st.text(max_size=40)))
def test_no_path_leads_out(text: str) -> None:
    """Whatever passes is relative, and has no component that climbs."""
    try:
        path = check_directory_path(text)
    except ValueError:
        return
    assert not path.startswith("/")
    assert not {".", "..", ""} & set(path.split("/")[1:])
    assert path.split("/")[0] not in (".", "..")


@given(st.lists(st.lists(st.tuples(NAMES, st.booleans()), max_size=4), max_size=4))
def test_listings_come_back(listings: list[list[tuple[str, bool]]]) -> None:
    kept = [[(n, d) for n, d in names if n not in (".", "..")] for names in listings]
    assert decode_listings(encode_listings(kept)) == kept


@pytest.mark.parametrize(
    "data", [b"x", b"fa", b"fa\0", b"xa\0\0", b"f..\0\0", b"fa/b\0\0", b"f\0\0"]
)
def test_what_is_no_listing_is_refused(data: bytes) -> None:
    with pytest.raises(IntegrityError):
        decode_listings(data)
