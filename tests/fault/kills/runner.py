"""Kills processes at random moments, and checks after each kill that nothing is lost or torn.

Episodes: a trainer or an ingest, both at once, a rebuild or a scrub over damage, an agent while a
device is away and while it is back. Within an episode at most one device is damaged or away.
"""

from __future__ import annotations

import glob
import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import hpstore
from hpstore.config import Settings
from hpstore.errors import HpstoreError
from hpstore.membership.agent_observations import read_status
from hpstore.pool.pool import Pool
from hpstore.units import KIB, MIB
from tests.fault.common import column_number, flip, poll
from tests.fault.kills.ledger import Objects, Steps, data_of, digest
from tests.fault.kills.victims import BODIES, Victim, see_to_death

DEVICES, DATA, PARITY = 7, 3, 2
STILL, STILL_BYTES = 16, 150 * KIB  # objects that no victim writes; damage is done to them
KILLS_AN_EPISODE = 4  # of a rebuild, a scrub, an agent
OTHERS_CHECKED, ALL_EVERY = 20, 50  # keys beside the touched ones; kills until all are checked
HEAL_SECONDS = 180.0
LIVES_THAT_SAVE = 100  # of trainers, after which a loop without saves has shown nothing
SAID = ("begin", "done", "none")  # by those that write
PROBLEMS_MOST = 20  # then the run ends
EPISODES_AGAIN = 30  # after the last kill, for a target that none has hit yet
QUICK = """
[agent]
tick_seconds = 0.05
probe_seconds = 0.1
survey_seconds = 0.3
scrub_days = 0.0
heal_share_busy = 0.9
smart_hours = 0.0

[agent.policy]
removed_seconds = 0.2
grace_seconds = 0.5
return_seconds = 0.2
retry_seconds = 1.0
probation_seconds = 0.1
changes_per_hour = 100000
"""


@dataclass
class Report:
    """What a run found."""

    seed: int
    kills: Counter[str] = field(default_factory=Counter)  # by target
    ended_before: Counter[str] = field(default_factory=Counter)  # the work was over, or it failed
    episodes: Counter[str] = field(default_factory=Counter)
    objects_checked: int = 0
    operations: dict[str, int] = field(default_factory=dict)  # acknowledged
    rolled_forward: dict[str, int] = field(default_factory=dict)  # under way, became visible
    orphans_swept: int = 0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)

    @property
    def total(self) -> int:
        """Kills of all targets."""
        return sum(self.kills.values())

    def text(self) -> str:
        """For people."""
        by_target = ", ".join(f"{count} {name}" for name, count in sorted(self.kills.items()))
        return (
            f"{self.total} kills ({by_target}) in {self.seconds:.0f} s, seed {self.seed}\n"
            f"acknowledged: {self.operations}; under way and became visible: "
            f"{self.rolled_forward}\n"
            f"{self.objects_checked} objects read and compared, {self.orphans_swept} orphans "
            f"swept, ended before their kill: {dict(self.ended_before)}\n"
            f"{len(self.problems)} problems\n" + "".join(f"  {text}\n" for text in self.problems)
        )

    def write(self, path: Path) -> None:
        """As JSON."""
        path.write_text(json.dumps({**vars(self), "total": self.total}, indent=1) + "\n")


