"""Settings of a pool on this machine (pool.toml): where to look, and local limits.

What the pool *is* (members, geometry) stands in pool.json on its devices; this file only says where
to look and how much memory and time to spend.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import stat
import tempfile
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import tomlkit

from hpstore.errors import ConfigError
from hpstore.format.device_urls import has_secrets
from hpstore.format.pool_key import PoolKey, parse_pool_key
from hpstore.format.store_settings import StoreSettings, as_tables, parse_stores
from hpstore.format.untrusted_bytes import MALFORMED
from hpstore.runtime.rights import denied_path, group_number, rights_hint
from hpstore.runtime.text_files import checked_path, read_text_file, without_link, write_atomically
from hpstore.units import GIB, MIB, parse_bytes

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")
V = TypeVar("V")
_LEAST = {
    "memory_bytes": 1,
    "workers_per_device": 1,
    "queue_depth": 1,
    "compute_threads": 1,
    "recycle_bytes": 0,
    "min_losses_tolerated": 0,
}


def setting(default: V, text: str, *, advanced: bool = False) -> V:
    """A field of a dataclass of settings. `text` describes it in docs/pool-toml.md; an `advanced`
    one stands there among those that few need, and in pool.toml in a table of these."""
    made: V = field(default=default, metadata={"text": text, "advanced": advanced})
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Local limits: in pool.toml under [settings] or [advanced] (docs/pool-toml.md)."""

    memory_bytes: int = setting(
        256 * MIB, "memory beyond the caller's buffers; holds 16 batches of 4+2 at 1 MiB units"
    )
    recycle_bytes: int = setting(2 * GIB, "files kept for overwriting, on each device")
    device_deadline_seconds: float = setting(
        30.0, "for one call; from then on a hang counts as a loss"
    )
    min_losses_tolerated: int = setting(
        0, "further losses that a write must survive, or it is refused"
    )
    direct: bool = setting(True, "O_DIRECT on local devices")
    tls: str = setting(
        "mutual",
        'how disks of other hosts are reached: "mutual" TLS; on a network that only these hosts '
        'can reach "control", TLS without bodies, or "plain"',
        advanced=True,
    )
    certificates: str = setting(
        "",
        "directory of ca.pem, certificate.pem and key.pem for other hosts; by default "
        "~/.config/hpstore/tls",
        advanced=True,
    )
    health: bool = setting(True, "slow devices are detected, and reads avoid them")
    group: str = setting("", "name or number of the group that new devices are given to")
    file_mode: int = setting(0o600, "of files made on devices, whatever the umask is")
    directory_mode: int = setting(0o700, "of directories made on devices")
    run_directory: str = setting(
        "", "locks; by default hpstore-<uid> in the machine's temporary directory"
    )
    state_directory: str = setting(
        "",
        "what the agent remembers, which must outlive a restart of the machine; by default the "
        "run directory where that is set, else ~/.local/state/hpstore",
    )
    open_deadline_seconds: float = setting(
        10.0, "a device that does not answer by then is missing", advanced=True
    )
    put_deadline_seconds: float = setting(
        600.0, "younger files may belong to a put in progress", advanced=True
    )
    straggler_seconds: float = setting(
        5.0, "grace for the slowest device of a put; or 8 times its peers' time", advanced=True
    )
    lock_deadline_seconds: float = setting(
        30.0, "for membership changes and conditional puts", advanced=True
    )
    claim_seconds: float = setting(
        3.0, "after so long a silence a conditional put gives way to others", advanced=True
    )
    registers_deadline_seconds: float = setting(
        5.0, "for one change of a register in etcd or an object store", advanced=True
    )
    registers_ca_file: str = setting(
        "", "etcds://: certificates of who signs etcd's; the system's by default", advanced=True
    )
    registers_certificate_file: str = setting(
        "", "etcds://: this machine's certificate, where etcd wants one", advanced=True
    )
    registers_key_file: str = setting("", "etcds://: the key of that certificate", advanced=True)
    tombstone_seconds: float = setting(
        3600.0, "until tombstones are swept; a put that takes longer starts again", advanced=True
    )
    workers_per_device: int = setting(2, "threads; 4 to 12 writers in all suffice", advanced=True)
    queue_depth: int = setting(256, "calls that may wait for one device", advanced=True)
    compute_threads: int = setting(
        2, "threads that encode and checksum: 14 GB/s on one, 20 on two", advanced=True
    )
    hedge_percent: float = setting(
        5.0, "of the bytes read, for spares of late reads; 0: none", advanced=True
    )

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise ConfigError(
                    f"setting {name} must {'be at least 1' if least else 'not be negative'}"
                )
        for setting in fields(self):
            value = getattr(self, setting.name)
            if setting.name.endswith("_seconds") and not 0 < value < 1e9:
                raise ConfigError(f"setting {setting.name} must be above 0 and finite")
        for name in ("file_mode", "directory_mode"):
            if not 0o400 <= getattr(self, name) <= 0o777:
                raise ConfigError(f"setting {name} must be from 0o400 to 0o777")
        if not 0 <= self.hedge_percent <= 100:
            raise ConfigError("setting hedge_percent must be from 0 to 100")
        if self.workers_per_device > 64 or self.compute_threads > 256:
            raise ConfigError("at most 64 workers_per_device and 256 compute_threads")
        if self.tls not in ("mutual", "control", "plain"):
            raise ConfigError(
                f'setting tls must be "mutual", "control" or "plain", not {self.tls!r}'
            )
        files = ("registers_ca_file", "registers_certificate_file", "registers_key_file")
        for name in ("run_directory", "state_directory", "certificates", *files):
            where = getattr(self, name)
            if where and not os.path.isabs(checked_path(where, f"setting {name}", recorded=True)):
                raise ConfigError(f"setting {name} must be absolute: processes share it")
        if self.memory_bytes < 16 * MIB:
            raise ConfigError("setting memory_bytes must be at least 16 MiB")
        if self.tombstone_seconds <= self.put_deadline_seconds:
            raise ConfigError("setting tombstone_seconds must be above put_deadline_seconds")

    def run_path(self, pool_id: str) -> Path:
        """Directory of this pool's lock files on this host (never on a pool device)."""
        base = self.run_directory or f"{tempfile.gettempdir()}/hpstore-{os.getuid()}"
        return Path(base) / pool_id

    def certificates_path(self) -> Path:
        """Directory of this user's certificate for other hosts."""
        where = self.certificates
        return Path(where) if where else home("certificates") / ".config/hpstore/tls"

    def state_path(self, pool_id: str) -> Path:
        """Directory of what the agent of this host keeps about this pool."""
        base = self.state_directory or self.run_directory
        return (Path(base) if base else home("state_directory") / ".local/state/hpstore") / pool_id


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """A pool.toml."""

    path: Path
    name: str
    devices: tuple[str, ...] = field(repr=False)  # URLs with what opens them
    settings: Settings = field(default_factory=Settings)
    agent: Mapping[str, object] = field(default_factory=dict)  # as written; hpstore.agent reads it
    key: PoolKey | None = field(default=None, repr=False)  # None: a pool that has none
    stores: Mapping[str, StoreSettings] = field(default_factory=dict)  # by name; no secrets


