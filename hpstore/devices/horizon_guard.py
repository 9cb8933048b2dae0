"""Counters of a device that only rise, and what a new name is compared with (PROTOCOL 1, 12).

`HORIZON`: versions up to it may have been swept. `MARK`: those up to it may have been given out.
Each is a file of one sector in the device's root, written over in place; in a pool with a key, any
but 0 carries its MAC: a device that made one up would stop all puts. Pure, but for errors.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import lru_cache
from hmac import compare_digest
from typing import Protocol

from hpstore.errors import HpstoreError, IntegrityError, NotAuthentic
from hpstore.format.pool_key import PoolKey, Use
from hpstore.format.records import FORMAT, seal, unseal
from hpstore.format.untrusted_bytes import MALFORMED, parsing

RecordStamp = tuple[int, int, int]  # base.py's Stamp, of pool.json
HORIZON, MARK = "horizon.json", "mark.json"
COUNTER_BYTES = 512  # one sector: a power cut leaves the old number or the new one


class HorizonPassed(HpstoreError):
    """A sweep, or a clock that is ahead, has passed a version while it was written: it must be
    planned again, above `horizon`."""

    def __init__(self, text: str = "", *, horizon: int = 0) -> None:
        super().__init__(text)
        self.horizon = horizon


class SectorMoved(HpstoreError):
    """A counter's sector is not what it was compared with; `sector` is what it is now."""

    def __init__(self, text: str = "", *, sector: bytes = b"") -> None:
        super().__init__(text)
        self.sector = sector


class RecordReplaced(HpstoreError):
    """A device's record of membership is not the one that a writer has seen: it must look at it
    again before the file may have its name."""


class NameGuard(Protocol):
    """What a local device compares in one step with a rename: its horizon's sector, and the stamp
    of its record of membership."""

    @property
    def record(self) -> RecordStamp | None:
        """The stamp that the writer has seen; None where it is not compared."""

    def check_sector(self, sector: bytes, url: str) -> None:
        """Raise unless the name may be given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SectorGuard:
    """The horizon's sector must hold these bytes. For a host's service, which has no pool's key:
    whether they allow the name was judged by the writer, who has."""

    sector: bytes
    record: RecordStamp | None = None

    def check_sector(self, sector: bytes, url: str) -> None:
        """Raise SectorMoved unless it is the same."""
        if sector != self.sector:
            raise SectorMoved(f"the horizon of device {url} has moved", sector=sector)


@dataclass(frozen=True, slots=True, kw_only=True)
class HorizonGuard:
    """When a file may have its name. A new version's counter must be above the horizon. A repair
    publishes old counters: the horizon must be what it was, `seen`, before the repair looked.
    `pool_key`: what the horizon must carry the MAC of. `record`: the stamp of the membership that
    the write was planned on (PROTOCOL 4); stores do not compare it."""

    counter: int
    seen: int | None = None
    pool_key: PoolKey | None = None
    record: RecordStamp | None = None

    def check(self, horizon: int, url: str) -> None:
        """Raise HorizonPassed unless the device's horizon allows the name."""
        if self.counter > horizon or self.seen == horizon:
            return
        raise HorizonPassed(
            f"device {url}: a sweep has passed counter {self.counter} (its horizon is {horizon}); "
            "the write is planned again",
            horizon=horizon,
        )

    def check_sector(self, sector: bytes, url: str) -> None:
        """The same by the bytes of its file. Raises IntegrityError, too."""
        where = f"{url}/{HORIZON}"
        self.check(decode_counter(HORIZON, sector, where=where, pool_key=self.pool_key), url)


def encode_counter(name: str, value: int, pool_key: PoolKey | None = None) -> bytes:
    """The sector of a counter. `name`: HORIZON or MARK."""
    mac = {"mac": _mac(name, value, pool_key)} if pool_key is not None and value else {}
    return seal({"format": FORMAT, "counter": value, **mac}).ljust(COUNTER_BYTES)


def decode_counter(name: str, data: bytes, *, where: str, pool_key: PoolKey | None = None) -> int:
    """Its value; 0 for an empty file. Raises IntegrityError; NotAuthentic, one of them, for a
    counter without the key's MAC."""
    if not data:
        return 0
    with contextlib.suppress(IntegrityError, *MALFORMED):  # raised below, with the place
        return _decoded(name, data, pool_key, "")
    with parsing(f"{where}: counter"):
        return _decoded(name, data, pool_key, where)


@lru_cache(maxsize=64)
def _decoded(name: str, data: bytes, pool_key: PoolKey | None, where: str) -> int:
    body = unseal(data, where=where)
    value = int(str(body["counter"]))
    if value and pool_key is not None and not pool_key.lost:
        mac = str(body.get("mac", "")).encode(errors="surrogatepass")
        if not compare_digest(mac, _mac(name, value, pool_key).encode()):
            raise NotAuthentic(f"{where}: counter {value} does not match its MAC: it was forged")
    return value


def _mac(name: str, value: int, pool_key: PoolKey) -> str:
    return pool_key.mac(Use.COUNTER, f"{name}:{value}".encode()).hex()


def risen(name: str, data: bytes, value: int, pool_key: PoolKey | None = None) -> int:
    """The higher one of a counter's sector and `value`; a damaged sector counts for nothing."""
    try:
        return max(decode_counter(name, data, where="", pool_key=pool_key), value)
    except IntegrityError:
        return value


def check_record(guard: NameGuard, found: RecordStamp | None, url: str) -> None:
    """Raise RecordReplaced unless a device's record of membership is the one that was seen."""
    if guard.record is not None and guard.record != found:
        raise RecordReplaced(
            f"the record of membership of device {url} was replaced during a write, which looks at "
            "it again"
        )
