"""Small durable records: device identity, membership, debts. Pure: dataclasses <-> JSON bytes.

Each record is JSON that an operator can read, with a digest over the rest of it.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import lru_cache
from hmac import compare_digest

from hpstore.errors import ConfigError, FormatTooNew, IntegrityError, NotAuthentic
from hpstore.format.checksum import digest128
from hpstore.format.geometry import check_unit_bytes, check_width
from hpstore.format.keys import Version, check_key
from hpstore.format.placement import lost_columns
from hpstore.format.pool_key import PoolKey, Use
from hpstore.format.untrusted_bytes import MALFORMED, brief, finite, no_constant

FORMAT = 1
SPREAD_FORMAT = 2  # a pool record with a spread, which an older hpstore would not keep to
KEY_FORMAT = 3  # one of a pool with a key, whose files an older hpstore would not see
NEWEST_FORMAT = 4  # one with a place of registers, which an older hpstore would look for elsewhere
MAX_RECORD_BYTES = 4 << 20  # readers refuse longer ones, which an attacker could have written
MAX_DOMAIN_BYTES = 255
IDENTITY_FILE = "hpstore.json"
POOL_FILE = "pool.json"

_MOST = 1 << 64

Json = dict[str, object]


def check_domain(domain: object) -> str:
    """The domain, if it can name what fails together. Raises ConfigError."""
    text = domain if isinstance(domain, str) and domain.isprintable() else ""
    if 0 < len(text.encode()) <= MAX_DOMAIN_BYTES:
        return text
    raise ConfigError(
        f"{str(domain)[:40]!r} cannot name a failure domain: printable text of 1 to "
        f"{MAX_DOMAIN_BYTES} bytes"
    )


def seal(body: Json) -> bytes:
    """JSON with its digest."""
    text = json.dumps(body, sort_keys=True, ensure_ascii=False)
    try:
        digest = digest128(text.encode()).hex()
    except UnicodeEncodeError as error:
        near = text[max(0, error.start - 40) : error.end + 10]
        raise ConfigError(f"{near!r} cannot be recorded as text: {error.reason}") from error
    return json.dumps(
        {**body, "digest": digest}, sort_keys=True, ensure_ascii=False, indent=1
    ).encode()


def unseal(data: bytes, *, where: str, newest: int = FORMAT, users: bool = False) -> Json:
    """Check and decode a record. Raises IntegrityError or FormatTooNew.

    Its numbers are finite and of 64 bits, unless it holds values of `users`.
    """
    numbers: dict[str, Callable[[str], object]] = {
        "parse_int": _whole,
        "parse_float": finite,
        "parse_constant": no_constant,
    }
    try:
        body = json.loads(data, **({} if users else numbers))  # type: ignore[arg-type]
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"{where}: not a record: {error}") from error
    if not isinstance(body, dict):
        raise IntegrityError(f"{where}: not a record")
    digest = body.pop("digest", None)
    text = json.dumps(body, sort_keys=True, ensure_ascii=False)
    if digest != digest128(text.encode(errors="surrogatepass")).hex():
        raise IntegrityError(f"{where}: record does not match its digest")
    _check_format(body, where, newest)
    return body


def _check_format(body: Json, where: str, newest: int) -> None:
    version = body.get("format")
    if isinstance(version, int) and version > newest:
        raise FormatTooNew(f"{where}: record format {version}, this hpstore reads up to {newest}")


def _whole(text: str) -> int:
    """An integer of a record: of 64 bits, with a sign or without."""
    if len(text) > 20 or not -_MOST <= (number := int(text)) < _MOST:
        raise ValueError(f"{text[:24]} has more than 64 bits")
    return number


class DeviceState(StrEnum):
    """What the pool has decided about a device."""

    ONLINE = "online"
    DRAINING = "draining"  # readable, takes no new columns
    EVICTED = "evicted"  # no longer a member; what it held is gone, and not made up for yet
    HEALED = "healed"  # evicted, and everything has been rebuilt since


_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


def _id(text: object) -> str:
    """An id of a pool or a device: part of paths on this host, so it holds nothing else. Raises
    ValueError."""
    if not _ID.fullmatch(str(text)):
        raise ValueError(f"{str(text)[:80]!r} is not an id")
    return str(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What a device root says of itself (hpstore.json)."""

    pool_id: str
    device_id: str
    domain: str
    weight: float = 1.0

    def encode(self) -> bytes:
        return seal(
            {
                "format": FORMAT,
                "pool": self.pool_id,
                "device": self.device_id,
                "domain": self.domain,
                "weight": self.weight,
            }
        )

    @classmethod
    def decode(cls, data: bytes, *, where: str) -> Identity:
        body = unseal(data, where=where)
        try:
            return cls(
                pool_id=_id(body["pool"]),
                device_id=_id(body["device"]),
                domain=str(body["domain"]),
                weight=float(str(body["weight"])),
            )
        except MALFORMED as error:
            raise IntegrityError(f"{where}: identity is malformed: {brief(error)}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A device in the membership record."""

    device_id: str
    url: str  # where it was when it joined; a hint for people, pool.toml says where to look
    domain: str
    weight: float = 1.0
    state: DeviceState = DeviceState.ONLINE
    since_ms: int = 0  # when it was evicted, milliseconds since 1970

    @property
    def left(self) -> bool:
        """No longer a member."""
        return self.state in (DeviceState.EVICTED, DeviceState.HEALED)


PAST_DAYS = 7  # after which a device that was made up for is shown no more


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisterPlace:
    """Where the registers of a pool are. `url` as agreement/register_url.py reads it. `epoch`: what
    every record that is valid there is marked with; each place, also the same one again, has its
    own."""

    url: str
    epoch: str

    def as_dict(self) -> Json:
        """For a record."""
        return {"url": self.url, "epoch": self.epoch}

    @classmethod
    def of(cls, body: object) -> RegisterPlace | None:
        """From a record. Raises ValueError."""
        if body is None:
            return None
        if not isinstance(body, dict) or len(url := str(body["url"])) > 2048:
            raise ValueError("registers are not a place")
        epoch = str(body["epoch"])
        if not re.fullmatch(r"[0-9a-f]{16}", epoch):
            raise ValueError(f"{epoch[:40]!r} is not an epoch of registers")
        return cls(url=url, epoch=epoch)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRecord:
    """The membership (pool.json): PROTOCOL 14."""

    pool_id: str
    generation: int
    nonce: str
    parent: str  # digest of the record before this one; "" for the first
    data: int
    parity: int
    unit_bytes: int
    members: tuple[Member, ...]
    evicted: tuple[Member, ...] = field(default=())
    spread: int | None = None  # most columns of an object that a failure domain holds: a bound
    key_id: str = ""  # fingerprint of the pool's key; "" for a pool that has none
    registers: RegisterPlace | None = None  # None: on the devices, as in every new pool

    @property
    def order(self) -> tuple[int, str]:
        """Which record it is, and which generation comes first."""
        return (self.generation, self.nonce)

    def member(self, device_id: str) -> Member | None:
        """The member of that id."""
        return next((m for m in self.members if m.device_id == device_id), None)

    def unhealed(self) -> frozenset[str]:
        """Evicted devices whose columns have not been made up for by a whole rebuild yet."""
        return frozenset(m.device_id for m in self.evicted if m.state is not DeviceState.HEALED)

    def unhealed_since(self) -> dict[str, int]:
        """The same with when each was evicted: one that left twice is two losses."""
        unhealed = self.unhealed()
        return {m.device_id: m.since_ms for m in self.evicted if m.device_id in unhealed}

    def weight(self, devices: Collection[str]) -> int:
        """Most columns of one object that these devices can hold: by failure domain, as far as
        `spread` bounds that, else one each (PROTOCOL 14)."""
        if not devices:
            return 0
        domains = {m.device_id: m.domain for m in (*self.evicted, *self.members)}
        return lost_columns([domains.get(device, device) for device in devices], self.spread)

    def opens_without(self, devices: Collection[str]) -> bool:
        """Whether the pool can be opened while these members do not answer (PROTOCOL 14)."""
        return self.weight(devices) <= self.parity

    def reached_by(self, holders: Collection[str]) -> bool:
        """Whether a record that these members hold is found at every opening: on a quorum, and on
        more than what may be missing then."""
        held = [m.device_id for m in self.members if m.device_id in holders]
        enough = min(self.parity + 1, self.weight([m.device_id for m in self.members]))
        return len(held) >= self.quorum() and self.weight(held) >= enough

    def quorum(self) -> int:
        """Devices that must hold a new record: max(m + 1, majority), at most all."""
        return min(max(self.parity + 1, len(self.members) // 2 + 1), len(self.members))

    def encode(self, pool_key: PoolKey | None = None) -> bytes:
        """Its bytes; with the MAC of a pool that has a key.

        Raises ConfigError for more than MAX_RECORD_BYTES, with which no pool would open.
        """
        body = self._body()
        if pool_key is not None:
            body["mac"] = pool_key.mac(Use.RECORD, _canonical(body)).hex()
        data = seal(body)
        if len(data) > MAX_RECORD_BYTES:
            raise ConfigError(
                f"the pool's record would have {len(data)} bytes for {len(self.members)} devices, "
                f"{MAX_RECORD_BYTES} at most are read. Nothing was changed. Give devices shorter "
                "paths or URLs"
            )
        return data

    def _body(self) -> Json:
        def rows(members: Iterable[Member]) -> list[Json]:
            return [
                {
                    "device": m.device_id,
                    "url": m.url,
                    "domain": m.domain,
                    "weight": m.weight,
                    "state": m.state,
                    **({"since_ms": m.since_ms} if m.since_ms else {}),
                }
                for m in members
            ]

        old = FORMAT if self.spread is None else SPREAD_FORMAT
        old = KEY_FORMAT if self.key_id else old
        return {
            "format": old if self.registers is None else NEWEST_FORMAT,
            **({} if self.registers is None else {"registers": self.registers.as_dict()}),
            **({} if self.spread is None else {"spread": self.spread}),
            **({"key": self.key_id} if self.key_id else {}),
            "pool": self.pool_id,
            "generation": self.generation,
            "nonce": self.nonce,
            "parent": self.parent,
            "data": self.data,
            "parity": self.parity,
            "unit_bytes": self.unit_bytes,
            "members": rows(self.members),
            "evicted": rows(self.evicted),
        }

    def successor(
        self, *, members: Iterable[Member], evicted: Iterable[Member], nonce: str
    ) -> PoolRecord:
        """The next generation."""
        return replace(
            self,
            generation=self.generation + 1,
            nonce=nonce,
            parent=digest128(self.encode()).hex(),
            members=tuple(members),
            evicted=tuple(evicted),
        )

    @staticmethod
    def decode(data: bytes, *, where: str, pool_key: PoolKey | None = None) -> PoolRecord:
        """A record from one of its devices; those of all the others hold the same bytes.

        Raises NotAuthentic for one of a pool with a key that the settings lack, with another key,
        or without a MAC of theirs.
        """
        with contextlib.suppress(IntegrityError, FormatTooNew):  # raised below, with the place
            return _decoded(data, pool_key)
        return PoolRecord._parse(data, where, pool_key)

    @classmethod
    def _parse(cls, data: bytes, where: str, pool_key: PoolKey | None) -> PoolRecord:
        keyed = pool_key is not None  # then the MAC first: of any format, a device may make it up
        body = unseal(data, where=where, newest=_MOST if keyed else NEWEST_FORMAT)
        _check_mac(body, pool_key, where)
        _check_format(body, where, NEWEST_FORMAT)

        def members(name: str) -> tuple[Member, ...]:
            rows = body[name]
            if not isinstance(rows, list):
                raise ValueError(f"{name} is not a list")
            return tuple(
                Member(
                    device_id=str(row["device"]),
                    url=str(row["url"]),
                    domain=str(row["domain"]),
                    weight=float(row["weight"]),
                    state=DeviceState(row["state"]),
                    since_ms=int(row.get("since_ms", 0)),
                )
                for row in rows
            )

        try:
            return _checked(
                cls(
                    pool_id=_id(body["pool"]),
                    generation=int(str(body["generation"])),
                    nonce=str(body["nonce"]),
                    parent=str(body["parent"]),
                    data=int(str(body["data"])),
                    parity=int(str(body["parity"])),
                    unit_bytes=int(str(body["unit_bytes"])),
                    members=members("members"),
                    evicted=members("evicted"),
                    spread=_spread(body),
                    key_id=str(body.get("key", "")),
                    registers=RegisterPlace.of(body.get("registers")),
                )
            )
        except MALFORMED as error:
            raise IntegrityError(f"{where}: membership is malformed: {brief(error)}") from error


def _checked(record: PoolRecord) -> PoolRecord:
    """The same record, of a pool that can be. Raises ValueError."""
    check_width(record.data, record.parity)
    check_unit_bytes(record.unit_bytes)
    ids = [member.device_id for member in record.members]
    if not ids or len({_id(device) for device in ids}) < len(ids):
        raise ValueError("it has no members, or some with the same id")
    if record.generation < 0 or any(m.weight < 0 for m in record.members):
        raise ValueError("a generation or a weight is out of range")
    return record


def _spread(body: Json) -> int | None:
    if "spread" not in body:
        return None
    spread, parity = int(str(body["spread"])), int(str(body["parity"]))
    if not 1 <= spread <= parity:
        raise ValueError(f"spread {spread} is not between 1 and parity {parity}")
    return spread


def _canonical(body: Json) -> bytes:
    """What a MAC is over."""
    return _utf8(json.dumps(body, sort_keys=True, ensure_ascii=False))


def _utf8(value: object) -> bytes:
    """Of any text that a device may hold: compare_digest takes no other str than of ASCII."""
    return str(value).encode(errors="surrogatepass")


def _check_mac(body: Json, pool_key: PoolKey | None, where: str) -> None:
    """Raise NotAuthentic unless a membership is of the pool that the settings have the key of."""
    mac, key_id = _utf8(body.pop("mac", "")), str(body.get("key", ""))
    if pool_key is None and not key_id:
        return
    if pool_key is None:
        raise NotAuthentic(f"{where}: the pool has a key, and pool.toml does not have it")
    if not key_id:
        raise NotAuthentic(f"{where}: pool.toml has a key, and this membership is without one")
    if pool_key.lost:
        return
    if key_id != pool_key.fingerprint(str(body.get("pool", ""))):
        raise NotAuthentic(f"{where}: the pool has another key ({key_id}) than pool.toml")
    if not compare_digest(mac, _utf8(pool_key.mac(Use.RECORD, _canonical(body)).hex())):
        raise NotAuthentic(f"{where}: the membership does not match its MAC: it was forged")


@lru_cache(maxsize=64)
def _decoded(data: bytes, pool_key: PoolKey | None) -> PoolRecord:
    return PoolRecord._parse(data, "", pool_key)


@dataclass(frozen=True, slots=True, kw_only=True)
class Debt:
    """A put that was acknowledged short of its full stripe (PROTOCOL 5)."""

    key: str
    version: Version
    missing: tuple[int, ...]

    @property
    def name(self) -> str:
        """File name, unique for key and version."""
        return f"{digest128(self.key.encode()).hex()[:16]}-{self.version}.json"

    def encode(self) -> bytes:
        return seal(
            {
                "format": FORMAT,
                "key": self.key,
                "version": str(self.version),
                "missing": list(self.missing),
            }
        )

    @classmethod
    def decode(cls, data: bytes, *, where: str) -> Debt:
        body = unseal(data, where=where)
        missing = body.get("missing")
        try:
            if not isinstance(missing, list):
                raise ValueError("missing is not a list")
            return cls(
                key=check_key(str(body["key"])),
                version=Version.parse(str(body["version"])),
                missing=tuple(int(column) for column in missing),
            )
        except MALFORMED as error:
            raise IntegrityError(f"{where}: debt is malformed: {brief(error)}") from error


def shown_members(record: PoolRecord, now_ms: int, *, past: bool = False) -> list[Member]:
    """Members, and devices that have left, for screens: without those that left PAST_DAYS ago and
    that nothing depends on, unless the `past` is wanted. Pure."""
    until_ms = now_ms - PAST_DAYS * 86_400_000
    return [
        *record.members,
        *(
            m
            for m in record.evicted
            if past or m.state is not DeviceState.HEALED or m.since_ms > until_ms
        ),
    ]
