"""Which peers are asked for, and whether their packages are installed."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Collection

from hpstore.errors import ConfigError


def asked_for(names: str, known: Collection[str]) -> list[str]:
    """The names in a comma-separated list, each once. Raises ConfigError for an unknown one."""
    found = [name.strip() for name in names.split(",") if name.strip()]
    for name in found:
        if name not in known:
            raise ConfigError(f"no peer is called {name!r}; there are {', '.join(known)}")
    return list(dict.fromkeys(found))


def installed(package: str) -> str:
    """Its version, or "" when it is not there."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def why_missing(package: str) -> str:
    """Why what needs a package cannot be measured here; "" when it is there."""
    return "" if installed(package) else f"{package} is not installed here: pip install {package}"
