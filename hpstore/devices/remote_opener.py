"""Which client a remote URL is opened by: obstore for s3:// where it is installed, else fsspec."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import fsspec

from hpstore.devices.base import Device
from hpstore.devices.object_store import ObjectStoreDevice
from hpstore.devices.remote import RemoteDevice
from hpstore.devices.store_client import has_obstore, open_bucket
from hpstore.devices.store_credentials import (
    asks_elsewhere,
    find_credentials,
    profile_facts,
    usual_facts,
)
from hpstore.errors import ConfigError
from hpstore.format.device_urls import has_secrets, without_secrets
from hpstore.format.store_settings import StorePlace, StoreSettings, parse_place

S3FS = "fsspec S3FileSystem"  # a RemoteDevice's driver, of what obstore could open
_log = logging.getLogger(__name__)
_said: set[str] = set()  # why s3:// goes through fsspec: each reason once in a process


def open_remote(
    url: str, stores: Mapping[str, StoreSettings], *, deadline_seconds: float
) -> Device:
    """The device of a URL. `stores`: those that pool.toml names.

    Raises ConfigError for a store that it does not name and for credentials that are not there,
    DeviceMissing for what no client opens.
    """
    place = None if has_secrets(url) else parse_place(url)
    if place is None:
        if url.startswith(("s3://", "s3a://")) and "@" in url and not has_secrets(url):
            raise ConfigError(
                f"device {url} is not s3://STORE@BUCKET/PREFIX, with a name of [stores], one of a "
                "bucket and a prefix without empty parts, '.' and '..'"
            )
        return RemoteDevice(url)
    settings = _settings_of(place, stores, url)
    if reason := _why_fsspec(place, url):
        if reason not in _said:
            _said.add(reason)
            _log.warning("device %s and others are reached through s3fs: %s", url, reason)
        return _through_fsspec(url, place, settings)
    client = open_bucket(place, settings, url=url, deadline_seconds=deadline_seconds)
    return ObjectStoreDevice(client, place.prefix, capacity_bytes=settings.capacity_bytes)


def driver_of(device: Device) -> str:
    """What a device is reached by, also behind wrappers; "" for one of this machine."""
    while (inner := getattr(device, "inner", None)) is not None:
        device = inner
    return str(getattr(device, "driver", ""))


def _settings_of(place: StorePlace, stores: Mapping[str, StoreSettings], url: str) -> StoreSettings:
    if not place.store:
        found = usual_facts(where=url)
        return StoreSettings(endpoint=found.get("endpoint_url", ""), region=found.get("region", ""))
    if place.store not in stores:
        known = ", ".join(sorted(stores)) or "none"
        raise ConfigError(
            f"device {without_secrets(url)}: pool.toml on this machine has no "
            f"[stores.{place.store}] (it has {known}). Add the table with endpoint and credentials."
        )
    settings = stores[place.store]
    if settings.credentials.startswith("profile:") and not (settings.endpoint and settings.region):
        found = profile_facts(settings.credentials, where=f"[stores.{place.store}]")
        settings = replace(
            settings,
            endpoint=settings.endpoint or found.get("endpoint_url", ""),
            region=settings.region or found.get("region", ""),
        )
    return settings


def _why_fsspec(place: StorePlace, url: str) -> str:
    if not has_obstore():
        return "obstore is not installed, which reads several times as fast (hpstore[s3] has it)"
    if place.store:
        return ""
    if fsspec.config.conf.get("s3"):  # of its files and of FSSPEC_S3_... variables
        return "fsspec has settings of its own for s3 here; name the store in pool.toml instead"
    if asks_elsewhere(where=url):
        return "its AWS profile asks a role, SSO or a program for keys, which obstore cannot"
    return ""


def _through_fsspec(url: str, place: StorePlace, settings: StoreSettings) -> Device:
    if not place.store:
        return RemoteDevice(url)
    where = f"[stores.{place.store}]"
    found = find_credentials(settings.credentials, where=where)
    style = "path" if settings.path_style else "virtual"
    client = {"endpoint_url": settings.endpoint or None, "region_name": settings.region or None}
    # Any: fsspec is untyped
    options: dict[str, Any] = {
        "client_kwargs": {
            **{name: value for name, value in client.items() if value},
            **({"verify": settings.ca_file} if settings.ca_file else {}),
        },
        "config_kwargs": {"s3": {"addressing_style": style}},
        "anon": settings.credentials == "none",
    }
    if found is not None:
        options |= {"key": found.key_id, "secret": found.secret, "token": found.token or None}
    plain = f"s3://{place.bucket}/{place.prefix}".rstrip("/")
    return RemoteDevice(
        url, opened_as=plain, options=options, capacity_bytes=settings.capacity_bytes
    )
