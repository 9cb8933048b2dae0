"""Whether this agent decides for its pool: always on one host, by election over several.

On one host the lock that an agent holds on the devices makes it the only one. Over several each
host has an agent, which looks after its own disks; one of them, the keeper, decides evictions and
sweeps and runs what concerns the whole pool (PROTOCOL 17).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import xxhash

from hpstore.agreement.keeper_election import KEEPER_SECONDS, KeeperElection, KeeperSight
from hpstore.errors import MembershipError
from hpstore.format.records import DeviceState, Member
from hpstore.membership.host_names import over_several_hosts
from hpstore.pool.admin import PoolAdmin
from hpstore.runtime.text_files import read_text_file

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_ID_CHARACTERS = 16  # of a device in the record
_WHOLE_HOST = "+"


class PoolKeeper:
    """One agent's part in deciding for a pool. Thread-safe.

    `dry_run`: it decides for itself, and takes part in no election. Whether the pool is over
    several hosts is asked each time: it may grow while the agent runs.
    """

    def __init__(
        self, admin: PoolAdmin, *, host: str, dry_run: bool, ttl_seconds: float = KEEPER_SECONDS
    ) -> None:
        self._admin, self._dry_run = admin, dry_run
        self.host = host or socket.gethostname()
        self._election = KeeperElection(
            admin.registers.update_own,
            admin.clock,
            host=self.host,
            run=xxhash.xxh3_64_hexdigest(run_name(admin.run_directory)),
            ttl_seconds=ttl_seconds,
        )

    @property
    def shared(self) -> bool:
        """Whether agents of several hosts look after the pool."""
        return not self._dry_run and over_several_hosts(self._admin.record)

    def look(self) -> bool:
        """Once a round: whether this agent decides now."""
        if not self.shared:
            return True
        if self._election.decides and self._election.due_seconds > 0:
            return True  # rounds that are short need not renew it each time
        return self._election.look()

    def renew(self) -> None:
        """Between rounds that are long."""
        if self.shared and self._election.due_seconds <= 0:
            self._election.look()

    @property
    def decides(self) -> bool:
        """As the last look has it, if that is not too old to be true. Asks no register."""
        return self._election.decides if self.shared else True

    @property
    def repairs(self) -> bool:
        """Whether it may go on with known damage: also the last keeper, while registers that do not
        answer have no other one. Two repairs at once do no harm (PROTOCOL 10)."""
        return self._election.had_it_last if self.shared else True

    def confirm(self) -> None:
        """Before a decision. Raises MembershipError where another agent decides, or may."""
        if self.shared:
            self._election.confirm()

    @contextmanager
    def closing(self, member: Member, *, whole_host: bool) -> Iterator[None]:
        """While the block closes a device, or all of its host, for an eviction: if this agent is
        killed in it, its successor opens them again, of a host also one that an operator drains:
        the record has no room to distinguish them. Raises as confirm()."""
        found = self._admin.record.members if whole_host else [member]
        open_now = [m for m in found if m.domain == member.domain and m.state is DeviceState.ONLINE]
        if not self.shared or not open_now:
            self.confirm()
            yield
            return
        mark = _WHOLE_HOST if whole_host else ""
        self._election.confirm(closed=mark + open_now[0].device_id[:_ID_CHARACTERS])
        yield  # what was closed is looked at, and the mark taken back, by a job of its own

    def cut_short(self) -> list[Member]:
        """Members that an eviction has closed and not taken out, of this agent or of one before."""
        closed = self._election.record.closed if self.shared else ""
        if not closed or not self.decides:
            return []
        members = self._admin.record.members
        start = closed.removeprefix(_WHOLE_HOST)
        named = [m for m in members if m.device_id.startswith(start)]
        domains = {m.domain for m in named} if closed.startswith(_WHOLE_HOST) else set()
        found = [m for m in members if m in named or m.domain in domains]
        return [m for m in found if m.state is DeviceState.DRAINING]

    @property
    def left_closed(self) -> bool:
        """Whether the record says that something was closed for an eviction."""
        return self.shared and bool(self._election.record.closed)

    def forget_closed(self) -> None:
        """What was closed is open again, or out."""
        if self.shared and self.decides and self._election.record.closed:
            self._election.confirm(closed="")

    def sight(self) -> KeeperSight:
        """Who decides, for people."""
        if self.shared:
            return self._election.sight()
        return KeeperSight(
            host=self.host, process=os.getpid(), epoch=0, here=True, problem="", alone=True
        )

    def require_keeper(self, word: str) -> None:
        """Raise MembershipError for an order that only the keeper can obey."""
        if not self.decides:
            raise MembershipError(
                f"{word} is for the keeper of the pool, which is {self.sight()}. Nothing was "
                "changed; run it on that host."
            )

    def close(self) -> None:
        """Let another agent take over at once."""
        self._election.resign()


def run_name(directory: Path) -> bytes:
    """What names a run directory in this boot of this machine, also beside containers that have one
    of the same path."""
    try:
        boot = read_text_file(_BOOT).strip()
        found = os.stat(directory)
    except OSError:
        return os.urandom(16)  # of no other agent: a record of it is waited for
    return f"{boot} {found.st_dev} {found.st_ino}".encode()
