"""Keys name objects and nothing else; names of files say what they are."""

from __future__ import annotations

import pytest

from hpstore.errors import InvalidKey
from hpstore.format.keys import (
    MAX_KEY_BYTES,
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

NAME = ColumnName(version=Version(5, 6, 7), kind=Kind.COLUMN, column=3, data=4, parity=2)


@pytest.mark.parametrize(
    "key",
    [
        "",
        "/",
        "/a",
        "a/",
        "a//b",
        ".",
        "..",
        "a/../b",
        "a/./b",
        "a/..",
        "a\0b",
        "a\nb",
        "a\tb",
        "a\x7fb",
        "\x1b[31m",
        "x" * 5000,
        "x/" * 600 + "x",
        "x" * 256,
        "a/" + "ä" * 128,
        "%" * 86,
        "\ud800",
        "a/\udfff",
    ],
)
def test_bad_keys_are_refused(key: str) -> None:
    """Empty or dotted components, control characters, too long, not Unicode."""
    with pytest.raises(InvalidKey):
        check_key(key)


@pytest.mark.parametrize("key", [None, 5, b"a", ("a",), ["a"]])
def test_keys_are_str(key: object) -> None:
    """Bytes and paths are not turned into keys silently."""
    with pytest.raises(InvalidKey, match="str"):
        check_key(key)  # type: ignore[arg-type]  # that is the test


@pytest.mark.parametrize(
    "key",
    [
        "a",
        "a/b",
        "...",
        ".hidden",
        "a b",
        "ä/日本/🎉",
        "@a",
        "a@",
        "100%",
        "%41",
        "x" * 255,
        "\\",
        "-",
        "~",
        "x/" * 511 + "xx",
        "CON",
        "a:b",
        "*",
    ],
)
def test_good_keys_are_returned_as_they_are(key: str) -> None:
    """Whatever a directory can be called, with its place inside objects/."""
    assert check_key(key) == key
    parts = object_directory(key).split("/")
    assert parts[0] == "objects"
    assert "/".join(unescape(part) for part in parts[1:]) == key
    assert all(part not in ("", ".", "..") for part in parts)
    assert all(len(part.encode()) <= MAX_NAME_BYTES for part in parts)


def test_the_longest_key_is_allowed_and_one_more_byte_is_not() -> None:
    """The limit counts bytes of UTF-8."""
    longest = "/".join(["ä" * 127] * 4) + "/abc"
    assert len(longest.encode()) <= MAX_KEY_BYTES
    longest += "x" * (MAX_KEY_BYTES - len(longest.encode()))
    assert check_key(longest) == longest
    with pytest.raises(InvalidKey):
        check_key(longest + "x")


def test_an_error_about_a_long_key_is_short() -> None:
    """A message of 5,000 characters helps nobody."""
    with pytest.raises(InvalidKey) as caught:
        check_key("x" * 5000)
    assert len(str(caught.value)) < 200


def test_a_key_and_its_extension_have_different_places() -> None:
    """`a` and `a/b` can both be objects: files of `a` never look like a component."""
    assert object_directory("a/b").startswith(object_directory("a") + "/")
    column_of_a = f"{object_directory('a')}/{NAME}"
    assert column_of_a != object_directory(f"a/{NAME}")
    assert parse_column_name(object_directory(f"a/{NAME}").rsplit("/", 1)[-1]) is None


@pytest.mark.parametrize("folding", [False, True])
@pytest.mark.parametrize(
    "part", ["@", "@@", "@x", "x@", "%", "%%", "%40", "%25", "@%40", "a%2fb", "%zz", "%4"]
)
def test_reserved_characters_come_back(part: str, folding: bool) -> None:
    """A component that starts with @ or holds % is escaped, and no name on disk starts with @."""
    name = escape(part, folding=folding)
    assert unescape(name) == part
    assert not name.startswith("@")


def test_folding_never_maps_two_keys_together() -> None:
    """Names differ even after the filesystem lower-cases and normalises them."""
    parts = [
        "a",
        "A",
        "%41",
        "%61",
        "ä",
        "Ä",
        "a\u0308",
        "A\u0308",
        "ß",
        "SS",
        "ss",
        "\u017f",
        "K",
        "\u212a",
        "k",
        "İ",
        "i̇",
        "@a",
        "@A",
        "%40a",
        "ﬁ",
        "fi",
    ]
    names = [escape(part, folding=True) for part in parts]
    assert all(name.isascii() and name == name.casefold() for name in names)
    assert len(set(names)) == len(parts)
    assert [unescape(name) for name in names] == parts


def test_a_component_too_long_for_a_folding_device_is_refused() -> None:
    """Escaping triples upper case; what does not fit says so instead of failing on the device."""
    assert escape("X" * 85, folding=True) == "%58" * 85
    with pytest.raises(InvalidKey, match="folds"):
        escape("X" * 86, folding=True)


def test_column_names_read_back() -> None:
    """str() and parse_column_name() are inverse; the form is that of docs/format.md."""
    assert str(NAME) == "@0000000000000005-0000000000000006-00000007.c03.4+2"
    assert parse_column_name(str(NAME)) == NAME
    assert len(str(NAME)) <= MAX_NAME_BYTES


@pytest.mark.parametrize(
    "name",
    [
        "",
        "x",
        str(NAME)[1:],
        str(NAME) + ".tmp",
        str(NAME).replace(".c", ".x"),
        str(NAME).upper(),
        str(NAME).replace("c03", "c3"),
        str(NAME).replace("4+2", "4-2"),
        str(NAME) + "\n",
        " " + str(NAME),
        str(NAME).replace("4+2", "4+123"),
    ],
)
def test_other_names_are_no_columns(name: str) -> None:
    """A stray file in a key's directory is passed over."""
    assert parse_column_name(name) is None


@pytest.mark.parametrize("text", ["4+02", "04+2"])
def test_a_column_has_one_name_only(text: str) -> None:
    """What reads as a column is written the same way: else its path would not be found again."""
    assert parse_column_name(str(NAME).replace("4+2", text)) is None


@pytest.mark.parametrize("text", ["", "5-6-7", "x" * 34, str(Version(1, 2, 3)) + "0"])
def test_what_is_no_version_is_refused(text: str) -> None:
    """Version.parse raises ValueError."""
    with pytest.raises(ValueError, match="not a version"):
        Version.parse(text)


def test_versions_order_by_counter_then_nonce_then_revision() -> None:
    """PROTOCOL 1; content is the same for all revisions."""
    assert Version(1, 9, 9) < Version(2, 0, 0)
    assert Version(1, 1, 9) < Version(1, 2, 0)
    assert Version(1, 1, 0) < Version(1, 1, 1)
    assert Version(1, 1, 0).content == Version(1, 1, 5).content
    assert Version(1, 2, 0).content != Version(1, 1, 0).content
