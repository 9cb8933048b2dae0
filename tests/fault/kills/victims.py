"""Processes that are killed: each says through a pipe what it begins and what was acknowledged.

They are forked from the runner, which has everything imported, so that a kill costs a fraction of
a second.
"""

from __future__ import annotations

import itertools
import os
import random
import select
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

from hpstore.agent import Agent, agent_config
from hpstore.checkpoint import Checkpointer
from hpstore.errors import ObjectNotFound
from hpstore.pool.pool import Pool
from hpstore.units import KIB, MIB
from tests.fault.common import end_with
from tests.fault.kills.ledger import ABSENT, KEEP_LAST, PREFIX, data_of, digest, state_of

SIZES = (1 * KIB, 200 * KIB, 3 * MIB)
SLOTS = 6  # keys of each size that are overwritten and deleted; all others are put once
PATIENCE = 60.0
EARLY, EARLY_SECONDS = 0.15, 0.1  # the share of kills that come soon after the start, within that
WINDOW_SECONDS = {"ingest": 0.3, "trainer": 0.5, "agent": 1.5, "rebuild": 0.3, "scrub": 0.3}
Say = Callable[[str], None]
Body = Callable[[Pool, Say, int], None]


def ingest(pool: Pool, say: Say, seed: int) -> None:
    """Put, overwrite and delete until killed. Lines: see Objects.read."""
    rng = random.Random(seed)
    for turn in itertools.count():
        size, kind = rng.choice(SIZES), rng.random()
        key = f"once/{seed}/{turn}" if kind < 0.3 else f"slot/{size}/{rng.randrange(SLOTS)}"
        if 0.3 <= kind < 0.45:
            say(f"begin {key} {ABSENT}")
            try:
                pool.delete(key)
            except ObjectNotFound:
                say(f"none {key} {ABSENT}")
            else:
                say(f"done {key} {ABSENT}")
            continue
        data = data_of(f"{seed}.{turn}", size)
        say(f"begin {key} {digest(data)}")
        pool.put(key, data)
        say(f"done {key} {digest(data)}")


def trainer(pool: Pool, say: Say, _: int) -> None:
    """Restore, then save step after step with retention. Lines: `begin step`, `done step`."""
    torch.set_num_threads(1)
    with Checkpointer(pool, PREFIX, keep_last=KEEP_LAST, rng=False) as checkpointer:
        state = state_of(0)
        found = checkpointer.restore(state) or 0
        if any(not torch.equal(state[name], there) for name, there in state_of(found).items()):
            raise AssertionError(f"step {found} was restored with wrong bytes")
        for step in itertools.count(found + 1):
            for name, tensor in state_of(step).items():
                state[name].copy_(tensor)
            say(f"begin {step}")
            checkpointer.save(step, state).result()
            say(f"done {step}")


def rebuild(pool: Pool, say: Say, _: int) -> None:
    """Make whole what has lost columns."""
    say("ready")
    pool.rebuild(everything=True)


def scrub(pool: Pool, say: Say, _: int) -> None:
    """Read everything, and make whole what is damaged."""
    say("ready")
    pool.scrub(resume=False)


def agent(pool: Pool, say: Say, _: int) -> None:
    """Look after the pool until killed. A line for each round."""
    with Agent(pool, agent_config(pool.config)) as looking:
        looking.run(threading.Event(), lambda status: say(f"round {status.ticks}"))


BODIES: dict[str, Body] = {
    "ingest": ingest,
    "trainer": trainer,
    "rebuild": rebuild,
    "scrub": scrub,
    "agent": agent,
}


class Victim:
    """One life. `killed` after `see_to_death`: whether the kill ended it, or it had ended before.

    `shared`: a pool of the parent, which the child goes on with; else it opens its own.
    """

    def __init__(
        self,
        name: str,
        opened: Callable[[], Pool],
        seed: int,
        rng: random.Random,
        *,
        shared: Pool | None = None,
        window_seconds: float | None = None,
    ) -> None:
        self.name, self.killed, self.status = name, False, 0
        self._received = bytearray()
        self._after = rng.random() * (window_seconds or WINDOW_SECONDS[name])
        self.began = time.monotonic()
        early = rng.random() < EARLY
        self.kill_at = self.began + rng.random() * EARLY_SECONDS if early else None
        self.reading, writing = os.pipe()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                end_with(parent)
                os.close(self.reading)
                pool = shared or opened()
                BODIES[name](pool, lambda text: self._say(writing, text), seed)
                status = 0
            except BaseException as error:  # noqa: BLE001 (the child must end here)
                self._say(writing, f"error {type(error).__name__}: {error}".replace("\n", " "))
            finally:
                os._exit(status)
        os.close(writing)

    @staticmethod
    def _say(pipe: int, text: str) -> None:
        os.write(pipe, f"{text}\n".encode())

    @property
    def lines(self) -> list[str]:
        """What it has said; a line that the kill cut off is left out."""
        return self._received.decode().split("\n")[:-1]

    @property
    def errors(self) -> list[str]:
        """What ended it, unless that was the kill."""
        found = [f"{self.name}: {line}" for line in self.lines if line.startswith("error ")]
        if not found and not self.killed and self.status:
            found = [f"{self.name} ended with {self.status}"]
        return found

    def take(self) -> bool:
        """Read what it says now; False when it has ended."""
        part = os.read(self.reading, 65536)
        self._received += part
        if self.kill_at is None and b"\n" in part:
            self.kill_at = time.monotonic() + self._after
        return bool(part)

    def end(self) -> None:
        """Kill it unless it has ended, take the rest of what it said, reap it."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        while self.take():
            continue
        os.close(self.reading)
        _, status = os.waitpid(self.pid, 0)
        self.status = os.waitstatus_to_exitcode(status)
        self.killed = self.status == -signal.SIGKILL


def see_to_death(victims: Sequence[Victim]) -> None:
    """Kill each when its time has come; return when all have ended.

    One that gives no sign for a minute is killed, too, and that stands in its lines as an error.
    """
    alive = list(victims)
    give_up = time.monotonic() + PATIENCE
    try:
        while alive:
            now = time.monotonic()
            for victim in [v for v in alive if (v.kill_at or give_up) <= now]:
                alive.remove(victim)
                silent = victim.kill_at is None
                victim.end()
                if silent:
                    raise AssertionError(f"{victim.name} gave no sign for {PATIENCE:.0f} s")
            wait = min((v.kill_at or give_up for v in alive), default=now) - now
            ready, _, _ = select.select([v.reading for v in alive], [], [], max(0.0, wait))
            for victim in [v for v in alive if v.reading in ready]:
                if not victim.take():
                    alive.remove(victim)
                    victim.end()
    finally:
        for victim in alive:
            victim.end()
