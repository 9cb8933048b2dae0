"""Units of bytes and of time: constants, parsing, formatting, exact and ceiling division."""

from __future__ import annotations

import math
import operator
import re
from decimal import Decimal
from typing import SupportsIndex

from hpstore.errors import ConfigError

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

_FACTORS = {
    "": 1,
    "b": 1,
    "k": KIB,
    "kib": KIB,
    "kb": 1000,
    "m": MIB,
    "mib": MIB,
    "mb": 1000**2,
    "g": GIB,
    "gib": GIB,
    "gb": 1000**3,
    "t": GIB * KIB,
    "tib": GIB * KIB,
    "tb": 1000**4,
}
_SECONDS = {
    "": 1.0,
    "s": 1.0,
    "sec": 1.0,
    "m": 60.0,
    "min": 60.0,
    "h": 3600.0,
    "d": 86400.0,
    "w": 7 * 86400.0,
}


def div_ceil(value: int, divisor: int) -> int:
    """Smallest integer that is at least value / divisor."""
    return -(-value // divisor)


def round_up(value: int, multiple: int) -> int:
    """Smallest multiple that is at least value."""
    return div_ceil(value, multiple) * multiple


def round_down(value: int, multiple: int) -> int:
    """Largest multiple that is at most value."""
    return value // multiple * multiple


def parse_bytes(text: str | int) -> int:
    """Bytes in `text`: "64MiB", "10 GB", "4096". Raises ConfigError."""
    if isinstance(text, int):
        return text
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match.group(2).lower() not in _FACTORS:
        raise ConfigError(f"{text!r} is not a number of bytes; write for example 64MiB or 10GB")
    factor = _FACTORS[match.group(2).lower()]
    return int(Decimal(match.group(1)) * factor)


def parse_seconds(text: str) -> float:
    """Seconds in `text`: "90s", "30min" (or "30m"), "12h", "7d", "2w", "90". Raises ConfigError."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match.group(2).lower() not in _SECONDS:
        raise ConfigError(f"{text!r} is not a span of time; write for example 30min, 12h or 7d")
    return float(match.group(1)) * _SECONDS[match.group(2).lower()]


def seconds_argument(name: str, value: object) -> float:
    """A span of time that a caller gave as the argument `name`: seconds, or text for
    parse_seconds().

    Raises ConfigError, which names the argument, for anything else and for what is not above 0.
    """
    if isinstance(value, str):
        try:
            value = parse_seconds(value)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(
            f'{name} is {value!r}, a {type(value).__name__}: give seconds, or text such as "7d"'
        )
    if not 0 < value < math.inf:
        raise ConfigError(f"{name} is {value!r}: a span of time above 0 is needed")
    return float(value)


def bytes_argument(name: str, value: int | str, *, least: int = 0) -> int:
    """Bytes that a caller gave as the argument `name`: a whole number or text for parse_bytes().

    Raises ConfigError, which names the argument, for anything else and for less than `least`.
    """
    if isinstance(value, str):
        try:
            value = parse_bytes(value)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None
    return whole_argument(name, value, least=least, like='"64MiB" or 4096')


def whole_argument(name: str, value: object, *, least: int, like: str = "4") -> int:
    """A whole number that a caller gave as the argument `name`; `like`: what could be given.

    Raises ConfigError, which names the argument, for anything else and for less than `least`.
    """
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise ConfigError(f"{name} is {value!r}, a {type(value).__name__}: give for example {like}")
    number = operator.index(value)
    if number < least:
        raise ConfigError(f"{name} is {number}, at least {least} is needed")
    return number


def positive(text: str) -> int:
    """A whole number above 0, for options of a command. Raises ValueError."""
    number = int(text)
    if number < 1:
        raise ValueError(f"{text} is not above 0")
    return number


def format_bytes(count: float) -> str:
    """Human-readable binary size, three figures."""
    for name in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {name}" if name == "B" else f"{count:.1f} {name}"
        count /= 1024
    return f"{count:.1f} TiB"


def format_seconds(seconds: float) -> str:
    """What a call took, three figures: milliseconds below a second."""
    return f"{seconds:.3g} s" if seconds >= 0.9995 else f"{seconds * 1e3:.3g} ms"


def format_span(seconds: float) -> str:
    """A span of time for people, in its largest unit: 45 s, 12.0 min, 3.5 h, 9.1 d."""
    for name, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if abs(seconds) >= size:
            return f"{seconds / size:.1f} {name}"
    return f"{seconds:.0f} s"
