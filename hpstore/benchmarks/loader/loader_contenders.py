"""Who can be measured, by name and by group."""

from __future__ import annotations

from hpstore.benchmarks.harness.peer_packages import asked_for, why_missing
from hpstore.benchmarks.loader.loader_library_peers import LIBRARY_PEERS
from hpstore.benchmarks.loader.loader_ours import OURS, RESTART
from hpstore.benchmarks.loader.loader_peers import TORCH_PEERS, LoaderPeer

PEERS: dict[str, type[LoaderPeer]] = {peer.name: peer for peer in (*TORCH_PEERS, *LIBRARY_PEERS)}
GROUPS = tuple(dict.fromkeys(peer.group for peer in PEERS.values()))
_KINDS: dict[str, type[LoaderPeer]] = {**PEERS, **{peer.name: peer for peer in (*OURS, *RESTART)}}


def kind_of(name: str) -> type[LoaderPeer]:
    """A contender, hpstore among them."""
    return _KINDS[name]


def peers_named(names: str) -> list[str]:
    """The peers of a comma-separated list of groups. Raises ConfigError for an unknown one."""
    wanted = asked_for(names, GROUPS)
    return [name for name, peer in PEERS.items() if peer.group in wanted]


def not_installed(name: str) -> str:
    """Why a peer cannot be measured here; "" when its package is there."""
    return why_missing(PEERS[name].package)