def home(instead: str) -> Path:
    """This user's home directory. `instead`: what can be set where there is none, as in a container
    that runs as a number. Raises ConfigError."""
    try:
        return Path.home()
    except RuntimeError as error:
        raise ConfigError(
            f"user {os.getuid()} has no home directory: set HOME, or {instead}"
        ) from error


def private_directory(path: Path) -> Path:
    """Make a directory of a pool's own in a place that others may write to, or check the one there.

    Raises ConfigError unless it belongs to this user alone, and the one above to this user or root,
    with the sticky bit where everyone may write: names in a temporary directory are known, and who
    makes one first could have this process write where they like.
    """
    base = path.parent
    try:
        base.mkdir(parents=True, exist_ok=True, mode=0o700)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        above, own = os.lstat(base), os.lstat(path)
    except OSError as error:
        raise ConfigError(f"run directory {path} is not usable: {error.strerror}") from error
    for place, found, fine in ((path, own, _is_own(own)), (base, above, _is_safe_above(above))):
        if not fine:
            raise ConfigError(
                f"run directory {place} belongs to user {found.st_uid}, mode "
                f"{stat.S_IMODE(found.st_mode):o}: "
                "another user could write there, so nothing is written or believed there. "
                "Remove it, or set run_directory in pool.toml to a directory of this user alone."
            )
    return path


