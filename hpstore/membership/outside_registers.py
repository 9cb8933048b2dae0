"""Registers outside of a pool's devices, as its record names them."""

from __future__ import annotations

from hpstore.agreement.etcd_gateway import ClientCertificates, EtcdGateway
from hpstore.agreement.register_url import DEVICES, EtcdUrl, HostUrl, parse_register_url
from hpstore.agreement.s3_records import S3Records
from hpstore.agreement.swap_registers import SwapRegisters
from hpstore.agreement.swap_store import SwapStore
from hpstore.errors import ConfigError
from hpstore.format.records import RegisterPlace
from hpstore.objects.context import PoolContext

HOLD_SECONDS = 15.0  # a hold that stands still for so long is taken over


def is_outside(place: RegisterPlace) -> bool:
    """Whether it is not on the devices."""
    return place.url != DEVICES


def swap_store(store: PoolContext, place: RegisterPlace) -> SwapStore:
    """The store of a place. Raises ConfigError; asks nothing of it yet."""
    settings = store.settings
    url = parse_register_url(place.url)
    prefix = f"{store.view.record.pool_id}/{place.epoch}"
    if isinstance(url, EtcdUrl):
        tls = ClientCertificates(
            authority=settings.registers_ca_file,
            certificate=settings.registers_certificate_file,
            private_key=settings.registers_key_file,
        )
        return EtcdGateway(url, prefix, tls)
    if isinstance(url, HostUrl):
        return _host_records(store, url, prefix)
    if url is None:
        raise ConfigError(f"{place.url} is not outside of the devices")
    return S3Records(url, prefix)


def _host_records(store: PoolContext, url: HostUrl, prefix: str) -> SwapStore:
    try:
        from hpstore.agreement.host_records import HostRecords
        from hpstore.devices.opener import host_security
    except ImportError as error:
        raise ConfigError(
            f"registers at {url} need {error.name}: install hpstore[hosts]. Nothing was changed."
        ) from error
    return HostRecords(
        url,
        prefix,
        seconds=store.settings.registers_deadline_seconds,
        secure=host_security(store.settings),
    )


def outside_registers(store: PoolContext, place: RegisterPlace) -> SwapRegisters:
    """The registers of a place. Raises ConfigError; asks nothing of it yet."""
    settings = store.settings
    return SwapRegisters(
        swap_store(store, place),
        store.clock,
        where=place.url,
        deadline_seconds=settings.registers_deadline_seconds,
        hold_seconds=HOLD_SECONDS,
        lock_deadline_seconds=settings.lock_deadline_seconds,
        metrics=store.metrics,
    )
