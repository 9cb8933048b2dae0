"""What processes do in a turn: calls on real pools, whose answers go to the oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from hpstore.config import PoolConfig, Settings, load_config
from hpstore.devices.base import Device
from hpstore.devices.wrappers import SimulatedCrash
from hpstore.errors import HpstoreError, MembershipError, ObjectNotFound, VersionConflict
from hpstore.format.keys import object_directory
from hpstore.pool.pool import Pool
from hpstore.testing.simulation.host_claims import HostClaims
from hpstore.testing.simulation.machinery import SimulatedDevice
from hpstore.testing.simulation.oracle import ABSENT, OPEN, KeyHistory, Write
from hpstore.testing.simulation.run_history import RunHistory
from hpstore.testing.simulation.schedule import Setup, Turn
from hpstore.testing.simulation.simulated_registers import RegisterStore
from hpstore.testing.simulation.snapshots import Snapshot
from hpstore.testing.simulation.witness import newest_readable, not_durable, unreadable, weight
from hpstore.testing.simulation.world import Endless, Process, World
from hpstore.units import MIB

EXPECTED = (HpstoreError, OSError)  # a pool may raise these for good reasons


def content(value: int, size: int) -> bytes:
    """The bytes of a value."""
    word = b"%015d\n" % value
    return (word * (size // len(word) + 1))[:size]


def settings_of(setup: Setup, run_directory: str) -> Settings:
    """Of every process; the defaults in seconds unless the setup differs."""
    return Settings(
        memory_bytes=16 * MIB,
        run_directory=run_directory,
        recycle_bytes=setup.recycle_bytes,
        put_deadline_seconds=setup.put_deadline_seconds,
        tombstone_seconds=setup.tombstone_seconds,
        health=False,
    )


@dataclass(slots=True)
class Finding:
    """Something that must not happen."""

    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


class ActionScene:
    """What all actions of a simulation share."""

    def __init__(self, world: World, config: PoolConfig, directory: Path, parity: int) -> None:
        self.world, self.config, self.directory = world, config, directory
        self.config_parity = parity
        self.histories: dict[str, KeyHistory] = {}
        self.sizes: dict[int, int] = {}  # of values
        self.findings: list[Finding] = []
        self.unended: list[tuple[Process, Write]] = []
        self.lost: set[str] = set()  # devices whose content is gone, wholly or partly, for good
        self.flipped: set[str] = set()
        self.dead: set[str] = set()  # devices that never come back
        self.wiped: set[str] = set()
        self.values = 0
        self.run_history = RunHistory(keep_last=world.setup.keep_last)
        self.run_bytes = 5_000  # of what a step saves
        self.snapshots: dict[str, Snapshot] = {}
        self.stale: set[str] = set()  # devices that went back to one
        self.spoiled: set[str] = set()  # keys of which nothing but their bytes is promised
        self.registers = RegisterStore(world)
        self.claims = HostClaims()

    def spoil(self, swept: bool) -> None:
        """A device went back to a snapshot. Where a sweep came in between (`swept`), tombstones are
        gone that would speak against what the device holds again (PROTOCOL 12)."""
        if swept:
            self.spoiled |= {k for k, h in self.histories.items() if h.torn or h.deletes}

    def history(self, key: str) -> KeyHistory:
        """Of a key."""
        return self.histories.setdefault(key, KeyHistory(key))

    def find(self, kind: str, text: str) -> None:
        """Note what must not happen."""
        self.findings.append(Finding(kind, text))
        self.world.note(f"FINDING {kind}: {text}")

    def event(self) -> int:
        """The next moment."""
        self.world.steps += 1
        return self.world.steps

    def open(self, process: Process, place: str, *, read_only: bool = False) -> Pool:
        """A pool of one process."""
        known = load_config(self.config.path).devices
        settings = replace(self.config.settings, run_directory=str(self.directory / place))
        config = replace(self.config, devices=known, settings=settings)

        def opener(url: str) -> Device:
            return SimulatedDevice(self.world.device(url), process)

        return Pool(config, opener=opener, clock=process.clock, threads=False, read_only=read_only)

    def close_ended(self) -> None:
        """Writes whose late calls have all ended have ended."""
        for process, write in list(self.unended):
            if not sum(process.stuck.values()):
                write.ended = self.event()
                self.unended.remove((process, write))

    def away(self) -> set[str]:
        """Devices that do not answer now, or not every process."""
        missing = {url for url, device in self.world.devices.items() if device.missing}
        return missing | self.world.network.troubled(self.world.devices)

    def may_lose(self, url: str) -> bool:
        """Whether what a device holds may be lost for good; it is then counted as lost.

        Within what parity allows: at most m devices since all was whole, and nothing that can be
        read now becomes unreadable.
        """
        lost = self.lost | {url}
        if len(lost) > self.config_parity:
            return False
        if unreadable(self.world.devices, without=lost, before=self.lost):
            return False
        self.lost.add(url)
        self.world.trouble.add(url)
        return True

    # --- reads ------------------------------------------------------------------------------

    def judge(self, key: str, data: bytes | None, began: int, *, blind: bool = False) -> int:
        """Hold a read that ended now against the history; returns the value. `blind`: more devices
        went back in time or are unknown than are survived, so it may be older than another one."""
        self.close_ended()
        value = ABSENT
        if data is not None:
            word = data[:15]
            value = int(word) if word.isdigit() else -1
            if data != content(value, self.sizes.get(value, -1)):
                self.find("wrong bytes", f"{key}: {data[:40]!r}... of {len(data)} bytes")
                return -1
        problem = (
            None
            if blind or key in self.spoiled
            else self.history(key).judge(value, began, self.event())
        )
        if problem is not None:
            self.find("wrong version", problem)
        return value


class Client:
    """One process of the simulation and its pool."""

    def __init__(
        self,
        scene: ActionScene,
        process: Process,
        place: str,
        train: Callable[[Client, Turn], None],
    ) -> None:
        """`train`: the actions that are none of the pool's."""
        self.scene, self.process, self.place, self._train = scene, process, place, train
        self.pool: Pool | None = None
        self.checkpointer: object = None  # of that pool
        self.agent: object = None  # of that pool
        self.seen: dict[str, tuple[str, int]] = {}  # key -> version and value, as it last knew

    def run(self, turn: Turn) -> None:
        """One operation. On the process's fiber."""
        scene = self.scene
        began = scene.event()
        try:
            if self.pool is None:
                self.checkpointer = self.agent = None
                newest = scene.claims.newest
                self.pool = self._open(turn)
                scene.claims.opened(scene, self.pool.admin.record, newest)
            ACTIONS.get(turn.action, self._train)(self, turn)
            if turn.action in CHANGES:
                scene.claims.changed(scene, self.pool.admin.record)
            scene.world.note(f"{self.process.name} has done {turn.action} {turn.key}")
        except SimulatedCrash:
            scene.world.note(f"{self.process.name} died in {turn.action}")
            self.pool = None
        except Endless as error:
            scene.find("endless", f"{turn.action}: {error}")
            self.process.die()
            self.pool = None
        except EXPECTED as error:
            scene.world.note(f"{self.process.name} {turn.action}: {type(error).__name__}: {error}")
            self._not_allowed(turn, error)
        except Exception as error:  # noqa: BLE001 (whatever it is, it is a finding)
            scene.find("unexpected error", f"{turn.action}: {type(error).__name__}: {error}")
        finally:
            self._write_ended(began)
            if self.pool is not None:
                scene.claims.saw(scene, self.process, self.pool.admin.record)

    def _write_ended(self, began: int) -> None:
        """The write of this turn, if any, has ended, but for calls that hang."""
        for history in self.scene.histories.values():
            for write in history.writes:
                if write.called > began and write.ended == OPEN and write.who == self.who:
                    self.scene.unended.append((self.process, write))
        self.scene.close_ended()

    @property
    def who(self) -> str:
        turn = self.process.turn
        """Who does what it does now."""
        return f"{self.process.name} in turn {turn.number if turn else -1}"

    def _open(self, turn: Turn) -> Pool:
        try:
            return self.scene.open(self.process, self.place)
        except EXPECTED as error:
            scene = self.scene
            bad = scene.away() | scene.lost
            if weight(scene.world.devices, bad) <= scene.config_parity and not turn.faults:
                scene.find("does not open", f"{type(error).__name__}: {error}")
            raise

    def _not_allowed(self, turn: Turn, error: Exception) -> None:
        """Whether an error is one that must not come now."""
        scene = self.scene
        if turn.action != "get" or turn.faults or isinstance(error, ObjectNotFound):
            return
        history, parity = scene.history(turn.key), scene.config_parity
        bad = weight(scene.world.devices, scene.world.trouble | scene.away())
        if history.readable(parity) and bad <= parity:
            scene.find("not readable", f"get of {turn.key}: {type(error).__name__}: {error}")

    # --- actions ----------------------------------------------------------------------------

    @property
    def open_pool(self) -> Pool:
        """The pool, open."""
        assert self.pool is not None
        return self.pool

    @property
    def blind(self) -> bool:
        """Whether more than is survived, by weight, is unknown to this turn or went back to a
        snapshot, which the pool does not know: what it serves then may be older."""
        if not self.scene.stale:
            return False
        view = self.open_pool._store.view
        bad = self.process.silent | self.scene.stale
        silent = {m.device_id for m in view.members() if m.url in bad}
        record = view.record
        return record.weight(view.missing | silent | record.unhealed()) > record.parity

    def _write(self, turn: Turn, value: int, expected: int | None) -> Write:
        write = Write(value, self.scene.event(), expected=expected, who=self.who)
        self.scene.history(turn.key).writes.append(write)
        return write

    def put(self, turn: Turn, expected: int | None = None, version: str | None = None) -> None:
        """Put a new value, if the version is still `version`; `expected`: its value."""
        scene = self.scene
        scene.values += 1
        value = scene.values
        scene.sizes[value] = max(turn.size, 16)
        write = self._write(turn, value, expected)
        published, lost_before = self.process.counts["publish"], set(scene.lost)
        try:
            info = self.open_pool.put(
                turn.key,
                content(value, scene.sizes[value]),
                if_absent=expected == ABSENT and version is None,
                if_version=version,
            )
        except VersionConflict:
            write.refused = self.process.counts["publish"] == published
            raise
        except EXPECTED:
            write.refused = self.process.counts["publish"] == published
            raise
        write.acknowledged = write.ended = scene.event()
        if expected is not None and self.blind:
            scene.spoiled.add(turn.key)  # it may have met its condition with an older version
        write.tolerates = info.losses_tolerated
        self.seen[turn.key] = (info.version, value)
        problem = not_durable(scene.world.devices, scene.lost - lost_before, turn.key, info)
        if problem:
            scene.find("not durable", f"value {value} of {turn.key}: {problem}")
        scene.world.note(f"{self.process.name} put of {turn.key} value {value} acknowledged")

    def put_absent(self, turn: Turn) -> None:
        """A put that must find nothing."""
        self.put(turn, expected=ABSENT)

    def put_version(self, turn: Turn) -> None:
        """A put on what this process has last seen; it looks where it has not."""
        if turn.key not in self.seen:
            self.look(turn)
        if turn.key not in self.seen:
            self.put(turn, expected=ABSENT)
            return
        version, value = self.seen[turn.key]
        try:
            self.put(turn, expected=value, version=version)
        except VersionConflict:
            self.seen.pop(turn.key, None)
            raise

    def look(self, turn: Turn) -> None:
        """Read a value with its version, where nothing came between."""
        began = self.scene.event()
        try:
            with self.open_pool.open(turn.key) as reader:
                data = bytearray(reader.size)
                version = reader.version
                reader.read_into(data)
                same = reader.version == version
        except ObjectNotFound:
            self.scene.judge(turn.key, None, began)
            return
        value = self.scene.judge(turn.key, bytes(data), began, blind=self.blind)
        if same:
            self.seen[turn.key] = (version, value)

    def get(self, turn: Turn) -> None:
        """Read a key."""
        began, deleted = self.scene.event(), False
        try:
            data: bytes | None = self.open_pool.get(turn.key)
        except ObjectNotFound as error:
            data, deleted = None, "was deleted" in str(error)
        blind = self.blind and (data is not None or deleted or bool(self.scene.stale))
        value = self.scene.judge(turn.key, data, began, blind=blind)
        self.scene.world.note(f"{self.process.name} read {turn.key}: {value}")

    def delete(self, turn: Turn) -> None:
        """Delete a key."""
        began = self.scene.event()
        write = self._write(turn, ABSENT, None)
        published = self.process.counts["publish"]
        try:
            self.open_pool.delete(turn.key)
        except ObjectNotFound:
            write.refused = self.process.counts["publish"] == published
            write.ended = self.scene.event()
            blind = self.blind and bool(self.scene.stale)
            self.scene.judge(turn.key, None, began, blind=blind)
            return
        except EXPECTED:
            write.refused = self.process.counts["publish"] == published
            raise
        write.acknowledged = write.ended = self.scene.event()

    def settle(self, turn: Turn) -> None:
        """Settle a key: what is read then stays."""
        scene, history = self.scene, self.scene.history(turn.key)
        self.open_pool.admin.settle(turn.key)
        quiet = history.quiet
        began = scene.event()
        try:
            data = self.open_pool.get(turn.key)
        except ObjectNotFound:
            return
        value = scene.judge(turn.key, data, began, blind=self.blind)
        if quiet and history.quiet and not self.blind:
            history.certain(value, scene.event())

    def list(self, turn: Turn) -> None:
        """List; what must be there is."""
        scene = self.scene
        scene.close_ended()
        sure = [k for k, h in scene.histories.items() if h.readable(scene.config_parity)]
        sure = [k for k in sure if scene.histories[k].newest.value]
        found = self.open_pool.list(certain=True)
        for key in sure:
            if key not in found and scene.histories[key].quiet:
                scene.find("not listed", f"{key} is not in {found}")

    def stat(self, turn: Turn) -> None:
        """Look at a key's facts."""
        try:
            info = self.open_pool.stat(turn.key)
        except ObjectNotFound:
            return
        self.seen.pop(turn.key, None)
        assert info.version

    def evict(self, turn: Turn) -> None:
        """Evict a device, if what is lost for good allows it."""
        url = self._url(turn)
        if self.scene.flipped and len(self.scene.lost | {url}) > self.scene.config_parity:
            return  # names do not show what is damaged
        self.scene.world.trouble.add(url)
        steady = not turn.faults and all(h.quiet for h in self.scene.histories.values())
        before = newest_readable(self.scene.world.devices, torn_deletes=False)
        if url in self.scene.away():  # it may have the one copy of a put that failed (PROTOCOL 7)
            torn = {object_directory(k) for k, h in self.scene.histories.items() if h.torn}
            before = {key: version for key, version in before.items() if key not in torn}
        try:
            self.open_pool.evict(url)
        except MembershipError as error:
            if "too few" in str(error):  # some devices have it: it may come to be
                self.scene.lost.add(url)
            raise
        except BaseException:
            self.scene.lost.add(url)
            raise
        self.scene.lost.add(url)
        after = newest_readable(self.scene.world.devices)
        needed = sorted(k for k, v in before.items() if k not in after or after[k] < v)
        if needed and after and steady:
            self.scene.find("needed device evicted", f"{url} had columns of {needed}")

    def drain(self, turn: Turn) -> None:
        """Move all off a device."""
        url = self._url(turn)
        if self.scene.flipped and len(self.scene.lost | {url}) > self.scene.config_parity:
            return
        self.scene.world.trouble.add(url)
        self.open_pool.drain(url)

    def begin_drain(self, turn: Turn) -> None:
        """Put no more on a device."""
        self.open_pool.admin.devices.begin_drain(self._url(turn))

    def add(self, turn: Turn) -> None:
        """Add a device."""
        url, network = self._url(turn), self.scene.world.network
        self.open_pool.add_device(url, f"host-{network.host_of(url)}" if network.count else None)

    def readmit(self, turn: Turn) -> None:
        """Take a device back."""
        out = sorted(self.open_pool.admin.record.evicted, key=lambda member: member.url)
        self.open_pool.readmit(out[turn.device % len(out)].url if out else self._url(turn))

    def _url(self, turn: Turn) -> str:
        return f"memory://d{turn.device}"

    def rebuild(self, turn: Turn) -> None:
        """Rebuild all objects."""
        report = self.open_pool.rebuild(include_missing=turn.order % 2 == 1)
        pool, scene = self.open_pool, self.scene
        busy = any(not history.quiet for history in scene.histories.values())
        if report.whole and not pool.admin.record.unhealed() and not busy:
            members = {m.url for m in pool.admin.record.members}
            scene.lost = {u for u in scene.lost - scene.stale if u in members} | scene.flipped
            scene.stale.clear()
            scene.world.trouble = set(scene.lost)

    def scrub(self, turn: Turn) -> None:
        """Verify all."""
        self.open_pool.scrub(resume=turn.order % 2 == 0)

    def rebalance(self, turn: Turn) -> None:
        """Even out."""
        self.open_pool.admin.rebalance(spread=0.01)

    def reopen(self, turn: Turn) -> None:
        """Close the pool; the next turn opens it."""
        self.open_pool.close()
        self.pool = None

    def refresh(self, turn: Turn) -> None:
        """Look at the membership."""
        self.open_pool.admin.refresh()


CHANGES = frozenset({"evict", "begin_drain", "add", "readmit", "evict_host", "reset_registers"})
ACTIONS: dict[str, Callable[[Client, Turn], None]] = {
    name: getattr(Client, name)
    for name in (
        "put",
        "put_absent",
        "put_version",
        "get",
        "delete",
        "settle",
        "list",
        "stat",
        "evict",
        "drain",
        "begin_drain",
        "add",
        "readmit",
        "rebuild",
        "scrub",
        "rebalance",
        "reopen",
        "refresh",
    )
}
