"""Rebuild after the loss of one device of eight: its bandwidth, and what foreground reads notice.

The agent rebuilds, in a process of its own and as nice as its systemd unit makes it. There are two
ways. If an empty device replaced the lost one, its columns are rebuilt on it. If the device left,
objects are restriped over the seven that remain, as no device is outside of their stripes.

Bandwidth is in bytes written to the new device, or of restriped objects. What is allowed is a
figure (`heal_bytes_per_second`), or the agent's share of the time: alone it is compared with the
bandwidth of the same work at full speed, beside readers with what the agent has measured while
it worked there.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import hpstore
from hpstore.agent import Agent, AgentConfig
from hpstore.agent.background_jobs import JobKind
from hpstore.benchmarks.harness.bench_verdicts import verdict
from hpstore.benchmarks.harness.measure import seconds
from hpstore.benchmarks.health.health_reads import KINDS, ForegroundReads, Objects
from hpstore.benchmarks.health.health_rig import Rig, loads, middle
from hpstore.errors import HpstoreError

POOL = "rebuild"
ALLOWED_BAR, P99_BAR = 0.7, 1.5
NICE = 10  # as in docs/hpstore-agent.service
ROUND_SECONDS = 0.25  # the agent's own rounds are 5 s apart; what is measured is the job
SILENT_SECONDS = 120.0
LIMIT_SHARE = 0.4  # of what the pace alone would allow, where a figure is the limit
BEFORE = {"lost": "before it began", "well": "before the loss"}
FULL = AgentConfig(heal_share_idle=1.0, heal_share_busy=1.0, scrub_days=0.0, smart_hours=0.0)
USUAL = replace(
    FULL,
    heal_share_idle=AgentConfig().heal_share_idle,
    heal_share_busy=AgentConfig().heal_share_busy,
)
# Any: JSON
Found = dict[str, Any]


class HealingFailed(HpstoreError):
    """The agent's process died, was silent, or left columns lost: there is no figure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RebuildPlan:
    """What must be rebuilt, and how long foreground reads are measured before."""

    objects: Objects = field(default_factory=lambda: Objects(count=16, stripes=20))
    quiet_seconds: float = 3.0
    warm_seconds: float = 1.0


