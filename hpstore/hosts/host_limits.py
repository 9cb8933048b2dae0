"""Limits of a host's service: whatever is sent to it, it takes no more than this."""

from __future__ import annotations

from dataclasses import dataclass

from hpstore.errors import ConfigError
from hpstore.units import MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLimits:
    """Each field has its reason; heads and bodies have limits of the protocol's own
    (http_heads.py, host_calls.py)."""

    connections: int = 1024  # a thread each; a process of a pool has some four for each disk
    connections_of_peer: int = 512  # of one address: no other host is shut out by one
    calls_of_disk: int = 64  # at once: those of a disk that hangs keep no more threads
    handles: int = 16384  # open files, of all sessions together
    arena_bytes: int = 256 * MIB  # memory for bodies under way
    piece_bytes: int = (
        2 * MIB
    )  # of a body between socket and disk: one is received as one is written
    idle_seconds: float = 600.0  # between two requests of a connection that holds nothing
    head_seconds: float = 10.0  # from the first byte of a head, or of a TLS handshake, to its end
    body_seconds: float = 30.0  # for each piece to go through
    deadline_seconds: float = 120.0  # the most that a caller may ask for


def make_limits(*, connections: int, handles: int, memory_bytes: int) -> HostLimits:
    """Those that an operator has chosen, and the rest. Raises ConfigError."""
    if connections < 1 or handles < 1:
        raise ConfigError("--connections and --handles are at least 1")
    return HostLimits(
        connections=connections,
        connections_of_peer=max(1, connections // 2),
        handles=handles,
        arena_bytes=memory_bytes,
    )
