"""Make a pool; open one. The entry points behind `hpstore.create` and `hpstore.open`."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from hpstore.config import (
    PoolConfig,
    Settings,
    default_name,
    find_config,
    read_stores,
    register,
    require_new,
    save_config,
)
from hpstore.devices.opener import device_opener
from hpstore.errors import ConfigError, without_promise
from hpstore.format.pool_key import new_pool_key
from hpstore.format.records import check_domain
from hpstore.format.scheme import PoolScheme, choose_scheme
from hpstore.membership.device_places import checked_places, require_mounted
from hpstore.membership.members import create_members
from hpstore.membership.survival import domain_warning
from hpstore.pool.pool import Pool
from hpstore.pool.pool_names import add_to_table, require_free
from hpstore.runtime.rights import group_number
from hpstore.runtime.text_files import checked_path
from hpstore.units import MIB

_log = logging.getLogger(__name__)


def create_pool(
    devices: Sequence[str | os.PathLike[str]],
    *,
    data: int | None = None,
    parity: int | None = None,
    scheme: str | None = None,
    config: str | os.PathLike[str] = "pool.toml",
    name: str | None = None,
    domains: Sequence[str] | None = None,
    unit_bytes: int = MIB,
    settings: Settings | None = None,
    allow_root_disk: bool = False,
    stores: str | os.PathLike[str] | Mapping[str, Mapping[str, object]] | None = None,
) -> Pool:
    """Make a pool of k + m stripes over `devices` (paths or URLs) and write its pool.toml.

    pool.toml holds the pool's key, without which no byte can be checked: keep a copy. Nothing is
    claimed unless all can be. Raises ConfigError, DeviceInUse, DeviceError.

    Parameters
    ----------
    devices
        Paths or URLs, at least k + m of them.
    data, parity, scheme
        k and m: units of a stripe, and how many losses every object survives; or "4+2" for both.
    config
        Where the settings file is written.
    name
        `hpstore.open(name)` and URLs find the pool by it later, also through the table that
        HPSTORE_POOLS names. Without one the pool is called after its file: "lab" of lab.toml.
    domains
        What fails together, one label per device; None: the disks of another host together, each
        other device its own.
    unit_bytes
        Stripe unit of objects.
    settings
        None for the defaults.
    allow_root_disk
        Also where a mount seems to be missing and a device would lie on the system's disk.
    stores
        Object stores that URLs name, as s3://NAME@bucket/prefix: tables of `endpoint`, `region`,
        `credentials` by name, or a TOML file with [stores.NAME]; pool.toml gets them.
    """
    chosen = choose_scheme(data, parity, scheme)
    path = Path(checked_path(config, "config")).absolute()
    _require_creatable(path, name, settings)
    urls = checked_places(devices)
    if not allow_root_disk:
        require_mounted(urls)
    made = PoolConfig(
        path=path,
        name=name or default_name(path),
        devices=tuple(urls),
        settings=settings or Settings(),
        key=new_pool_key(),
        stores=read_stores(stores),
    )
    _make_members(made, chosen, domains, unit_bytes)
    _enter_name(made, name)
    return Pool(made)


def _enter_name(made: PoolConfig, name: str | None) -> None:
    """Let hpstore.open(name) and URLs find the pool. Raises ConfigError, which says that it is made
    all the same."""
    if name is None:
        return
    try:
        register(made)
        add_to_table(name, made.path)
    except (ConfigError, OSError) as error:
        raise ConfigError(
            f"the pool is made, and {made.path} opens it; that it is called {name!r} could not be "
            f"noted: {without_promise(error)}"
        ) from error


def _make_members(
    made: PoolConfig, scheme: PoolScheme, domains: Sequence[str] | None, unit_bytes: int
) -> None:
    """Claim the devices, once pool.toml is written."""
    if domains is not None and len(domains) != len(made.devices):
        raise ConfigError(f"{len(domains)} domains for {len(made.devices)} devices")
    with ExitStack() as undo:
        record = create_members(
            list(made.devices),
            None if domains is None else list(map(check_domain, domains)),
            device_opener(made.settings, stores=lambda: made.stores),
            made,
            data=scheme.data,
            parity=scheme.parity,
            unit_bytes=unit_bytes,
            keep=partial(_keep, made, undo),
        )
        undo.pop_all()
    if warning := domain_warning(record):
        _log.warning("%s", warning)


def _require_creatable(path: Path, name: str | None, settings: Settings | None) -> None:
    """Before anything is made: raise ConfigError for a name or a group that cannot be had."""
    require_new(path, name)
    if name is not None:
        require_free(name, path)
    if settings is not None and settings.group:
        group_number(settings.group)


def _keep(made: PoolConfig, undo: ExitStack) -> None:
    """Write pool.toml, which alone has the key, before there is a pool that needs it."""
    require_new(made.path, None)  # another one may have been made since the first look
    save_config(made)
    undo.callback(made.path.unlink, missing_ok=True)


def open_pool(where: str | os.PathLike[str], *, read_only: bool = False) -> Pool:
    """Open a pool; with up to m devices missing.

    Parameters
    ----------
    where
        Its pool.toml, or its registered name.
    read_only
        Refuse puts and all other changes.

    Raises
    ------
    ConfigError
        There is no such pool, or its settings are wrong.
    TooFewDevices
        More than m are missing.
    """
    return Pool(find_config(where), read_only=read_only)
