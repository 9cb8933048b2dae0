"""Healing of what its owner soon deletes: last, or not at all; never at the cost of what stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpstore.agent import AgentConfig
from hpstore.agent.status_page import render
from hpstore.errors import DeviceError, IntegrityError
from hpstore.format.records import seal, unseal
from hpstore.maintenance.deferred_repair import Expiry, note_key
from hpstore.maintenance.rebuild import Progress, RebuildReport, put_last
from hpstore.maintenance.repair_object import Repair, repair_object
from hpstore.objects.context import PoolContext
from hpstore.pool.pool import Pool
from hpstore.testing.memory_pool import FakeClock, Harness
from tests.unit.tended import Tended

OLD, NEW, DATA = "run/step-1/segment", "run/step-2/segment", "x/data"
BODIES = {OLD: b"o" * 400_000, NEW: b"n" * 400_000, DATA: b"d" * 600_000}
BYTES_PER_SECOND = 100_000.0
MINUTE = 60_000


class Slowly:
    """A pace at which so many bytes take a second, by a clock that stands still otherwise."""

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock

    def __call__(self, nbytes: int) -> None:
        self._clock.advance(nbytes / BYTES_PER_SECOND)

    def go_on(self) -> bool:
        return True


class Expiring:
    """A pool of 2+2 on five devices with an old and a new step and data; a note says which goes."""

    def __init__(self, directory: Path) -> None:
        self.clock = FakeClock()
        self.harness = Harness(directory, data=2, parity=2, devices=5, clock=self.clock)
        with self.harness.open() as pool:
            for key, body in BODIES.items():
                pool.put(key, body)

    def note(self, pool: Pool, *, after_ms: int, limit_ms: int = 10 * MINUTE) -> None:
        """The old step goes in so many milliseconds."""
        now = self.clock.wall_ms()
        made = Expiry(
            reason="step 1 goes",
            sizes={OLD: len(BODIES[OLD])},
            instead=(NEW,),
            expected_ms=now + after_ms,
            limit_ms=now + limit_ms,
        )
        pool.put(note_key("run"), made.encode())

    def without(self, count: int = 1) -> None:
        """So many devices that have columns of all three are lost and given up."""
        urls = sorted(set.intersection(*({u for u, _ in self.harness.columns(k)} for k in BODIES)))
        self.harness.lose(urls[:count])
        with self.harness.open() as pool:
            for url in urls[:count]:
                pool.evict(url, force=True)

    def rebuild(self, *, everything: bool = False) -> tuple[RebuildReport, list[str]]:
        """What it reports, and the order in which it worked."""
        order: list[str] = []

        def step(progress: Progress) -> None:
            order.append(progress.key)

        with self.harness.open() as pool:
            report = pool.admin.rebuild(
                pace=Slowly(self.clock), progress=step, everything=everything
            )
        return report, order

    def spare(self, key: str) -> int:
        with self.harness.open(read_only=True) as pool:
            return pool.stat(key).spare_columns


@pytest.fixture
def expiring(tmp_path: Path) -> Expiring:
    return Expiring(tmp_path)


def test_what_goes_soon_comes_last_and_is_put_off(expiring: Expiring) -> None:
    """It would be deleted before it were whole: the others are healed, it is left, and told why."""
    with expiring.harness.open() as pool:
        expiring.note(pool, after_ms=1)
    expiring.without(1)
    before = expiring.harness.columns(OLD)
    report, order = expiring.rebuild()
    assert order[-1] == OLD
    assert sum(report.put_off.values()) == 1
    (why,) = report.put_off
    assert why.startswith("step 1 goes, expected ")
    assert "healed if it is still there" in why
    assert not report.whole
    assert not report.failed
    assert expiring.harness.columns(OLD) == before
    assert expiring.spare(OLD) == 1
    assert expiring.spare(NEW) == expiring.spare(DATA) == 2


def test_what_is_put_off_keeps_an_evicted_device_from_counting_as_made_up_for(
    expiring: Expiring,
) -> None:
    """PROTOCOL 7: a column of it may be there still; with `everything` it is healed and made up."""
    with expiring.harness.open() as pool:
        expiring.note(pool, after_ms=1)
    expiring.without(1)
    expiring.rebuild()
    with expiring.harness.open(read_only=True) as pool:
        assert pool.admin.record.unhealed()
        assert pool.status().expiring == {"step 1 goes": 1}
    report, _ = expiring.rebuild(everything=True)
    assert report.whole
    assert expiring.spare(OLD) == 2
    with expiring.harness.open(read_only=True) as pool:
        assert not pool.admin.record.unhealed()
        assert pool.status().expiring == {}


def test_what_would_be_whole_in_time_is_healed_last(expiring: Expiring) -> None:
    """DESIGN 3: skipped is only what retention deletes before it would finish."""
    with expiring.harness.open() as pool:
        expiring.note(pool, after_ms=5 * MINUTE)
    expiring.without(1)
    report, order = expiring.rebuild()
    assert order[-1] == OLD
    assert report.whole
    assert expiring.spare(OLD) == 2


def test_what_can_lose_nothing_more_is_healed(expiring: Expiring) -> None:
    """The last but one good checkpoint is not given away: late, but it is healed."""
    with expiring.harness.open() as pool:
        expiring.note(pool, after_ms=1)
    expiring.without(2)
    assert expiring.spare(OLD) == 0
    report, order = expiring.rebuild()
    assert order[-1] == OLD
    assert not report.put_off
    assert expiring.spare(OLD) == 2


def test_nothing_is_put_off_while_what_replaces_it_is_not_whole(
    expiring: Expiring, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newer step could not be healed this time: the older one is."""
    with expiring.harness.open() as pool:
        expiring.note(pool, after_ms=1)
    expiring.without(1)
    real = repair_object

    def failing(store: PoolContext, key: str, **words: Any) -> Repair:
        if key == NEW:
            raise DeviceError("not now")
        return real(store, key, **words)

    monkeypatch.setattr("hpstore.maintenance.repair_runner.repair_object", failing)
    report, order = expiring.rebuild()
    assert set(report.failed) == {NEW}
    assert order[-1] == OLD
    assert not report.put_off
    assert expiring.spare(OLD) == 2


