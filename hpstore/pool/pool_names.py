"""Names of pools in URLs: the table in pools.toml or HPSTORE_POOLS, then what `create` registered.

A URL has no room for a path to a pool.toml, so this is the one place below the command line that
reads the environment (docs/decisions/0010).
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

import tomlkit

from hpstore.config import PoolConfig, home, load_config, registry_path
from hpstore.errors import ConfigError
from hpstore.format.untrusted_bytes import MALFORMED
from hpstore.runtime.text_files import read_text_file, without_link, write_atomically

VARIABLE = "HPSTORE_POOLS"


def table_path() -> Path:
    """The table of names: the file that HPSTORE_POOLS names, else ~/.config/hpstore/pools.toml."""
    chosen = os.environ.get(VARIABLE)
    return Path(chosen) if chosen else home(VARIABLE) / ".config" / "hpstore" / "pools.toml"


def read_table(file: Path) -> dict[str, Path]:
    """`name = "path of its pool.toml"`, relative to the table's own directory.

    A missing default table is empty; one that HPSTORE_POOLS asks for must be there. Raises
    ConfigError.
    """
    try:
        rows = tomllib.loads(read_text_file(file))
    except FileNotFoundError as error:
        if os.environ.get(VARIABLE):
            raise ConfigError(f"{VARIABLE} names {file}, which does not exist") from error
        return {}
    except (OSError, *MALFORMED) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    for name, value in rows.items():
        if not isinstance(value, str):
            raise ConfigError(f"{file}: {name} must be the path of a pool.toml")
    return {name: file.absolute().parent / value for name, value in rows.items()}


def require_free(name: str, file: Path) -> None:
    """Raise ConfigError when a table of names says that `name` is another pool than `file`.

    Such a pool could be made and registered, but the name would lead elsewhere.
    """
    table = table_path()
    known = read_table(table) if table.exists() else {}
    if name in known and known[name].resolve() != file.resolve():
        raise ConfigError(
            f"the name {name!r} belongs to {known[name]} in {table}; nothing was made. Choose "
            "another name, or take that line out"
        )


def add_to_table(name: str, file: Path) -> Path | None:
    """Write `name` into the table that HPSTORE_POOLS asks for, which is made when it is not there;
    its other lines stay. None without HPSTORE_POOLS: the registry is enough.

    Durable on return. Raises ConfigError, OSError.
    """
    if not os.environ.get(VARIABLE):
        return None
    table = without_link(table_path())
    require_free(name, file)
    document = tomlkit.parse(read_text_file(table)) if table.exists() else tomlkit.document()
    document[name] = str(file.absolute())
    table.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(table, tomlkit.dumps(document), as_before=True)
    return table


def pool_names() -> list[str]:
    """All names that a URL may use here, sorted."""
    folder = registry_path("any").parent
    registered = [path.stem for path in folder.glob("*.toml")] if folder.is_dir() else []
    return sorted({*read_table(table_path()), *registered})


def find_named(name: str) -> PoolConfig:
    """The settings of the pool called `name`; the table goes before the registry.

    Raises ConfigError that names both places looked in.
    """
    table, link = table_path(), registry_path(name)
    known = read_table(table)
    if name in known:
        return load_config(known[name])
    if link.exists():
        return load_config(link.resolve())
    raise ConfigError(
        f"no pool is called {name!r}: it is neither in {table} nor at {link}. "
        f"`hpstore create --name {name}` registers one; known here: "
        f"{', '.join(pool_names()) or 'none'}"
    )


def find_pool(where: str) -> PoolConfig:
    """The settings of a pool given by the path of its pool.toml or by its name."""
    return load_config(where) if is_path(where) else find_named(where)


def is_path(where: str) -> bool:
    """Whether text means a file, not a name."""
    return "/" in where or where.endswith(".toml") or Path(where).is_file()
