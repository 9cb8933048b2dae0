"""How the writer processes of several ranks find each other: a store in that of rank 0.

They vote among themselves as trainers do, so that a save of which all of them have everything is
committed, or not, whatever becomes of the trainers (docs/decisions/0123).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from hpstore.checkpoint.catalog.writer_fence import here
from hpstore.checkpoint.ranks.collectives import Ranks
from hpstore.errors import CheckpointError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

JOIN_SECONDS = 120.0  # a process that imports torch on a busy machine takes some of them
_CONNECT_SECONDS = 5.0  # to one of several addresses


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAddress:
    """Where the store of rank 0's writer is: names of its host, which boots as `boot`."""

    hosts: Sequence[str]
    port: int
    boot: str

    @classmethod
    def of_this_host(cls, port: int) -> StoreAddress:
        """For other ranks: the name that they were given for rank 0, where there is one, too."""
        hosts = [socket.gethostname()]
        given = os.environ.get("MASTER_ADDR", "")
        if given and os.environ.get("RANK") == "0":
            hosts.insert(0, given)
        return cls(hosts=hosts, port=port, boot=here()[1])

    def to_try(self) -> list[str]:
        """Addresses for this process, the likeliest first."""
        near = ["127.0.0.1"] if self.boot and self.boot == here()[1] else []
        return list(dict.fromkeys([*near, *self.hosts]))


def _store_class() -> type[TCPStore]:
    return dist.TCPStore  # type: ignore[attr-defined]  # torch exports it unmarked


def open_store(timeout_seconds: float) -> TCPStore:
    """The store through which writers find each other; this process serves it as long as it runs.
    Raises CheckpointError."""
    try:
        return _store_class()(
            "127.0.0.1",
            0,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_seconds),
        )
    except (RuntimeError, OSError) as error:
        raise CheckpointError(f"no port can be opened for the other writers: {error}") from error


def join_writers(
    store: TCPStore | None,
    address: StoreAddress,
    rank: int,
    world: int,
    commit_seconds: float,
) -> Ranks:
    """The writers of a job, once all have come. `store`: of rank 0, which has opened it.

    Called once in the life of a process. Raises CheckpointError.
    """
    seconds = timedelta(seconds=min(JOIN_SECONDS, commit_seconds))
    try:
        found = store or _connected(address, seconds)
        dist.init_process_group("gloo", store=found, rank=rank, world_size=world, timeout=seconds)
        return Ranks(commit_seconds, advice="The next save starts new writers.")
    except (RuntimeError, OSError, ValueError, CheckpointError) as error:
        raise CheckpointError(
            f"the writer of rank {rank} of {world} has not found all others within "
            f"{seconds.total_seconds():.0f} s: {str(error).splitlines()[0]}. Writers find each "
            'other as the ranks do (GLOO_SOCKET_IFNAME); or use background="thread"'
        ) from error


def _connected(address: StoreAddress, seconds: timedelta) -> TCPStore:
    problem: Exception = CheckpointError("rank 0 has no address")
    for host in address.to_try():
        try:
            socket.create_connection((host, address.port), _CONNECT_SECONDS).close()
            return _store_class()(host, address.port, is_master=False, timeout=seconds)
        except (RuntimeError, OSError) as error:
            problem = error
    raise CheckpointError(f"{address.to_try()} port {address.port}: {problem}") from problem