def test_the_only_good_checkpoint_is_healed_in_its_turn(expiring: Expiring) -> None:
    """The newer step cannot be read: the note counts for nothing, not even for the order."""
    with expiring.harness.open() as pool:
        expiring.note(pool, after_ms=1)
    expiring.without(1)
    for url, path in expiring.harness.columns(NEW)[1:]:
        del expiring.harness.devices[url].files[path]
    report, order = expiring.rebuild()
    assert not report.put_off
    assert order.index(OLD) < order.index(DATA)
    assert expiring.spare(OLD) == 2


def test_past_its_limit_a_note_is_not_believed(expiring: Expiring) -> None:
    """The save that should have come has not: healed like any other, the most endangered first."""
    with expiring.harness.open() as pool:
        expiring.note(pool, after_ms=1, limit_ms=MINUTE)
    expiring.without(1)
    expiring.clock.advance(61)
    report, order = expiring.rebuild()
    assert order.index(OLD) < order.index(DATA)
    assert report.whole
    assert expiring.spare(OLD) == 2


def test_an_object_that_only_has_the_name_of_a_note_is_left_alone(expiring: Expiring) -> None:
    """Counted; the rebuild goes on."""
    with expiring.harness.open() as pool:
        pool.put("run/expiring", b"mine")
        pool.put("large/expiring", bytes(300_000))
    expiring.without(1)
    with expiring.harness.open() as pool:
        assert pool.rebuild().whole
        assert pool.metrics.snapshot()["expiry_note_ignored_total"] == 2
        assert pool.get("run/expiring") == b"mine"