QUICK = RebuildPlan(objects=Objects(count=6, stripes=8), quiet_seconds=1.5, warm_seconds=0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Healed:
    """A job of the agent, by the clock that all processes share; the bandwidth that the agent has
    measured while it worked."""

    began: float
    ended: float
    working_bytes_per_second: float = 0.0

    @property
    def seconds(self) -> float:
        return self.ended - self.began


# --- the agent's process ----------------------------------------------------------------------


def agent_process(connection: Connection, toml: str, config: AgentConfig) -> None:
    """Open the pool, wait for the start message, rebuild until nothing is left, report when."""
    os.nice(NICE)
    try:
        with hpstore.open(toml) as pool, Agent(pool, config) as agent:
            connection.send("ready")
            connection.recv()
            connection.send(_heal(agent))
    except Exception as error:  # noqa: BLE001 (raised again where it was asked for)
        connection.send(f"{type(error).__name__}: {error}")


def _heal(agent: Agent) -> Healed | str:
    """Run rounds until a rebuild has begun and ended, or another has taken its place.

    Rounds that see the loss during the rebuild ask for one more.
    """
    until, began, last = time.monotonic() + SILENT_SECONDS, 0.0, None
    due = time.monotonic()
    while time.monotonic() < until:
        now, sight = time.monotonic(), agent.jobs.sight()
        if last is not None and (sight is None or sight.seconds < last.seconds):
            return Healed(
                began=began, ended=now, working_bytes_per_second=last.bytes_per_second_alone
            )
        if sight is not None and sight.kind == JobKind.REBUILD:
            began, last = began or now, sight
        if now >= due:
            agent.tick()
            due = time.monotonic() + ROUND_SECONDS
        time.sleep(0.005)
    return "no rebuild began and ended"


@contextmanager
def _agent(toml: Path, config: AgentConfig) -> Iterator[Callable[[], Healed]]:
    """Start an agent that waits; calling the result lets it rebuild. Raises HealingFailed."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=agent_process, args=(there, str(toml), config), daemon=True)
    process.start()
    there.close()

    def answer() -> object:
        if not here.poll(SILENT_SECONDS):
            raise HealingFailed(f"the agent was silent for {SILENT_SECONDS:.0f} s")
        try:
            return here.recv()
        except EOFError as error:
            raise HealingFailed("the agent died without a word") from error

    def heal() -> Healed:
        here.send("go")
        found = answer()
        if not isinstance(found, Healed):
            raise HealingFailed(f"the agent: {found}")
        return found

    try:
        ready = answer()
        if ready != "ready":
            raise HealingFailed(f"the agent: {ready}")
        yield heal
    finally:
        here.close()
        process.join(10.0)
        if process.is_alive():
            process.kill()
            process.join()
        process.close()


# --- cases ------------------------------------------------------------------------------------


class Rebuild:
    """A pool whose first device is lost again and again."""

    def __init__(self, rig: Rig, plan: RebuildPlan) -> None:
        self.rig, self.plan = rig, plan
        rig.create(POOL)
        with rig.open(POOL, monitor=False) as pool:
            plan.objects.write(pool)
            self._first = rig.first(pool)
        self._seed = 0

    def case(self, repeats: int, anew: int, done: Callable[[str], None]) -> Found:
        """Measure both ways; `anew` is how often objects are restriped."""
        replaced: list[Found] = []
        for _ in range(repeats):
            replaced.append(self._replaced())
            done("replaced")
        laid: list[Found] = []
        for _ in range(anew):
            laid.append(self._laid_out_anew())
            done("laid out anew")
        return {
            "objects": self.plan.objects.count,
            "object_bytes": self.plan.objects.nbytes,
            "agent_nice": NICE,
            "replaced": _verdicts(replaced),
            "laid out anew": _verdicts(laid),
        }

    def _replaced(self) -> Found:
        """Full speed, the usual pace, a figure as the limit; then beside readers."""
        load = loads()
        full = self._once(FULL)
        figure = int(LIMIT_SHARE * full)
        alone = self._once(USUAL) / (USUAL.heal_share_idle * full)
        limited = self._once(replace(USUAL, heal_bytes_per_second=figure)) / figure
        beside = self._watched(self._lose_columns, USUAL)
        slower = int(LIMIT_SHARE * USUAL.heal_share_busy * full)
        config = replace(USUAL, heal_bytes_per_second=slower)
        beside_limited = self._watched(self._lose_columns, config)
        return {
            "allowed": {
                "alone": alone,
                "alone, limited": limited,
                "beside readers": beside["rate"] / (USUAL.heal_share_busy * beside["working"]),
                "beside readers, limited": beside_limited["rate"] / slower,
            },
            "p99": {"": beside["p99"], ", limited": beside_limited["p99"]},
            "full": full,
            "beside": beside,
            "load": load,
        }

    def _laid_out_anew(self) -> Found:
        """Shrunk to seven devices beside readers, then widened again at full speed, alone: as much
        is read and written then, but for a tenth."""
        load = loads()

        def leave() -> int:
            with self.rig.open(POOL, monitor=False) as pool:
                pool.evict(self._first)
            return self.plan.objects.count * self.plan.objects.nbytes

        shrunk = self._watched(leave, USUAL)
        with self.rig.open(POOL, monitor=False) as pool:
            pool.readmit(self._first)
            taken = seconds(pool.rebuild)
        self._require_whole()
        share = USUAL.heal_share_busy
        return {
            "allowed": {"beside readers": shrunk["rate"] / (share * shrunk["working"])},
            "p99": {"": shrunk["p99"]},
            "full": shrunk["bytes"] / taken,
            "beside": shrunk,
            "load": load,
        }

    def _once(self, config: AgentConfig) -> float:
        """Return the bytes per second of a rebuild without foreground reads."""
        nbytes = self._lose_columns()
        with _agent(self.rig.config(POOL), config) as heal:
            found = heal()
        self._require_whole()
        return nbytes / found.seconds

    def _watched(self, lose: Callable[[], int], config: AgentConfig) -> Found:
        """Measure a loss and its rebuild beside readers: their p99 while all devices are healthy,
        with the device lost, and during the rebuild."""
        p99: dict[str, dict[str, float]] = {}
        with ExitStack() as stack:
            pool = stack.enter_context(self.rig.open(POOL, read_only=True))
            with self._reads(pool) as reads:
                well = self._quiet(reads)
            p99["well"] = reads.p99(*well)
            nbytes = lose()
            pool.admin.refresh()
            heal = stack.enter_context(_agent(self.rig.config(POOL), config))
            with self._reads(pool) as reads:
                lost = self._quiet(reads)
                healed = heal()
            p99["lost"] = reads.p99(*lost)
            p99["during"] = reads.p99(healed.began, healed.ended)
        self._require_whole()
        return {
            "bytes": nbytes,
            "rate": nbytes / healed.seconds,
            "seconds": healed.seconds,
            "working": healed.working_bytes_per_second,
            "p99": p99,
        }

    def _reads(self, pool: hpstore.Pool) -> ForegroundReads:
        self._seed += 1
        return ForegroundReads(pool, self.plan.objects, seed=self._seed)

    def _quiet(self, reads: ForegroundReads) -> tuple[float, float]:
        """Let readers run for a while; when that was."""
        time.sleep(self.plan.warm_seconds)
        began = time.monotonic()
        time.sleep(self.plan.quiet_seconds)
        return began, time.monotonic()

    def _lose_columns(self) -> int:
        """The first device is an empty one now: bytes of the columns that it had."""
        lost = list(self.rig.directories(POOL)[0].glob("objects/reads/**/@*"))
        nbytes = sum(file.stat().st_size for file in lost)
        for file in lost:
            file.unlink()
        return nbytes

    def _require_whole(self) -> None:
        with self.rig.open(POOL, monitor=False, read_only=True) as pool:
            status = pool.status()
        if status.degraded or status.unreadable:
            raise HealingFailed(f"{status.degraded} objects are degraded after they were healed")


def _verdicts(ones: list[Found]) -> Found:
    """Of all repetitions."""
    if not ones:
        return {"skipped": "not asked for"}
    rows: Found = {
        f"bandwidth_to_allowed, {way}": verdict(
            [one["allowed"][way] for one in ones], ALLOWED_BAR, least=True
        )
        for way in ones[0]["allowed"]
    }
    for how in ones[0]["p99"]:
        for kind in KINDS:
            for before, bar in (("lost", P99_BAR), ("well", None)):
                ratios = [
                    one["p99"][how]["during"][kind] / one["p99"][how][before][kind] for one in ones
                ]
                rows[f"p99_of_{kind}{how}, to {BEFORE[before]}"] = verdict(ratios, bar, least=False)
    share = USUAL.heal_share_busy
    return rows | {
        "beside_readers_to_share_of_full_speed": middle(
            [one["beside"]["rate"] / (share * one["full"]) for one in ones]
        ),
        "full_speed_mb_per_second": middle([one["full"] / 1e6 for one in ones], 1),
        "beside_readers_mb_per_second": middle([one["beside"]["rate"] / 1e6 for one in ones], 1),
        "beside_readers_seconds": middle([one["beside"]["seconds"] for one in ones], 1),
        "p99_ms_of_the_last": {
            when: {kind: round(value, 2) for kind, value in found.items()}
            for when, found in ones[-1]["p99"][""].items()
        },
        "loads": [one["load"] for one in ones],
    }