def _is_own(found: os.stat_result) -> bool:
    return (
        stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022
    )


def _is_safe_above(found: os.stat_result) -> bool:
    """One's own or root's, and what is in it is safe from others."""
    closed = not found.st_mode & 0o002 or bool(found.st_mode & stat.S_ISVTX)
    return stat.S_ISDIR(found.st_mode) and found.st_uid in (os.geteuid(), 0) and closed


def is_believable(path: Path) -> bool:
    """Whether what lies in a run directory was put there by its user. Another user's may be read
    where the settings name it, not under the name that this user's own would have."""
    try:
        own, above = os.lstat(path), os.lstat(path.parent)
    except OSError:
        return False
    if path.parent.name == f"hpstore-{os.getuid()}":
        return _is_own(own) and _is_safe_above(above)
    return stat.S_ISDIR(own.st_mode) and not own.st_mode & 0o022


def load_config(path: str | os.PathLike[str]) -> PoolConfig:
    """Read a pool.toml. Raises ConfigError that names the place and the nearest valid key."""
    file = without_link(Path(checked_path(path, "a pool.toml")))
    try:
        document = tomllib.loads(read_text_file(file))
    except FileNotFoundError as error:
        raise ConfigError(f"{file} does not exist; `hpstore create` makes one") from error
    except PermissionError as error:
        place = denied_path(str(file.absolute()))
        raise ConfigError(f"{file} cannot be read: {rights_hint(place)}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    except MALFORMED as error:  # nested too deep, a number too long
        raise ConfigError(f"{file} is not TOML: {error}") from error
    tables = ("settings", "advanced", "agent", "stores")
    _check_names(document, ("name", "devices", "key", *tables), file)
    devices, raw = document.get("devices"), document.get("settings", {})
    if not isinstance(devices, list) or not all(isinstance(d, str) for d in devices) or not devices:
        raise ConfigError(f"{file}: devices must be a list of paths or URLs")
    if any("\0" in device for device in devices):
        raise ConfigError(f"{file}: a device's path holds a NUL")
    if not isinstance(document.get("name", ""), str):
        raise ConfigError(f"{file}: name must be text")
    agent = document.get("agent", {})
    if not isinstance(raw, dict) or not isinstance(agent, dict):
        raise ConfigError(f"{file}: [settings] and [agent] must be tables")
    raw = with_advanced(raw, document.get("advanced", {}), where=f"{file}: [advanced]")
    return PoolConfig(
        path=file,
        name=str(document.get("name", default_name(file))),
        devices=tuple(_absolute(device, file) for device in devices),
        settings=parse_settings(raw, where=str(file)),
        agent=agent,
        key=parse_pool_key(document["key"], where=str(file)) if "key" in document else None,
        stores=parse_stores(document.get("stores", {}), where=str(file)),
    )


def read_stores(
    stores: str | os.PathLike[str] | Mapping[str, object] | None,
) -> dict[str, StoreSettings]:
    """[stores.NAME] of a TOML file, or as tables. Raises ConfigError."""
    if stores is None or isinstance(stores, Mapping):
        return parse_stores(stores or {}, where="stores")
    file = checked_path(stores, "stores")
    try:
        document = tomllib.loads(read_text_file(file))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    except MALFORMED:  # its text would repeat what may be a secret
        raise ConfigError(f"{file} is not TOML") from None
    return parse_stores(document.get("stores", {}), where=file)


def default_name(path: Path) -> str:
    """The name of a pool that was given none: that of its settings file, without the suffix.

    A file may have a name that no pool can: what `registry_path` refuses is taken off its ends, and
    what no screen can show becomes `_`.
    """
    name = path.stem
    while name.startswith(".") or name.endswith(".toml"):
        name = name.removeprefix(".").removesuffix(".toml")
    return "".join(one if one.isprintable() else "_" for one in name) or "pool"


def parse_settings(raw: dict[str, object], *, where: str) -> Settings:
    """Settings from a decoded table; sizes may be written as "64MiB"."""
    return parse_table(raw, Settings(), where=where)


def parse_table(
    raw: Mapping[str, object], defaults: T, *, where: str, without: Collection[str] = ()
) -> T:
    """`defaults`, a dataclass of plain values, with what a decoded table says.

    Raises ConfigError for names that are no fields or among `without`, and for values of another
    type. A field that ends in `_bytes` or `_bytes_per_second` may be written as "64MiB".
    """
    _check_names(raw, tuple(f.name for f in fields(defaults) if f.name not in without), where)
    values: dict[str, object] = {}
    for name, value in raw.items():
        wanted = type(getattr(defaults, name))
        if name.endswith(("_bytes", "_bytes_per_second")) and isinstance(value, str):
            try:
                value = parse_bytes(value)
            except ConfigError as error:
                raise ConfigError(f"{where}: {name}: {error}") from error
        if wanted is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if type(value) is not wanted:
            raise ConfigError(f"{where}: {name} must be {wanted.__name__}, not {value!r}")
        values[name] = value
    try:
        return replace(defaults, **values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def with_advanced(
    table: Mapping[str, object], advanced: object, *, where: str
) -> dict[str, object]:
    """Settings and advanced ones as one table: a name may stand in either. Raises ConfigError for
    one that stands in both."""
    if not isinstance(advanced, dict):
        raise ConfigError(f"{where} must be a table")
    both = sorted(table.keys() & advanced.keys())
    if both:
        raise ConfigError(f"{where}: {both[0]!r} is set twice; remove one of the two")
    return {**table, **advanced}


def _check_names(table: Mapping[str, object], valid: tuple[str, ...], where: object) -> None:
    for name in table:
        if name not in valid:
            near = difflib.get_close_matches(name, valid, 1, 0.0)[0]
            raise ConfigError(f"{where}: unknown setting {name!r}; did you mean {near!r}?")


def _absolute(device: str, file: Path) -> str:
    """Relative device paths are relative to the pool.toml."""
    if "://" in device:
        return device
    return os.path.normpath(file.absolute().parent / device)


def save_config(config: PoolConfig) -> None:
    """Write a pool.toml atomically; comments and settings of an existing one are kept."""
    array = tomlkit.array()
    array.extend(config.devices)
    array.multiline(True)
    if config.path.exists():
        document = tomlkit.parse(read_text_file(config.path))
        if "devices" not in document:  # behind a table it would become part of that
            document = tomlkit.parse("devices = []\n" + tomlkit.dumps(document))
        document["devices"] = array
    else:
        document = tomlkit.document()
        document.add(tomlkit.comment("hpstore: where this pool's devices are on this machine"))
        document.add("name", tomlkit.item(config.name))
        if config.key is not None:
            document.add(tomlkit.comment("without this key nothing can be checked: keep a copy"))
            document.add("key", tomlkit.item(config.key.text))
        document.add("devices", array)
        for table, changed in _changed(config.settings).items():
            document.add(table, tomlkit.item(changed))
        if config.stores:
            document.add("stores", tomlkit.item(as_tables(config.stores)))
    try:
        write_atomically(
            config.path,
            tomlkit.dumps(document),
            mode=_mode(config),
            group=_group(config),
            as_before=True,
        )
    except PermissionError as error:
        hint = rights_hint(denied_path(str(config.path.absolute())))
        raise ConfigError(f"{config.path} cannot be written: {hint}") from error
    except OSError as error:
        raise ConfigError(f"{config.path} cannot be written: {error}") from error


def _changed(settings: Settings) -> dict[str, dict[str, object]]:
    """What is not by default, by the tables that it stands in."""
    found: dict[str, dict[str, object]] = {}
    for known in fields(Settings):
        value = getattr(settings, known.name)
        if value != known.default:
            table = "advanced" if known.metadata["advanced"] else "settings"
            found.setdefault(table, {})[known.name] = _as_written(known.name, value)
    return found


def _group(config: PoolConfig) -> int:
    """Of a pool.toml: as it is, or the pool's; -1 for the user's own."""
    if not config.settings.group:
        return -1
    path = config.path
    return path.stat().st_gid if path.exists() else group_number(config.settings.group)


def _as_written(name: str, value: object) -> object:
    """Modes in octal, as everyone reads them."""
    return tomlkit.value(f"0o{value:o}") if name.endswith("_mode") else value


def _mode(config: PoolConfig) -> int | None:
    """Of a pool.toml: for its owner, and the pool's group, alone where it holds passwords or a new
    key; else as it is, or the pool's mode, or the umask."""
    shared = config.settings.file_mode & 0o060 if config.settings.group else 0
    exists = config.path.exists()
    if any(map(has_secrets, config.devices)) or (config.key is not None and not exists):
        return 0o600 | shared
    if exists:
        return stat.S_IMODE(config.path.stat().st_mode)
    return config.settings.file_mode if shared else None


def registry_path(name: str) -> Path:
    """Where the name of a pool is kept for `hpstore.open(name)`."""
    if not isinstance(name, str) or not name or "/" in name or name.startswith("."):
        raise ConfigError(f"{name!r} is not a name for a pool")
    file = checked_path(f"{name}.toml", "the file of a pool's name", recorded=True)
    return home("HPSTORE_POOLS") / ".config" / "hpstore" / "pools" / file


def require_new(path: Path, name: str | None) -> None:
    """Raise ConfigError unless a pool can have its settings there, and this name."""
    if os.path.exists(path):
        raise ConfigError(f"{path} exists; a pool is not made over another one's settings")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"{path} cannot be written: {path.parent} is not a writable directory")
    if name is not None:
        _free_place(name, path)


def _free_place(name: str, path: Path) -> Path:
    """Where the name of a pool with these settings is kept. Raises ConfigError when it is taken, or
    no such place can be had."""
    link = registry_path(name)
    if name.endswith(".toml"):
        raise ConfigError(f"the name {name!r} would be taken for a file: choose one without .toml")
    try:
        link.parent.mkdir(parents=True, exist_ok=True)
        taken = link.exists() and link.resolve() != path.resolve()
    except OSError as error:
        raise ConfigError(f"the name {name!r} cannot be kept in {link.parent}: {error}") from error
    if taken:
        raise ConfigError(
            f"the name {name!r} belongs to {link.resolve()}; choose another name, or remove {link}"
        )
    return link


def register(config: PoolConfig) -> None:
    """Let `hpstore.open(config.name)` find this pool. Raises ConfigError when it is taken."""
    link = _free_place(config.name, config.path)
    link.unlink(missing_ok=True)
    link.symlink_to(config.path)


def find_config(where: str | os.PathLike[str]) -> PoolConfig:
    """Load by path or by registered name."""
    text = checked_path(where, "a pool")
    if not os.path.isfile(text) and "/" not in text and not text.endswith(".toml"):
        link = registry_path(text)
        if not link.exists():
            raise ConfigError(f"no pool is called {text!r} here; give the path of its pool.toml")
        return load_config(link.resolve())
    return load_config(text)
