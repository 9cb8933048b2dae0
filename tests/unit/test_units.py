"""Bytes are parsed, shown and divided exactly."""

from __future__ import annotations

import pytest

from hpstore.errors import ConfigError
from hpstore.units import (
    GIB,
    KIB,
    MIB,
    div_ceil,
    format_bytes,
    format_seconds,
    parse_bytes,
    positive,
    round_down,
    round_up,
)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("4096", 4096),
        ("0", 0),
        (4096, 4096),
        ("64MiB", 64 * MIB),
        ("64 mib", 64 * MIB),
        ("  64M ", 64 * MIB),
        ("10 GB", 10 * 1000**3),
        ("10G", 10 * GIB),
        ("1.5k", 1536),
        ("3b", 3),
        ("2kb", 2000),
        ("1TiB", 1024 * GIB),
        ("1tb", 1000**4),
    ],
)
def test_sizes_are_parsed(text: str | int, count: int) -> None:
    """Binary and decimal suffixes in any case, with and without space."""
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1e3", "4 096", "1.5.2k", "10 parsecs", "١٢"])
def test_what_is_no_size_is_refused_by_name(text: str) -> None:
    """The error shows the text and how to write it."""
    with pytest.raises(ConfigError, match="64MiB") as caught:
        parse_bytes(text)
    assert repr(text) in str(caught.value)


def test_whole_numbers_are_parsed_exactly() -> None:
    """Counts above 2^53 lose nothing on the way through the parser."""
    assert parse_bytes("9007199254740993") == 9007199254740993


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (64 * MIB, "64.0 MiB"),
        (3 * GIB, "3.0 GiB"),
        (5 * 1024 * GIB, "5.0 TiB"),
        (5000 * 1024 * GIB, "5000.0 TiB"),
    ],
)
def test_bytes_are_shown_in_binary_units(count: int, text: str) -> None:
    """format_bytes chooses the largest unit below the count."""
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 ms"),
        (0.000123, "0.123 ms"),
        (0.0227, "22.7 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1 s"),
        (3.552, "3.55 s"),
        (240.0, "240 s"),
    ],
)
def test_times_are_shown_with_three_figures_and_no_exponent(seconds: float, text: str) -> None:
    """A call of 3.5 s was "3.55e+03 ms" before."""
    assert format_seconds(seconds) == text


def test_division_says_its_intent() -> None:
    """div_ceil rounds up, round_up and round_down go to multiples."""
    assert [div_ceil(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert [round_up(n, KIB) for n in (0, 1, KIB, KIB + 1)] == [0, KIB, KIB, 2 * KIB]
    assert [round_down(n, KIB) for n in (0, KIB - 1, KIB, 2 * KIB - 1)] == [0, 0, KIB, KIB]


def test_counts_of_options_are_above_0() -> None:
    """As text; what is none is a ValueError, which argparse shows."""
    assert positive("12") == 12
    for text in ("0", "-3", "1.5", ""):
        with pytest.raises(ValueError):
            positive(text)
