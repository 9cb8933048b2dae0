"""Counters of a device that only rise, and what a new name is compared with (PROTOCOL 1, 12).

`HORIZON`: versions up to it may have been swept. `MARK`: those up to it may have been given out.
Each is a file of one sector in the device's root, written over in place. Pure, but for errors.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import lru_cache

from hpstore.errors import HpstoreError, IntegrityError
from hpstore.hostile import MALFORMED, parsing
from hpstore.records import FORMAT, seal, unseal

HORIZON, MARK = "horizon.json", "mark.json"
COUNTER_BYTES = 512  # one sector: a power cut leaves the old number or the new one


class HorizonPassed(HpstoreError):
    """A sweep, or a clock that is ahead, has passed a version while it was written: it must be
    planned again, above `horizon`."""

    def __init__(self, text: str = "", *, horizon: int = 0) -> None:
        super().__init__(text)
        self.horizon = horizon


@dataclass(frozen=True, slots=True, kw_only=True)
class HorizonGuard:
    """When a file may have its name. A new version's counter must be above the horizon. A repair
    publishes old counters: the horizon must be what it was, `seen`, before the repair looked."""

    counter: int
    seen: int | None = None

    def check(self, horizon: int, url: str) -> None:
        """Raise HorizonPassed unless the device's horizon allows the name."""
        if self.counter > horizon or self.seen == horizon:
            return
        raise HorizonPassed(
            f"device {url}: a sweep has passed counter {self.counter} (its horizon is {horizon}); "
            "the write is planned again",
            horizon=horizon,
        )


def encode_counter(value: int) -> bytes:
    """The sector of a counter."""
    return seal({"format": FORMAT, "counter": value}).ljust(COUNTER_BYTES)


def decode_counter(data: bytes, *, where: str) -> int:
    """Its value; 0 for an empty file. Raises IntegrityError."""
    if not data:
        return 0
    with contextlib.suppress(IntegrityError, *MALFORMED):  # raised below, with the place
        return _decoded(data)
    with parsing(f"{where}: counter"):
        return int(str(unseal(data, where=where)["counter"]))


@lru_cache(maxsize=64)
def _decoded(data: bytes) -> int:
    return int(str(unseal(data, where="")["counter"]))


def risen(data: bytes, value: int) -> int:
    """The higher one of a counter's sector and `value`; a damaged sector counts for nothing."""
    try:
        return max(decode_counter(data, where=""), value)
    except IntegrityError:
        return value


__all__ = ["COUNTER_BYTES", "HORIZON", "MARK", "HorizonGuard", "HorizonPassed", "decode_counter",
           "encode_counter", "risen"]  # fmt: skip