def test_a_note_says_nothing_of_others_objects() -> None:
    """It is refused: a run's note cannot put off another's healing."""
    note = Expiry(reason="r", sizes={"run/a": 1}, instead=("run/b",), expected_ms=1, limit_ms=2)
    assert Expiry.decode(note.encode(), key="run/expiring") == note
    with pytest.raises(IntegrityError, match="not under 'other/'"):
        Expiry.decode(note.encode(), key="other/expiring")
    with pytest.raises(IntegrityError, match="not under 'ru/'"):
        Expiry.decode(note.encode(), key="ru/expiring")


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b"\xff", b'{"digest": "x"}'])
def test_a_damaged_note_is_refused(body: bytes) -> None:
    """As any record."""
    with pytest.raises(IntegrityError):
        Expiry.decode(body, key="run/expiring")


@pytest.mark.parametrize(
    "change",
    [
        {"expected_ms": 1 << 63},
        {"limit_ms": -(1 << 62)},
        {"sizes": {"a/x": -1}},
        {"sizes": {"a/x": None}},
        {"sizes": {"a/x": []}},
    ],
)
def test_a_note_of_impossible_numbers_is_refused(change: dict[str, object]) -> None:
    """It would stop the healing of a whole pool. (Case t20_expiring.)"""
    note = Expiry(reason="r", sizes={"a/x": 1}, instead=(), expected_ms=1, limit_ms=2)
    body = unseal(note.encode(), where="x")
    with pytest.raises(IntegrityError):
        Expiry.decode(seal({**body, **change}), key="a/expiring")


def test_keys_put_last_keep_their_order() -> None:
    """Pure."""
    assert put_last(["c", "a", "b", "d"], {"a", "d"}) == ["c", "b", "a", "d"]


class Tending:
    """An agent that has put an old step off: 15 minutes after a device was lost that has columns of
    both steps. `limit_ms`: of the note, from then on."""

    def __init__(self, directory: Path, *, limit_ms: int) -> None:
        config = AgentConfig(scrub_days=0.0, smart_hours=0.0, heal_bytes_per_second=100_000)
        self.tended = tended = Tended(directory, config=config)
        for key in (OLD, NEW):
            tended.content[key] = BODIES[key]
            tended.pool.put(key, BODIES[key])
        tended.rounds(10)
        both = [{url for url, _ in tended.harness.columns(key)} for key in (OLD, NEW)]
        tended.harness.lose([min(both[0] & both[1])])
        tended.rounds(900, step=45)
        now = tended.clock.wall_ms()
        note = Expiry(
            reason="step 1 goes",
            sizes={OLD: len(BODIES[OLD])},
            instead=(NEW,),
            expected_ms=now,
            limit_ms=now + limit_ms,
        )
        tended.pool.put(note_key("run"), note.encode())
        tended.rounds(300, step=50)
        assert tended.status is not None
        self.status = tended.status

    def put_off(self) -> dict[str, int]:
        assert self.tended.status is not None
        return self.tended.status.put_off


def test_agent_says_what_it_puts_off_and_heals_it_when_it_stays(tmp_path: Path) -> None:
    """On the page, too; after the note's limit it is healed at once, not at the next retry."""
    made = Tending(tmp_path, limit_ms=400_000)
    tended = made.tended
    assert tended.pool.stat(OLD).spare_columns == 1
    assert tended.pool.stat(NEW).spare_columns == 2
    assert list(made.put_off().values()) == [1]
    assert "Put off: 1 objects: step 1 goes" in render(made.status)
    tended.rounds(250, step=50)
    assert tended.pool.stat(OLD).spare_columns == 2
    assert made.put_off() == {}
    assert tended.whole()
    tended.stop()


def test_agent_forgets_what_it_has_put_off_when_it_is_gone(tmp_path: Path) -> None:
    """Retention has removed it: nothing was healed in vain, and nothing is said of it any more."""
    made = Tending(tmp_path, limit_ms=10 * MINUTE)
    tended = made.tended
    assert list(made.put_off().values()) == [1]
    del tended.content[OLD]
    tended.pool.delete(OLD)
    tended.agent.eyes.disturb()
    tended.rounds(20, step=10, work=False)
    assert made.put_off() == {}
    tended.rounds(400, step=20)  # a rebuild confirms that the evicted device is made up for
    assert tended.whole()
    tended.stop()
