"""Object stores as pool.toml names them: [stores.NAME], and s3://NAME@bucket/prefix. Pure.

Credentials are references: the names of environment variables, a profile or a file. A secret itself
is refused here, and no error repeats what was written in its place.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from urllib.parse import urlsplit

from hpstore.errors import ConfigError
from hpstore.units import parse_bytes

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")
_URL = re.compile(r"s3a?://(?:([^/@:?#]+)@)?([^/@?#]+)(?:/([^?#]*))?")
_REFERENCE = re.compile(r"env:[A-Za-z_][A-Za-z0-9_]{0,63}|profile:[\w.@-]{1,64}|file:/[^\0]+|none|")
_SECRETIVE = re.compile(r"(?i)secret|passw|token|access_?key|^key$|credential_value")
_STORES_MOST = 64
_HOW = (
    'write credentials = "env:PREFIX" for the variables PREFIX_ACCESS_KEY_ID and '
    'PREFIX_SECRET_ACCESS_KEY, "profile:NAME" for one of ~/.aws/credentials, "file:/PATH", or '
    '"none" for a public bucket'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    """How one object store is reached (docs/pool-toml.md)."""

    endpoint: str = field(
        default="", metadata={"text": "URL of the server; by default AWS, or AWS_ENDPOINT_URL"}
    )
    region: str = field(default="", metadata={"text": "by default AWS_REGION, else us-east-1"})
    credentials: str = field(
        default="",
        metadata={
            "text": "env:PREFIX, profile:NAME, file:/PATH or none; by default as AWS' tools do: "
            "AWS_ACCESS_KEY_ID, a profile, the machine's role"
        },
    )
    path_style: bool = field(
        default=True, metadata={"text": "the bucket is in the path; false: in the host name"}
    )
    ca_file: str = field(
        default="", metadata={"text": "PEM file of a private certificate authority"}
    )
    capacity_bytes: int = field(
        default=0, metadata={"text": "quota of each device on this store; 0: not known"}
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StorePlace:
    """A device's place in a store. `store`: a name in [stores], "" for the store of AWS' tools."""

    store: str
    bucket: str
    prefix: str


def parse_place(url: str) -> StorePlace | None:
    """Where an s3:// URL points; None for a URL of another kind, or with a query or a password."""
    found = _URL.fullmatch(url)
    if found is None or not _BUCKET.fullmatch(found[2]):
        return None
    parts = (found[3] or "").strip("/").split("/")
    if parts != [""] and any(part in ("", ".", "..") for part in parts):
        return None
    return StorePlace(store=found[1] or "", bucket=found[2], prefix="/".join(parts))


def parse_stores(raw: object, *, where: str) -> dict[str, StoreSettings]:
    """The tables under [stores]. Raises ConfigError, never with a value that may be a secret."""
    if not isinstance(raw, Mapping) or not all(isinstance(v, Mapping) for v in raw.values()):
        raise ConfigError(f"{where}: stores must be tables, as [stores.east]")
    if len(raw) > _STORES_MOST:
        raise ConfigError(f"{where}: {len(raw)} stores; at most {_STORES_MOST}")
    return {name: _parse(name, table, f"{where}: [stores.{name}]") for name, table in raw.items()}


def _parse(name: str, table: Mapping[str, object], where: str) -> StoreSettings:
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{where}: a store's name is up to 32 of a-z, 0-9, - and _, as it stands in a URL"
        )
    defaults = StoreSettings()
    known = {known.name for known in fields(defaults)}
    values: dict[str, object] = {}
    for key, value in table.items():
        if key not in known:
            if _SECRETIVE.search(key):
                raise ConfigError(f"{where}: {key} does not belong in pool.toml: {_HOW}")
            raise ConfigError(f"{where}: unknown setting {key!r}; there are {sorted(known)}")
        if key == "capacity_bytes" and isinstance(value, str):
            value = parse_bytes(value)
        wanted = type(getattr(defaults, key))
        if type(value) is not wanted:
            raise ConfigError(f"{where}: {key} must be {wanted.__name__}")
        values[key] = value
    made = replace(defaults, **values)  # type: ignore[arg-type]
    if not _REFERENCE.fullmatch(made.credentials):
        raise ConfigError(f"{where}: credentials must be a reference: {_HOW}")
    if made.capacity_bytes < 0:
        raise ConfigError(f"{where}: capacity_bytes must not be negative")
    _check_endpoint(made.endpoint, where)
    if "\0" in made.ca_file or (made.ca_file and not made.ca_file.startswith("/")):
        raise ConfigError(f"{where}: ca_file must be an absolute path")
    return made


def _check_endpoint(endpoint: str, where: str) -> None:
    if not endpoint:
        return
    try:
        parts = urlsplit(endpoint)
        fine = parts.scheme in ("http", "https") and bool(parts.hostname)
        fine = fine and parts.port != 0 and endpoint.isprintable()
    except ValueError:
        fine = False
    if fine and (parts.username is not None or parts.password is not None or parts.query):
        raise ConfigError(f"{where}: endpoint must not hold a user, a password or a query: {_HOW}")
    if not fine:
        raise ConfigError(f"{where}: endpoint must be a URL, as https://s3.example.org:9000")


def as_tables(stores: Mapping[str, StoreSettings]) -> dict[str, dict[str, object]]:
    """What is not by default, by name: for pool.toml."""
    defaults = StoreSettings()
    return {
        name: {
            known.name: getattr(made, known.name)
            for known in fields(made)
            if getattr(made, known.name) != getattr(defaults, known.name)
        }
        for name, made in stores.items()
    }
