"""Where the registers of a pool may be, as a URL. Pure.

devices                                 the pool's own devices (the default)
etcd://HOST:PORT,HOST:PORT/PREFIX       etcd, several endpoints of one cluster
etcds://HOST:PORT,HOST:PORT/PREFIX      the same over TLS
s3://BUCKET/PREFIX?endpoint=URL         an object store with conditional writes
host://HOST:PORT                        the service of one host, which keeps them in a file
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlsplit

from hpstore.errors import ConfigError
from hpstore.format.host_calls import DEFAULT_PORT

DEVICES = "devices"
_ETCD_PORT = 2379
_ENDPOINTS_MOST = 15
_URL_CHARACTERS_MOST = 2048
_PART = re.compile(r"[A-Za-z0-9._/-]{0,200}")
_HOST = re.compile(r"[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]")
_BUCKET = re.compile(r"[A-Za-z0-9.-]{3,63}")
_FORMS = (
    "devices, etcd://HOST:PORT,.../PREFIX, etcds://..., s3://BUCKET/PREFIX?endpoint=URL or "
    "host://HOST:PORT"
)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A member of a cluster, as clients reach it."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdUrl:
    """A cluster of etcd. `prefix`: of all keys there, without a slash at its end."""

    endpoints: tuple[Endpoint, ...]
    prefix: str
    tls: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Url:
    """A bucket. `endpoint` and `region` "" for those of the environment."""

    bucket: str
    prefix: str
    endpoint: str
    region: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostUrl:
    """A host whose service keeps registers (`hpstore host serve --registers`)."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"host://{Endpoint(self.host, self.port)}"


RegisterUrl = EtcdUrl | S3Url | HostUrl | None


def parse_register_url(text: str) -> RegisterUrl:
    """What a URL of registers says; None for the pool's devices. Raises ConfigError."""
    if text == DEVICES:
        return None
    try:
        if len(text) > _URL_CHARACTERS_MOST:
            raise ValueError("it is too long")
        split = urlsplit(text)
        if "@" in split.netloc:
            raise ValueError("it holds a login, and is recorded on every device")
        if split.scheme in ("etcd", "etcds"):
            return _etcd(split.netloc, split.path, split.query, tls=split.scheme == "etcds")
        if split.scheme == "s3":
            return _s3(split.netloc, split.path, split.query)
        if split.scheme == "host":
            return _host(split.netloc, split.path, split.query)
        raise ValueError("its beginning is unknown")
    except ValueError as error:
        raise ConfigError(
            f"{text[:120]!r} names no registers: {error}. Use {_FORMS}. Nothing was changed."
        ) from error


def _etcd(netloc: str, path: str, query: str, *, tls: bool) -> EtcdUrl:
    endpoints = tuple(_endpoint(part) for part in netloc.split(","))
    if len(endpoints) > _ENDPOINTS_MOST or len(set(endpoints)) < len(endpoints):
        raise ValueError(f"endpoints are given twice, or more than {_ENDPOINTS_MOST}")
    if query:
        raise ValueError("options are not known")
    return EtcdUrl(endpoints=endpoints, prefix=_prefix(path) or "hpstore", tls=tls)


def _host(netloc: str, path: str, query: str) -> HostUrl:
    if path.strip("/") or query:
        raise ValueError("a host has no prefix and no options")
    found = _endpoint(netloc, DEFAULT_PORT)
    return HostUrl(host=found.host, port=found.port)


def _endpoint(text: str, usual_port: int = _ETCD_PORT) -> Endpoint:
    host, colon, port = text.rpartition(":")
    if not colon or port.endswith("]"):
        host, port = text, str(usual_port)
    if not _HOST.fullmatch(host):
        raise ValueError(f"{text[:60]!r} is no HOST:PORT")
    if not port.isascii() or not port.isdigit() or len(port) > 5 or not 0 < int(port) < 65536:
        raise ValueError(f"{port[:20]!r} is no port")
    return Endpoint(host.strip("[]"), int(port))


def _s3(bucket: str, path: str, query: str) -> S3Url:
    if not _BUCKET.fullmatch(bucket):
        raise ValueError(f"{bucket[:70]!r} is no bucket")
    options = dict(parse_qsl(query, strict_parsing=True)) if query else {}
    if not options.keys() <= {"endpoint", "region"}:
        raise ValueError(f"options are endpoint and region, not {sorted(options)}")
    endpoint = options.get("endpoint", "")
    if endpoint and (
        urlsplit(endpoint).scheme not in ("http", "https") or "@" in urlsplit(endpoint).netloc
    ):
        raise ValueError("endpoint is an http or https URL without a login")
    return S3Url(
        bucket=bucket,
        prefix=_prefix(path) or "hpstore",
        endpoint=endpoint,
        region=options.get("region", ""),
    )


def _prefix(path: str) -> str:
    if not _PART.fullmatch(path) or "//" in path or ".." in path:
        raise ValueError("a prefix is letters, digits and . _ - between single slashes")
    return path.strip("/")
