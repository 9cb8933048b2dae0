"""Hosts, and the links between them: what a call on a disk of another host meets on its way.

Device dN is a disk of host N mod `hosts`. A call of a process on a disk of its own host never
meets a link. One on another host's disk is a request and an answer, and each may be lost:

- a link that is cut one way loses what is sent that way: a request that does not arrive has no
  effect, an answer that does not arrive leaves the caller with a timeout and the effect there;
- a host that is stopped, and a link that is cut and keeps what was sent, let the first request to
  each disk take effect later, when the host goes on or the link is joined again;
- a host that fell answers at once that it is not there. Its processes are dead, and of what was not
  synced on its disks some is lost.

What a process holds there (open files, ranges of registers) is held by its session. The session
ends when the host falls, when the process is known to be dead, or when a cut has lasted so long
that the host's kernel gave the connection up; then nothing that is under way arrives any more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from hpstore.errors import DeviceMissing, DeviceTimeout, HpstoreError

T = TypeVar("T")
NOWHERE = -1  # no host: reached by every process
FIRST_SECONDS = 2.0  # that a call waits for a host that was there
LATER_SECONDS = 0.5  # and the next ones, until it has answered
GIVEN_UP_SECONDS = 60.0  # after which a kernel gives up a connection that is cut
# calls that change what other processes see, and are carried out although their caller is gone
ARRIVES = frozenset(
    {
        "publish",
        "delete",
        "retire",
        "quarantine",
        "write_small",
        "raise_counter",
        "register",
        "sync_directory",
    }
)

_OPENS = frozenset({"create", "open", "lock"})  # calls that leave something open there


class LinkUser(Protocol):
    """A process that makes calls. `born`: its number; no other process has it."""

    name: str
    born: int
    host: int

    def alive(self) -> None:
        """Raise in a process that is dead."""


@dataclass(slots=True)
class SentCall:
    """A request on its way, or what a process gives up at a host that it cannot reach."""

    process: LinkUser
    here: int
    there: int
    what: str
    call: Callable[[], object]


class SimulatedNetwork:
    """The hosts of one simulation. `count` 0: one machine, and no links. `wait`: time passes."""

    def __init__(
        self, count: int, note: Callable[[str], None], wait: Callable[[float], None]
    ) -> None:
        self.count, self._note, self._wait = count, note, wait
        self.cuts: dict[tuple[int, int], bool] = {}  # (from, to): whether what is sent is kept
        self.frozen: set[int] = set()
        self.down: set[int] = set()
        self.slow: dict[tuple[int, int], float] = {}  # (from, to): seconds
        self.boots = [0] * count  # how often each host was started again
        self.sent: list[SentCall] = []
        self.due: list[tuple[int, Callable[[], None]]] = []  # turn, what ends then
        self._doubted: set[tuple[int, str]] = set()  # process, device: it has not answered
        self._cut_seconds = 0.0  # since the first cut

    def host_of(self, url: str) -> int:
        """Whose disk it is; NOWHERE for one that every process reaches."""
        number = url.removeprefix("memory://d")
        return int(number) % self.count if self.count and number.isdigit() else NOWHERE

    def process_host(self, name: str) -> int:
        """Where a process runs."""
        number = name.removeprefix("p")
        return int(number) % self.count if self.count and number.isdigit() else NOWHERE

    def disks(self, urls: Iterable[str], host: int) -> list[str]:
        """Those of the devices that are a host's."""
        return [url for url in urls if self.host_of(url) == host]

    def boot(self, url: str) -> int:
        """How often the host of a device has fallen; each fall closes all files there."""
        host = self.host_of(url)
        return 0 if host == NOWHERE else self.boots[host]

    def stands_still(self, host: int) -> bool:
        """Whether nothing runs there now."""
        return host in self.frozen or host in self.down

    def hears(self, here: int, there: int) -> bool:
        """Whether what is sent from `here` arrives at a service `there` that runs."""
        if NOWHERE in (here, there) or here == there:
            return True
        return (here, there) not in self.cuts and not self.stands_still(there)

    def troubled(self, urls: Iterable[str]) -> set[str]:
        """Devices that not every process reaches now."""
        hosts = self.frozen | self.down | {host for link in self.cuts for host in link}
        return {url for url in urls if self.host_of(url) in hosts}

    # --- calls ------------------------------------------------------------------------------

    def call(self, process: LinkUser, url: str, operation: str, call: Callable[[], T]) -> T:
        """A call of a process on a device, over the link to its host."""
        if not self.count:
            return call()
        here, there = process.host, self.host_of(url)
        if NOWHERE in (here, there) or here == there:
            return call()
        if there in self.down:
            raise DeviceMissing(f"device {url}: its host does not answer", device=url)
        link = (here, there)
        doubt = (process.born, url)
        if not self.hears(here, there):
            kept = self.cuts.get(link, there in self.frozen) and doubt not in self._doubted
            if kept and operation in ARRIVES:
                self.sent.append(SentCall(process, here, there, f"{operation} {url}", call))
            self._time_out(process, doubt, operation)
        if doubt in self._doubted and (there, here) in self.cuts:
            self._time_out(process, doubt, operation)  # no connection comes about
        self._wait(self.slow.get(link, 0.0))
        result = call()
        if (there, here) in self.cuts:
            if operation in _OPENS:  # what the caller does not know of, it gives up when it can
                self.sent.append(SentCall(process, here, there, "", _undo(result)))
            self._note(f"the answer of {url} to {operation} of {process.name} is lost")
            self._time_out(process, doubt, operation)
        self._doubted.discard(doubt)
        return result

    def _time_out(self, process: LinkUser, doubt: tuple[int, str], operation: str) -> None:
        first = doubt not in self._doubted
        self._doubted.add(doubt)
        self._wait(FIRST_SECONDS if first else LATER_SECONDS)
        process.alive()
        raise DeviceTimeout(f"device {doubt[1]}: no answer to {operation}", device=doubt[1])

    def give_up(self, process: LinkUser, url: str, call: Callable[[], None]) -> None:
        """A process gives up what it has open on a device: now, or when the host hears of it."""
        here, there = process.host, self.host_of(url)
        if self.hears(here, there):
            call()
        else:
            self.sent.append(SentCall(process, here, there, "", call))

    # --- what becomes of hosts and links ----------------------------------------------------

    def cut(self, links: Collection[tuple[int, int]], *, keeps: bool) -> None:
        """Cut links in one direction. `keeps`: calls are held until the links are restored."""
        for link in links:
            self.cuts[link] = keeps

    def join(self, links: Collection[tuple[int, int]]) -> None:
        """Links are joined again."""
        for link in links:
            self.cuts.pop(link, None)
        if not self.cuts:
            self._cut_seconds = 0.0
        self._arrive()

    def freeze(self, host: int) -> None:
        """All of a host is stopped."""
        self.frozen.add(host)

    def thaw(self, host: int) -> None:
        """It goes on, with what was sent to it meanwhile."""
        self.frozen.discard(host)
        self._arrive()

    def fall(self, host: int) -> None:
        """A host fell: its sessions are gone, and what was on its way to it."""
        self.down.add(host)
        self.frozen.discard(host)
        self.boots[host] += 1
        self.sent = [sent for sent in self.sent if sent.there != host]

    def pass_time(self, seconds: float) -> None:
        """Time passes for all: connections over links that are cut are given up by kernels."""
        self._cut_seconds += seconds if self.cuts else 0.0
        if self._cut_seconds < GIVEN_UP_SECONDS:
            return
        cut = self.cuts.keys()
        over = [s for s in self.sent if cut & {(s.here, s.there), (s.there, s.here)}]
        self.sent = [s for s in self.sent if s not in over]
        for sent in over:
            if not sent.what:  # its session ends there, and takes with it what it held
                sent.call()

    def wake(self, turn_id: int) -> None:
        """End what lasts until a turn."""
        over = [end for until, end in self.due if until <= turn_id]
        self.due = [(until, end) for until, end in self.due if until > turn_id]
        for end in over:
            end()

    def two_way(self, one: int, other: int) -> bool:
        """Whether two hosts hear each other."""
        return self.hears(one, other) and self.hears(other, one)

    def has_majority(self, host: int) -> bool:
        """Whether a process of a host reaches one that has a majority of all hosts with it."""
        if host == NOWHERE or not self.count:
            return True
        hosts = range(self.count)
        leaders = [h for h in hosts if not self.stands_still(h) and self.two_way(host, h)]
        return any(2 * sum(self.two_way(h, x) for x in hosts) > self.count for h in leaders)

    def all_well(self) -> None:
        """Every host runs, and no link is cut."""
        self.down.clear()
        self.frozen.clear()
        self.slow.clear()
        self.due.clear()
        self.join(list(self.cuts))
        self._doubted.clear()

    def _arrive(self) -> None:
        """What can arrive now does, in the order in which it was sent."""
        arriving = [s for s in self.sent if self.hears(s.here, s.there)]
        self.sent = [s for s in self.sent if s not in arriving]
        for sent in arriving:
            if sent.what:
                self._note(f"{sent.what} of {sent.process.name} arrives late")
            with contextlib.suppress(HpstoreError, OSError, KeyError):
                sent.call()


def _undo(opened: object) -> Callable[[], object]:
    """What gives up a file that is made or read, or a range that is held."""
    for name in ("abort", "close", "release"):
        if hasattr(opened, name):
            return partial(_give_up_by, opened, name)
    raise TypeError(f"{type(opened).__name__} is not given up")


def _give_up_by(opened: object, name: str) -> None:
    getattr(opened, name)()
