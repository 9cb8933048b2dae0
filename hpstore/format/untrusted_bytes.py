"""Bytes that somebody else may have written: what a parser of them may stumble over, and bounds.

A device, an archive, a checkpoint or a file of settings may come from anybody. Its parsers check
every count and size against what is there before they allocate, and raise one class of error:
IntegrityError, or its MalformedFile where a user named the file. MemoryError is not among what is
caught here: a parser that asks for too much is wrong, whatever the bytes were.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from hpstore.errors import FormatTooNew, IntegrityError

MALFORMED = (
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    NotImplementedError,
    RecursionError,
    SyntaxError,
    TypeError,
    ValueError,
    struct.error,
)
"""What code raises that takes bytes for what they are not; ConfigError and InvalidKey are some."""

MOST = (1 << 63) - 1  # of a count or a size: what the arithmetic of numpy and the kernel holds
_SHOWN = 200
_INFLATED_BYTES = 256 << 20
_INFLATED_RATIO = 64  # data that people compress: 2 to 20; zeros by deflate 1,000, by zstd 30,000


def most_inflated(stored_bytes: int) -> int:
    """Bytes that compressed ones may become in memory, at once: what is far beyond both 256 MiB and
    64 times what is stored is refused (docs/decisions/0085)."""
    return max(_INFLATED_BYTES, _INFLATED_RATIO * stored_bytes)


@contextmanager
def parsing(where: str, kind: type[IntegrityError] = IntegrityError) -> Iterator[None]:
    """Inside, bytes become values: what a parser stumbles over is raised as `kind`, with `where`.

    IntegrityError and FormatTooNew pass as they are.
    """
    try:
        yield
    except (IntegrityError, FormatTooNew):
        raise
    except MALFORMED as error:
        raise kind(f"{where} is malformed: {brief(error)}") from error


def brief(error: BaseException) -> str:
    """An error in one short line: its text may hold what was in the bytes."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:_SHOWN]}" if text else type(error).__name__


def whole(value: object, name: str, *, least: int = 0, most: int = MOST) -> int:
    """`value` if it is a whole number from `least` to `most`. Raises ValueError."""
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name} is {str(value)[:40]!r}, not a whole number of {least} to {most}")
    return value


def finite(text: str) -> float:
    """A number of JSON, for `parse_float`: text like 1e999 has no float. Raises ValueError."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:24]} is not a finite number")
    return number


def no_constant(text: str) -> NoReturn:
    """For `parse_constant`: NaN and Infinity are not JSON. Raises ValueError."""
    raise ValueError(f"{text} is not a finite number")
