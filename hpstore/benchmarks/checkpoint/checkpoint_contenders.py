"""Who can be measured, by name."""

from __future__ import annotations

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
from hpstore.benchmarks.harness.peer_packages import asked_for, why_missing

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
    return asked_for(names, PEERS)


def not_installed(name: str) -> str:
    """Why a peer cannot be measured here; "" when its package is there."""
    return why_missing(PEERS[name].package)
