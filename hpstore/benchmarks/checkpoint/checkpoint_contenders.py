"""Who can be measured, by name."""

from __future__ import annotations

import importlib.metadata

from hpstore.benchmarks.checkpoint.checkpoint_library_peers import LIBRARY_PEERS
from hpstore.benchmarks.checkpoint.checkpoint_ours import HpstoreSaver
from hpstore.benchmarks.checkpoint.checkpoint_peers import (
    DcpAsync,
    DcpOneThread,
    DcpSave,
    Safetensors,
    SaverPeer,
    TorchSave,
)
from hpstore.errors import ConfigError

_KINDS: tuple[type[SaverPeer], ...] = (
    TorchSave,
    DcpSave,
    DcpOneThread,
    DcpAsync,
    Safetensors,
    *LIBRARY_PEERS,
)
PEERS: dict[str, type[SaverPeer]] = {peer.name: peer for peer in _KINDS}


def kind_of(name: str) -> type[SaverPeer]:
    """A contender, hpstore among them."""
    return HpstoreSaver if name == HpstoreSaver.name else PEERS[name]


def peers_named(names: str) -> list[str]:
    """The peers of a comma-separated list. Raises ConfigError for one that is not there."""
    found = [name.strip() for name in names.split(",") if name.strip()]
    for name in found:
        if name not in PEERS:
            raise ConfigError(f"no peer is called {name!r}; there are {', '.join(PEERS)}")
    return list(dict.fromkeys(found))


def not_installed(name: str) -> str:
    """Why a peer cannot be measured here; "" when its package is there."""
    package = PEERS[name].package
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return f"{package} is not installed here: pip install {package}"
    return ""
