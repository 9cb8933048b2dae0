"""What the agent sees of a pool. Nothing here waits for a device, and nothing is changed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from hpstore.agent.agent_config import AgentConfig
from hpstore.agent.background_call import CallSlot
from hpstore.agent.device_probes import Presence, Seen
from hpstore.agent.disk_load import Foreground, block_device
from hpstore.agent.smart_watch import DiskSight, DiskWatch
from hpstore.maintenance.survey_condition import Condition
from hpstore.pool.pool import Pool

_SCRUB_SECONDS = 60.0  # between two looks at when the pool was scrubbed


@dataclass(frozen=True, slots=True, kw_only=True)
class WalkShape:
    """What a walk over the keys is true for: the membership, and who answered."""

    generation: int
    there: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Walked:
    """A walk that has ended."""

    condition: Condition
    shape: WalkShape
    at_ms: int


class Observer:
    """Presence, condition of the objects, counters of disks, foreground. Of the agent's thread, but
    for `disturb`.

    `tell(text)` hears what went wrong. `scope`: the devices of this host, where another agent looks
    after the whole pool; then they are probed, and no keys are walked.
    """

    def __init__(
        self,
        pool: Pool,
        config: AgentConfig,
        disks: DiskWatch,
        foreground: Foreground,
        tell: Callable[[str], None],
        *,
        threads: bool,
        scope: Callable[[], frozenset[str] | None] = lambda: None,
    ) -> None:
        self._scope = scope
        self._pool, self._config, self._disks, self._tell = pool, config, disks, tell
        self._admin = pool.admin
        self.foreground = foreground
        self.presence = Presence(
            pool.admin,
            every_seconds=config.probe_seconds,
            deadline_seconds=pool.config.settings.device_deadline_seconds,
            scope=scope,
        )
        self._inline = not threads
        self._walk: CallSlot[Condition] = CallSlot("walk", threads=threads)
        self._smart: CallSlot[dict[str, list[DiskSight]]] = CallSlot("smart", threads=threads)
        self._scrub: CallSlot[int] = CallSlot("scrub", threads=threads)
        self.scrub_ended_ms = 0  # of the last scrub of any process, as the devices have it
        self._scrub_seconds = -1e18
        self._blocks: CallSlot[frozenset[str | None]] = CallSlot("blocks", threads=threads)
        self._block_names: tuple[frozenset[str], frozenset[str | None]] | None = None
        self._blocks_of: frozenset[str] = frozenset()
        self.walked: Walked | None = None  # the last one
        self._current = False  # no other has begun since
        self._walking = WalkShape(generation=0, there=frozenset())
        self._walk_seconds = self._smart_seconds = -1e18
        self.disks: dict[str, list[DiskSight]] = {}
        self._lock = threading.Lock()  # guards _disturbed
        self._disturbed = False

    def disturb(self) -> None:
        """The objects have changed: the last walk is not true any more. Any thread."""
        with self._lock:
            self._disturbed = True

    def look(self, now_seconds: float) -> None:
        """See what there is to see. `now_seconds` is monotonic."""
        if self.moved(now_seconds):
            self._admin.refresh()
        self.presence.look(now_seconds)
        if self._silent() & self.presence.back:
            self._admin.refresh()  # a member is back that is not open, or was mounted anew
            self.presence.look(now_seconds)
        self._look_at_disks(now_seconds)
        self._look_at_objects(now_seconds)
        self._look_at_scrubs(now_seconds)
        self._look_at_others(now_seconds)

    def moved(self, now_seconds: float) -> bool:
        """Whether another process has changed the membership. Waits for no device."""
        return self.presence.newest_generation(now_seconds) > self._admin.record.generation

    def seen(self) -> dict[str, Seen]:
        """Open members by id, as they answered."""
        return self.presence.seen()

    def shape(self) -> WalkShape:
        """As it is now."""
        there = frozenset(d for d, found in self.seen().items() if found.answers)
        return WalkShape(generation=self._admin.record.generation, there=there)

    def condition(self) -> Condition | None:
        """Of the objects; None unless it is known of the devices that are there now."""
        with self._lock:
            disturbed = self._disturbed
        walked = self.walked
        if walked is None or disturbed or not self._current or walked.shape != self.shape():
            return None
        return walked.condition

    def silent(self) -> frozenset[str]:
        """Open members that do not answer."""
        return frozenset(d for d, found in self.seen().items() if not found.answers)

    def known(self) -> Condition | None:
        """What is certain of the objects now: of the last walk, less what has left since; None
        before the first one."""
        walked = self.walked
        return None if walked is None else self._admin.as_of_now(walked.condition, self.silent())

    def _silent(self) -> set[str]:
        """Members that are not open or do not answer."""
        places, seen = self._admin.devices.places, self.seen()
        return {
            m.device_id
            for m in self._admin.record.members
            if m.device_id not in places or (m.device_id in seen and not seen[m.device_id].answers)
        }

    def _look_at_objects(self, now_seconds: float) -> None:
        """Walk over the keys now and then, and when the pool has changed."""
        found = self._walk.take()
        if found is not None:  # the pause is counted from its end: a walk may take longer than that
            self._walk_seconds = now_seconds
        if isinstance(found, Condition):
            self.walked = Walked(
                condition=found, shape=self._walking, at_ms=self._admin.clock.wall_ms()
            )
            self._current = True
        elif found is not None:
            self._tell(f"the walk over all keys failed: {found}")
        shape = self.shape()
        with self._lock:
            changed = self._disturbed or shape != self._walking
        due = changed or now_seconds - self._walk_seconds >= self._config.survey_seconds
        if not (due and self._walk.free) or self._scope() is not None:
            return
        with self._lock:
            self._disturbed = False
        self._walk_seconds, self._walking, self._current = now_seconds, shape, False
        silent = self.silent()
        self._walk.start(lambda: self._admin.condition(silent))
        if self._inline:
            self._look_at_objects(now_seconds)

    def _look_at_scrubs(self, now_seconds: float) -> None:
        """When the pool was scrubbed: an operator may have done it."""
        found = self._scrub.take()
        if isinstance(found, int):
            self.scrub_ended_ms = max(found, self.scrub_ended_ms)
        elif found is not None:
            self._tell(f"when the pool was scrubbed cannot be read: {found}")
        if self._scrub.free and now_seconds - self._scrub_seconds >= _SCRUB_SECONDS:
            self._scrub_seconds = now_seconds
            self._scrub.start(self._admin.last_scrub_ms)
            if self._inline:
                self._look_at_scrubs(now_seconds)

    def _look_at_disks(self, now_seconds: float) -> None:
        """Read the disks' own counters; only the thread that asks can block."""
        found = self._smart.take()
        if isinstance(found, dict):
            self.disks = found
        elif found is not None:
            self._tell(f"the disks' counters cannot be read: {found}")
        every = self._config.smart_hours * 3600
        if self._pool.read_only or not every or not self._smart.free:
            return
        if now_seconds - self._smart_seconds >= every:
            self._smart_seconds = now_seconds
            today = datetime.fromtimestamp(self._admin.clock.wall_ms() / 1000, UTC).date()
            places = dict(self._admin.devices.places)
            self._smart.start(lambda: self._disks.look(places, today.toordinal()))

    def _look_at_others(self, now_seconds: float) -> None:
        """What other processes do to the disks. Which these are is asked once, as stat may hang."""
        names = self._blocks.take()
        if isinstance(names, frozenset):
            self._block_names = (self._blocks_of, names)
        urls = frozenset(self._admin.devices.places.values())
        if self._blocks_of != urls and self._blocks.free:
            self._blocks_of = urls
            self._blocks.start(lambda: frozenset(map(_block_of, urls)))
        known = self._block_names
        blocks = known[1] if known is not None and known[0] == urls else frozenset({None})
        self.foreground.look(blocks, now_seconds)


def _block_of(url: str) -> str | None:
    path = url.removeprefix("file://")
    return None if "://" in path else block_device(path)
