"""Escaping is reversible and keeps different keys apart; names and versions survive their text."""

from __future__ import annotations

import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from hpstore.errors import InvalidKey
from hpstore.format.keys import (
    MAX_COUNTER,
    MAX_NAME_BYTES,
    ColumnName,
    Kind,
    Version,
    check_key,
    escape,
    object_directory,
    parse_column_name,
    unescape,
)

letters = st.characters(min_codepoint=32, exclude_categories=("Cs", "Cc"), exclude_characters="/")
tricky = st.sampled_from([*"@%aA0fFäÄ.~", "%40", "%25", "@0", "ß", "İ", "\u0308", "K"])
parts = (
    st.lists(tricky | letters, min_size=1, max_size=12)
    .map("".join)
    .filter(lambda part: part not in (".", ".."))
)
keys = st.lists(parts, min_size=1, max_size=4).map("/".join)
versions = st.builds(
    Version, st.integers(0, MAX_COUNTER - 1), st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1)
)
names = st.builds(
    ColumnName,
    version=versions,
    kind=st.sampled_from(Kind),
    column=st.integers(0, 31),
    data=st.integers(1, 31),
    parity=st.integers(1, 8),
    tag=st.just("") | st.text("0123456789abcdef", min_size=24, max_size=24),
).filter(lambda name: name.column < name.data + name.parity <= 32)


@given(parts, st.booleans())
def test_unescape_is_the_inverse_of_escape(part: str, folding: bool) -> None:
    """For every component, on plain and on folding filesystems."""
    name = escape(part, folding=folding)
    assert unescape(name) == part
    assert not name.startswith("@")
    assert "/" not in name
    assert name not in ("", ".", "..")


@given(parts, parts)
def test_folding_keeps_components_apart(one: str, two: str) -> None:
    """After case folding and normalisation by the filesystem, names are equal only for equals."""

    def on_disk(part: str) -> str:
        return unicodedata.normalize("NFKD", escape(part, folding=True)).casefold()

    assert (on_disk(one) == on_disk(two)) == (one == two)


@given(keys, keys)
def test_different_keys_have_different_directories(one: str, two: str) -> None:
    """On both kinds of filesystem."""
    for folding in (False, True):
        same = object_directory(one, folding=folding) == object_directory(two, folding=folding)
        assert same == (one == two)


@given(keys, names)
def test_a_column_is_never_the_directory_of_another_key(key: str, name: ColumnName) -> None:
    """PROTOCOL 13: `a` and `a/b` can both be objects, whatever b is called."""
    file = f"{object_directory(key)}/{name}"
    assert object_directory(f"{key}/{name}") != file
    assert all(parse_column_name(part) is None for part in object_directory(key).split("/"))


@given(st.text(max_size=40))
def test_any_text_is_a_key_or_is_refused(text: str) -> None:
    """check_key returns its argument or raises InvalidKey; accepted ones have safe directories."""
    try:
        assert check_key(text) == text
    except InvalidKey:
        return
    directories = object_directory(text).split("/")
    assert directories[0] == "objects"
    assert all(part not in ("", ".", "..") and "\0" not in part for part in directories)
    assert all(len(part.encode()) <= MAX_NAME_BYTES for part in directories)


@given(names)
def test_parse_is_the_inverse_of_str(name: ColumnName) -> None:
    """Every name that hpstore writes is read back, and is short enough for any filesystem."""
    assert parse_column_name(str(name)) == name
    assert len(str(name)) <= MAX_NAME_BYTES
    assert str(name).startswith("@")


@given(st.text(max_size=80) | names.map(lambda n: str(n)[:-1]) | names.map(lambda n: f"{n}x"))
def test_what_is_parsed_is_written_the_same(text: str) -> None:
    """A name that parses has one form only."""
    name = parse_column_name(text)
    assert name is None or str(name) == text


@given(versions, versions)
def test_versions_sort_like_their_text(one: Version, two: Version) -> None:
    """Fixed-width hexadecimal: `ls` shows the newest last; the order is total."""
    assert Version.parse(str(one)) == one
    assert (one < two) == (str(one) < str(two))
    assert (one < two) + (two < one) + (one == two) == 1
