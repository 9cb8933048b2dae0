"""The end of a simulation: every live device answers, one process rebuilds, all must be complete.

Then m devices go, and all objects must still be readable; then the horizon of deletes passes and a
scrub runs, and all must read the same.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from functools import partial

from hpstore.devices.wrappers import SimulatedCrash
from hpstore.errors import HpstoreError, MembershipError, ObjectNotFound
from hpstore.format.placement import placeable
from hpstore.format.records import DeviceState
from hpstore.pool.pool import Pool
from hpstore.testing.simulation.actions import EXPECTED, ActionScene
from hpstore.testing.simulation.oracle import ABSENT, linearizable
from hpstore.testing.simulation.run_history import PREFIX
from hpstore.testing.simulation.schedule import Schedule, Turn
from hpstore.testing.simulation.witness import newest_record, weight
from hpstore.testing.simulation.world import World

REBUILDS = 4  # in a row, until all is whole
SKEW_SECONDS = 4 * 3600.0  # by which clocks were ahead at most: no version is younger then


def end(scene: ActionScene, world: World, schedule: Schedule) -> None:
    """Rebuild and check. Records findings in the scene."""
    world.note("THE END: all devices that live answer")
    world.held.clear()  # what hangs until now never ends
    for process in world.processes:
        process.die()
        process.stuck.clear()
    scene.close_ended()
    for url, device in world.devices.items():
        device.restart()
        device.missing = url in scene.dead
        device.read_only, device.capacity_bytes = False, 1 << 40
    world.now += 60.0
    world.observer.begin(Turn(number=1 << 20, process=-1, action="end"))
    try:
        _heal_and_look(scene, world, schedule)
    except SimulatedCrash:
        raise
    except Exception as error:  # noqa: BLE001 (whatever it is, it is a finding)
        scene.find("unexpected error", f"at the end: {type(error).__name__}: {error}")


def _heal_and_look(scene: ActionScene, world: World, schedule: Schedule) -> None:
    try:
        pool = scene.open(world.observer, "run")
    except EXPECTED as error:
        scene.find("does not open", f"at the end: {type(error).__name__}: {error}")
        return
    if scene.registers.losses:
        with contextlib.suppress(MembershipError):  # they were made again
            pool.admin.reset_registers()
    if pool.admin.record.generation < scene.claims.newest:
        text = f"generation {pool.admin.record.generation} at the end, was {scene.claims.newest}"
        scene.find("older membership", text)
    _replace_dead(scene, world, pool)
    whole = _rebuild(scene, pool)
    if scene.findings:
        return
    values = _read_all(scene, pool, "after the rebuild")
    _check_conditional(scene, values)
    _check_list(scene, pool, values)
    _check_redundancy(scene, pool, values, whole=whole)
    _checkpoints(scene, pool, "after the rebuild")
    pool.close()
    if scene.findings:
        return
    chance = random.Random(schedule.seed)
    _lose_some(scene, world, values, chance, torn=True)
    world.now += schedule.setup.tombstone_seconds + SKEW_SECONDS
    pool = scene.open(world.observer, "run")
    pool.scrub(resume=False)
    _same(scene, _read_all(scene, pool, "after the horizon and a scrub"), values, "the scrub")
    _checkpoints(scene, pool, "after the scrub", garbage=True)
    pool.close()
    if not scene.findings:
        _lose_some(scene, world, values, chance, torn=False)


def _replace_dead(scene: ActionScene, world: World, pool: Pool) -> None:
    """What is gone for good is evicted, and other devices come in its place."""
    view = pool._store.view
    gone = [m for m in pool.admin.record.members if m.device_id in view.missing]
    gone = [m for m in gone if m.url in scene.dead | scene.wiped]
    online = sum(m.state is DeviceState.ONLINE for m in pool.admin.record.members)
    wanted = pool.data + pool.parity - online + len(gone)
    for number in range(max(wanted, len(gone))):
        _forced(world, partial(pool.add_device, f"memory://new{number}"))
    for member in gone:
        try:
            _forced(world, partial(pool.evict, member.device_id))
        except MembershipError as error:
            world.note(f"evict of {member.url} refused: {error}")
            pool.rebuild(include_missing=True, everything=True)
            try:
                _forced(world, partial(pool.evict, member.device_id))
            except MembershipError as again:
                scene.find("does not heal", f"a dead device cannot be evicted: {again}")
                return


def _forced(world: World, change: Callable[..., object]) -> None:
    """A membership change; forced where only the number of devices that answer is short."""
    try:
        change()
    except MembershipError as error:
        if "a change needs" not in str(error) and "are needed to take" not in str(error):
            raise
        world.note(f"forced: {error}")
        change(force=True)


def _rebuild(scene: ActionScene, pool: Pool) -> bool:
    """Whether all is whole after some rebuilds."""
    if scene.flipped:
        pool.scrub(resume=False)
    for number in range(REBUILDS):
        report = pool.rebuild(include_missing=True, everything=True)
        if report.whole:
            return True
        staying = [m for m in pool.admin.record.members if m.state is DeviceState.ONLINE]
        room = placeable([m.domain for m in staying], pool.admin.record.spread)
        if report.stuck and not report.failed and not report.waiting and room > pool.parity:
            scene.find("does not heal", f"{report.stuck} are stuck; {room} columns have a place")
            return False
        if report.stuck or report.failed:  # failure domains may lack, too: an operator adds one
            pool.add_device(f"memory://spare{number}")
    lost = sorted(report.unreadable.items()) or sorted(report.failed.items())
    scene.find(
        "does not heal",
        f"a rebuild ends with {lost[:2]}, stuck {report.stuck}, waiting {report.waiting}",
    )
    return False


def _read_all(scene: ActionScene, pool: Pool, when: str, *, torn: bool = False) -> dict[str, int]:
    """The value of every key; each must be readable, and right. `torn`: but for those that have
    writes which failed."""
    values = {}
    for key in sorted(scene.histories):
        began = scene.event()
        try:
            data: bytes | None = pool.get(key)
        except ObjectNotFound:
            data = None
        except HpstoreError as error:
            if torn and scene.histories[key].torn:
                continue
            scene.find("not readable", f"{key} {when}: {type(error).__name__}: {error}")
            continue
        values[key] = scene.judge(key, data, began)
        scene.world.note(f"{when}: {key} reads {values[key]}")
        scene.histories[key].certain(values[key], scene.event())
    return values


def _check_conditional(scene: ActionScene, values: dict[str, int]) -> None:
    for key, history in scene.histories.items():
        writes = [w for w in history.writes if w.value != ABSENT or w.expected is not None]
        if (
            key.startswith("c")
            and key not in scene.spoiled
            and not linearizable(writes, values.get(key))
        ):
            told = "; ".join(f"{w} on {w.expected}" for w in writes if not w.refused)
            scene.find("not linearizable", f"{key} ends as {values.get(key)}: {told}")


def _check_list(scene: ActionScene, pool: Pool, values: dict[str, int]) -> None:
    found = [key for key in pool.list(certain=True) if not key.startswith(f"{PREFIX}/")]
    there = sorted(key for key, value in values.items() if value != ABSENT)
    if found != there:
        scene.find("wrong list", f"{found}, and {there} can be read")


def _check_redundancy(
    scene: ActionScene, pool: Pool, values: dict[str, int], *, whole: bool
) -> None:
    for key, value in values.items():
        if value == ABSENT or not whole:
            continue
        info = pool.stat(key)
        if info.losses_tolerated < pool.parity:
            scene.find("no redundancy", f"{key} survives {info.losses_tolerated} after a rebuild")


def _lose_some(
    scene: ActionScene, world: World, values: dict[str, int], chance: random.Random, *, torn: bool
) -> None:
    """m devices go: all must be read. With `torn`, columns of torn puts may lie around, which with
    m devices gone may have been acknowledged for all a read can see: it may refuse (rule 7)."""
    answering = sorted(url for url, d in world.devices.items() if not d.missing)
    gone = chance.sample(answering, min(world.setup.parity, len(answering)))
    if (world.setup.domains or world.setup.hosts) and chance.random() < 0.5:
        gone = _domains_lost(world, chance) or gone
    for url in gone:
        world.devices[url].missing = True
    world.note(f"gone: {gone}")
    try:
        with scene.open(world.observer, "run", read_only=True) as pool:
            found = _read_all(scene, pool, f"without {gone}", torn=torn)
            _same(scene, found, {key: values[key] for key in found}, f"the loss of {gone}")
            if not torn:
                _checkpoints(scene, pool, f"without {gone}")
    except EXPECTED as error:
        scene.find("does not open", f"without {gone}: {type(error).__name__}: {error}")
    for url in gone:
        world.devices[url].missing = False


def _domains_lost(world: World, chance: random.Random) -> list[str]:
    """Members of as many whole failure domains as weigh at most m (PROTOCOL 14)."""
    record = newest_record(world.devices)
    if record is None or record.spread is None:
        return []
    gone: list[str] = []
    domains = sorted({member.domain for member in record.members})
    for domain in chance.sample(domains, len(domains)):
        more = [m.url for m in record.members if m.domain == domain]
        if weight(world.devices, [*gone, *more]) <= record.parity:
            gone += more
    return gone


def _checkpoints(scene: ActionScene, pool: Pool, when: str, *, garbage: bool = False) -> None:
    if not scene.run_history.saves or scene.findings:
        return
    from hpstore.testing.simulation import checkpoint_turns  # which needs torch

    checkpoint_turns.check_at_end(scene, pool, when)
    if garbage and not scene.findings:
        checkpoint_turns.check_nothing_left(scene, pool)


def _same(scene: ActionScene, found: dict[str, int], values: dict[str, int], after: str) -> None:
    for key, value in values.items():
        if key in scene.spoiled:
            continue
        if found.get(key) != value and not scene.findings:
            scene.find("wrong version", f"{key} reads {found.get(key)} after {after}, was {value}")
