"""What the ranks of one job tell each other about a save: small messages over gloo groups.

The groups are made in the constructor, a collective call (PROTOCOL 20), so that a job whose own
backend is NCCL works. Messages are bytes (JSON of ours), never pickle. One group serves the calls
of the training thread, the other the background save: neither waits for the other.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from enum import Enum
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from hpstore.errors import CheckpointError
from hpstore.runtime.closing import Closing

_log = logging.getLogger(__name__)
_BY_NUMBER = re.compile("[0-9a-f]{40}")  # a name that torch makes of ranks and a number of groups
GRACE_SECONDS = 2.0  # for ranks that are a little behind when another one's end is noticed


class RankChannel(Enum):
    """Who is talking."""

    TRAINER = 0
    SAVER = 1


class Ranks(Closing):
    """The ranks that save together; one alone when torch.distributed is not in use.

    Its groups end when it is closed, or with the process.

    `group`: a process group of those taking part, by default all ranks; with `alone` this process
    saves for itself, whatever job it is in. A message that a rank does
    not answer within `timeout_seconds` raises CheckpointError on those who wait, whose last
    sentence is `advice`.
    """

    # Any below: torch's process groups have no public type
    def __init__(
        self,
        timeout_seconds: float,
        group: Any = None,
        *,
        alone: bool = False,
        advice: str = "End this job; the next one finds the newest whole step.",
    ) -> None:
        self._advice = advice
        self.rank, self.world = 0, 1
        self.lost = False  # a message of a rank did not come: what they do next may differ
        self._groups: dict[RankChannel, Any] = {}
        self.timeout_seconds = timeout_seconds
        if not alone and dist.is_available() and dist.is_initialized():
            self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
            if self.rank < 0:
                raise CheckpointError("this rank is not in the process group of the checkpointer")
        if self.world > 1:
            members = dist.get_process_group_ranks(group or dist.group.WORLD)
            for channel in RankChannel:
                self._groups[channel] = dist.new_group(
                    ranks=members,
                    backend="gloo",
                    timeout=timedelta(seconds=timeout_seconds),
                    use_local_synchronization=group is not None,
                )
            self._members: Sequence[int] = members
            self._roll = Roll(self.rank, self.world)
        self._end = partial(_destroy, self._groups, os.getpid())
        if self.world > 1:
            atexit.register(self._end)

    def close(self) -> None:
        """End the groups, their threads and connections: no message is possible after it. Of all
        ranks. Idempotent.

        In two cases the groups stay until the process ends. Where a message was lost, torch would
        wait for it in here, as long as the timeout of the group. And where some ranks alone have
        made a group, torch has its name from the number of groups that there are: with fewer of
        them, the next such group would get a name that was used. Those of a Checkpointer with
        `group=` are such groups.
        """
        names = dist.distributed_c10d._world.pg_names.values() if self.world > 1 else ()
        if not self.lost and not any(map(_BY_NUMBER.fullmatch, names)):
            self._end()
            atexit.unregister(self._end)

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which plans and commits."""
        return self.rank == 0

    def all_gather(self, mine: bytes, channel: RankChannel) -> list[bytes]:
        """Everybody's message, by rank; they may differ in length."""
        if self.world == 1:
            return [mine]
        sizes = self._all_gather(
            torch.tensor([len(mine)], dtype=torch.int64, device="cpu"), channel
        )
        longest = max(1, *(int(size) for size in sizes))
        padded = torch.zeros(longest, dtype=torch.uint8, device="cpu")
        padded[: len(mine)] = _tensor(mine)
        found = self._all_gather(padded, channel)
        return [row[: int(size)].numpy().tobytes() for row, size in zip(found, sizes, strict=True)]

    def numbers(
        self, mine: tuple[int, ...], channel: RankChannel, *, within_seconds: float | None = None
    ) -> list[tuple[int, ...]]:
        """Everybody's numbers, as many from each, by rank: one message, cheap enough for each step
        of a trainer. Who has died is not named. `within_seconds`: instead of the usual timeout;
        after it no further message is possible."""
        if self.world == 1:
            return [mine]
        found = [torch.empty(len(mine), dtype=torch.int64, device="cpu") for _ in range(self.world)]
        group = self._group(channel)
        message = torch.tensor(mine, dtype=torch.int64, device="cpu")
        try:
            if within_seconds is None:
                dist.all_gather(found, message, group=group)
            else:
                work = dist.all_gather(found, message, group=group, async_op=True)
                work.wait(timedelta(seconds=within_seconds))
        except RuntimeError as error:
            raise self._lost(error, "") from error
        return [tuple(int(number) for number in row) for row in found]

    def announced(self, mine: tuple[int, ...], channel: RankChannel) -> tuple[int, ...]:
        """Rank 0's numbers, on all ranks, as many as each gives: one message, cheap enough for each
        step of a trainer. Who has died is not named."""
        if self.world == 1:
            return mine
        message = torch.tensor(mine, dtype=torch.int64, device="cpu")
        try:
            dist.broadcast(message, src=self._members[0], group=self._group(channel))
        except RuntimeError as error:
            raise self._lost(error, "") from error
        return tuple(int(number) for number in message)

    def broadcast(self, message: bytes, channel: RankChannel) -> bytes:
        """Rank 0's message, to all. Others' own is ignored."""
        if self.world == 1:
            return message
        size = torch.tensor([len(message)], dtype=torch.int64, device="cpu")
        self._broadcast(size, channel)
        body = (
            _tensor(message)
            if self.leads
            else torch.empty(int(size), dtype=torch.uint8, device="cpu")
        )
        if int(size):
            self._broadcast(body, channel)
        return body.numpy().tobytes()

    def _all_gather(self, mine: torch.Tensor, channel: RankChannel) -> list[torch.Tensor]:
        found = [torch.empty_like(mine) for _ in range(self.world)]
        group = self._group(channel)
        self._roll.come(group.group_name)
        try:
            dist.all_gather(found, mine, group=group)
        except RuntimeError as error:
            raise self._lost(error, group.group_name) from error
        return found

    def _broadcast(self, tensor: torch.Tensor, channel: RankChannel) -> None:
        group = self._group(channel)
        self._roll.come(group.group_name)
        try:
            dist.broadcast(tensor, src=self._members[0], group=group)
        except RuntimeError as error:
            raise self._lost(error, group.group_name) from error

    # Any: torch's process groups have no public type
    def _group(self, channel: RankChannel) -> Any:
        if channel not in self._groups:
            raise CheckpointError(
                "the ranks cannot exchange messages: the object that used them is closed. "
                "Committed steps are untouched. Make a new one on all ranks"
            )
        return self._groups[channel]

    def _lost(self, error: RuntimeError, name: str) -> CheckpointError:
        self.lost = True
        atexit.unregister(self._end)
        absent = self._roll.absent(name) if name else []
        who = f"rank {', '.join(map(str, absent))}" if absent else "another rank"
        return CheckpointError(
            f"rank {self.rank} of {self.world}: {who} died or did not answer within "
            f"{self.timeout_seconds:.0f} s ({str(error).splitlines()[0]}). save(), restore() and "
            "close() are calls of all ranks: one that leaves its loop, for an error that it alone "
            "catches, keeps the others waiting. What was committed is untouched. " + self._advice
        )