class KillLoop:
    """A pool of 3+2 on seven directories below `root`, its ledgers, and what kills its users."""

    def __init__(
        self, root: Path, *, seed: int, note: Callable[[str], None] = lambda text: None
    ) -> None:
        self.root, self.toml, self._note = root, root / "pool.toml", note
        self.rng, self.report = random.Random(seed), Report(seed=seed)
        self.objects, self.steps = Objects(), Steps()
        self.paths = [root / f"d{number}" for number in range(DEVICES)]
        self._lives, self._checked_at = 0, 0
        self._all_there = True  # no device is away or evicted
        self._seconds = {"rebuild": 0.3, "scrub": 0.3}  # that one takes, as last seen
        # a claim of the dead gives way well within the life of who comes next: else one kill in the
        # middle of a commit keeps all later lives from saving anything
        settings = Settings(
            run_directory=str(root / "run"), memory_bytes=64 * MIB, claim_seconds=0.1
        )
        with hpstore.create(
            self.paths,
            data=DATA,
            parity=PARITY,
            config=self.toml,
            unit_bytes=64 * KIB,
            settings=settings,
        ) as pool:
            for number in range(STILL):
                key, data = f"still/{number}", data_of(f"still {number}", STILL_BYTES)
                pool.put(key, data)
                self.objects.acknowledged[key] = digest(data)
        self.toml.write_text(self.toml.read_text() + QUICK)

    def open(self) -> Pool:
        """The pool, opened by this process."""
        return hpstore.open(self.toml)

    def run(self, kills: int, *, seconds: float = float("inf")) -> Report:
        """So many kills, of each target one at least, or as many as fit; then all is made whole."""
        began = time.monotonic()
        episodes = (
            (self._ordinary, 12),
            (self._rebuild, 3),
            (self._scrub, 3),
            (self._agent, 2),
        )
        first = self.rng.sample([e for e, _ in episodes], len(episodes))  # each of them once
        again = EPISODES_AGAIN
        while time.monotonic() - began < seconds and len(self.report.problems) < PROBLEMS_MOST:
            drawn = self.rng.choices([e for e, _ in episodes], [w for _, w in episodes])
            chosen = first.pop() if first else drawn[0]
            if self.report.total >= kills:
                missing = sorted(BODIES.keys() - self.report.kills.keys())
                if not missing or not again:
                    break
                again -= 1  # its lives were over before their kills, or never came
                chosen = getattr(self, f"_{missing[0]}", self._ordinary)
            name = chosen.__name__.removeprefix("_")
            self.report.episodes[name] += 1
            try:
                chosen()
            except (HpstoreError, AssertionError) as error:
                self._problem(f"{name}: {type(error).__name__}: {error}")
        self._end()
        self.report.operations = {
            "objects": self.objects.operations,
            "checkpoints": self.steps.operations,
        }
        lives = self.report.kills["trainer"]
        if lives >= LIVES_THAT_SAVE and self.steps.operations < lives / 10:
            self._problem(f"{lives} trainers have saved {self.steps.operations} steps: too few")
        self.report.rolled_forward = {
            "objects": self.objects.rolled_forward,
            "checkpoints": self.steps.rolled_forward,
        }
        self.report.seconds = time.monotonic() - began
        return self.report

    # --- episodes ---------------------------------------------------------------------------

    def _ordinary(self) -> None:
        """Writers of a whole pool; every other time they go on with the pool of their parent."""
        names = self.rng.choice((("ingest",), ("trainer",), ("ingest", "trainer")))
        with self.open() as pool:
            shared = pool if self.rng.random() < 0.5 and len(names) == 1 else None
            self.kill(*names, shared=shared)

    def _rebuild(self) -> None:
        """A device has lost the columns of objects at rest."""
        for file in self._columns(self.rng.choice(self.paths)):
            file.unlink()
        self._kill_healers("rebuild")

    def _scrub(self) -> None:
        """Bits of columns at rest are wrong, in one column of an object each."""
        for file in self._columns(self.rng.choice(self.paths)):
            flip(file, 4096 + self.rng.randrange(8 * KIB))
        self._kill_healers("scrub")

    def _agent(self) -> None:
        """A device is away for some lives of an agent, and back for others."""
        lost, away = self.rng.choice(self.paths), self.root / "away"
        lost.rename(away)
        self._all_there = False
        try:
            for _ in range(self.rng.randint(1, KILLS_AN_EPISODE)):
                self.kill("agent", *self._companion())
        finally:
            away.rename(lost)
        for _ in range(self.rng.randint(0, KILLS_AN_EPISODE)):
            self.kill("agent", *self._companion())
        last = Victim("agent", self.open, 0, self.rng, window_seconds=1e6)
        try:
            last.kill_at = None
            poll(HEAL_SECONDS, self._whole, self._how_it_is)
        finally:
            last.end()
            for text in last.errors:
                self._problem(text)
            self._take_back()
        self._all_there = True

    def _take_back(self) -> None:
        """Devices that an agent has left out, which is a problem of its own: the loop goes on."""
        with self.open() as pool:
            for device in pool.status().devices:
                if device.state != "online":
                    self._problem(f"agent: {device.url} is {device.state} at the end")
                    pool.readmit(device.url)

    def _kill_healers(self, name: str) -> None:
        for _ in range(self.rng.randint(1, KILLS_AN_EPISODE)):
            self.kill(name, *self._companion())
        with self.open() as pool:
            began = time.monotonic()
            report = (
                pool.rebuild(everything=True) if name == "rebuild" else pool.scrub(resume=False)
            )
            self._seconds[name] = time.monotonic() - began
            if report.unreadable:
                self._problem(f"{name}: unreadable: {sorted(report.unreadable)[:3]}")
            if not pool.scrub(resume=False).clean:
                self._problem(f"{name}: a scrub after it is not clean")
        if not self._whole():
            self._problem(f"{name}: {self._how_it_is()}")

    def _companion(self) -> tuple[str, ...]:
        """A writer beside a healer, every other time."""
        return self.rng.choice(((), (), ("ingest",), ("trainer",)))

    def _columns(self, path: Path) -> list[Path]:
        return sorted(path.glob("objects/still/*/@*"), key=lambda file: (file, column_number(file)))

    # --- one kill ---------------------------------------------------------------------------

    def kill(self, *names: str, shared: Pool | None = None) -> None:
        """A life of each, all at once, and the look that follows."""
        victims = []
        for name in names:
            self._lives += 1
            victims.append(
                Victim(
                    name,
                    self.open,
                    self._lives,
                    self.rng,
                    shared=shared,
                    window_seconds=self._seconds.get(name),
                )
            )
        see_to_death(victims)
        touched: set[str] = set()
        for victim in victims:
            counts = self.report.kills if victim.killed else self.report.ended_before
            counts[victim.name] += 1
            for text in victim.errors:
                self._problem(text)
            lines = [line for line in victim.lines if line.split()[0] in SAID]
            if victim.name == "ingest":
                touched |= self.objects.read(lines)
            elif victim.name == "trainer":
                self.steps.read(lines)
        self._look(touched)

    def _look(self, touched: set[str]) -> None:
        """Everything that was touched, and some that was not, by a process that opens afresh."""
        every = self.report.total >= self._checked_at + ALL_EVERY
        known = sorted(self.objects.acknowledged)
        keys = set(known) if every else set(self.rng.sample(known, min(OTHERS_CHECKED, len(known))))
        read_only = self.rng.random() < 0.5
        settles = self._all_there and not read_only
        with hpstore.open(self.toml, read_only=read_only) as pool:
            for text in self.objects.check(pool, sorted(touched | keys), settles=settles):
                self._problem(text)
            for text in self.steps.check(pool):
                self._problem(text)
            self.report.objects_checked += len(touched | keys)
            if every:
                self._checked_at = self.report.total
                for text in self.objects.check_list(pool):
                    self._problem(text)
                self._note(f"{self.report.total} kills, {len(self.report.problems)} problems")
        if every:
            with self.open() as pool:
                self.objects.trim(pool, self.rng)

    def _whole(self) -> bool:
        try:
            with hpstore.open(self.toml, read_only=True) as pool:
                found = pool.status()
        except HpstoreError:
            return False  # the membership is changed while it is opened
        online = sum(device.state == "online" for device in found.devices)
        left = found.degraded - sum(found.expiring.values())  # those a next save would drop
        tolerated = PARITY if not found.expiring else found.losses_tolerated
        return (found.losses_tolerated, left, online) == (tolerated, 0, DEVICES)

    def _how_it_is(self) -> str:
        with hpstore.open(self.toml, read_only=True) as pool:
            found = pool.status()
            looking = read_status(pool.admin.run_directory, pool.admin.clock.wall_ms()) or {}
        states = Counter(device.state for device in found.devices)
        told = {name: looking.get(name) for name in ("job", "waiting", "put_off", "warnings")}
        events = looking.get("events")
        told["events"] = events[:6] if isinstance(events, list) else None
        return (
            f"whole: {found.degraded} degraded (expiring: {dict(found.expiring)}), "
            f"{found.losses_tolerated} may be lost, {dict(states)}; the agent: {told}"
        )

    def _end(self) -> None:
        """Heal, check all, and let a fresh process sweep what killed writers left in tmp/."""
        with self.open() as pool:
            if pool.rebuild(everything=True).unreadable or not pool.scrub(resume=False).clean:
                self._problem("at the end: not whole")
            for text in self.objects.check(pool, sorted(self.objects.acknowledged), settles=True):
                self._problem(f"at the end: {text}")
            for text in (*self.objects.check_list(pool), *self.steps.check(pool)):
                self._problem(f"at the end: {text}")
        left = self._orphans()
        for name in left:
            os.utime(name, (1, 1))
        self.open().close()
        if found := self._orphans():
            self._problem(f"at the end: orphans are not swept: {found[:3]}")
        self.report.orphans_swept = len(left)

    def _orphans(self) -> list[str]:
        return [name for path in self.paths for name in glob.glob(f"{path}/tmp/*")]

    def _problem(self, text: str) -> None:
        full = f"after {self.report.total} kills: {text}"
        self.report.problems.append(full)
        self._note(full)