def _destroy(groups: dict[RankChannel, Any], pid: int) -> None:
    """The threads of a group are joined: they let the tensors of a message go after it has arrived,
    and one that does so while the interpreter ends takes the whole process down with it (SIGABRT;
    pytorch#190489).
    """
    if pid != os.getpid():
        return  # the threads are the parent's
    while groups:
        _, group = groups.popitem()
        with suppress(ValueError):  # the job has destroyed all groups before
            dist.destroy_process_group(group)


def require_alike(ranks: Ranks, name: str, mine: str, otherwise: str) -> None:
    """Raise CheckpointError, on all ranks, where they differ in an argument; `otherwise`: what
    would happen."""
    heard = ranks.all_gather(mine.encode(), RankChannel.TRAINER)
    if len(set(heard)) > 1:
        raise CheckpointError(
            f"the ranks have different {name} ({[said.decode() for said in heard]}, by rank): "
            f"{otherwise}. Nothing was changed; give all ranks the same"
        )


class Roll:
    """Counts in the job's own store how many messages each rank has come to, so that those who are
    waited for in vain can be named. Where there is no such store, nobody is."""

    def __init__(self, rank: int, world: int) -> None:
        self._rank, self._world = rank, world
        self._come: Counter[str] = Counter()  # by group; its two channels have a thread each

    def come(self, group: str) -> None:
        """This rank is at the next message of a group. Never raises: a job whose store is gone is
        ending, and its messages say so."""
        self._come[group] += 1
        self._count(group, self._rank, 1)

    def absent(self, group: str) -> list[int]:
        """Ranks that have not come to the message that this one is at, nor come soon: of these the
        ones furthest behind, as others may have given up on them already."""
        end = time.monotonic() + GRACE_SECONDS
        found = self._late(group)
        while len(found) > 1 and time.monotonic() < end:  # a peer's death is seen at once
            time.sleep(GRACE_SECONDS / 20)
            found = self._late(group)
        return found

    def _late(self, group: str) -> list[int]:
        seen = {rank: self._count(group, rank, 0) for rank in range(self._world)}
        late = {rank: n for rank, n in seen.items() if n is not None and n < self._come[group]}
        return [rank for rank, n in late.items() if n == min(late.values())]

    def _count(self, group: str, rank: int, more: int) -> int | None:
        try:
            store = dist.distributed_c10d._get_default_store()
            return int(store.add(f"hpstore/{group}/{rank}", more))
        except (RuntimeError, ValueError) as error:
            _log.debug("ranks are not counted: %s", error)
            return None


def _tensor(message: bytes) -> torch.Tensor:
    return (
        torch.frombuffer(bytearray(message), dtype=torch.uint8)
        if message
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )
