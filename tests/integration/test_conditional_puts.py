"""Conditional puts of processes that are stopped at any moment (PROTOCOL 6, r05)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import count
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from hpstore.errors import (
    HpstoreError,
    ObjectNotFound,
    TooFewDevices,
    TooManyErasures,
    VersionConflict,
)
from hpstore.objects.object_info import ObjectInfo
from hpstore.pool.pool import Pool
from hpstore.testing.memory_pool import FakeClock, Harness
from tests.thorough import LONG
from tests.turns import TurnProcess

HOUR_MS = 3_600_000
CLOCKS = [0, HOUR_MS, -HOUR_MS]
BODIES = {"A": b"a" * 150_000, "B": b"b" * 150_000, "C": b"c" * 150_000}
SMALL = {"A": b"a", "B": b"b", "C": b"c"}


def fresh(path: Path) -> Harness:
    return Harness(path, data=2, parity=1, devices=4, clock=FakeClock())


def held_by(harness: Harness) -> bytes | None:
    with harness.open() as pool:
        try:
            return pool.get("k")
        except ObjectNotFound:
            return None


def stopped_at(
    path: Path, step: int, ahead_ms: int, bodies: dict[str, bytes], *, replaced: bool
) -> tuple[object, object, bytes | None, int]:
    """A is stopped before its operation `step`, B puts as long as it takes, then A goes on."""
    harness = fresh(path)
    token = None
    if replaced:
        with harness.open() as pool:
            token = pool.put("k", b"old").version
    condition = {"if_absent": True} if token is None else {"if_version": token}
    a, b = TurnProcess(harness, ahead_ms=ahead_ms), TurnProcess(harness)
    with closing_all(a, b):
        a.start(lambda pool: pool.put("k", bodies["A"], **condition))
        a.run(step)
        stopped_early = a.running
        b.start(lambda pool: pool.put("k", bodies["B"], **condition))
        b.run()
        a.run()
    found = held_by(harness)
    return a.outcome, b.outcome, found, int(stopped_early)


@contextmanager
def closing_all(*processes: TurnProcess) -> Iterator[None]:
    try:
        yield
    finally:
        for process in processes:
            process.end()


@pytest.mark.parametrize("bodies", [SMALL, BODIES], ids=["copies", "columns"])
@pytest.mark.parametrize("ahead_ms", CLOCKS, ids=["same", "ahead", "behind"])
@pytest.mark.parametrize("replaced", [False, True], ids=["if_absent", "if_version"])
def test_of_two_conditional_puts_one_is_acknowledged_wherever_the_other_was_stopped_rule_6(
    tmp_path: Path, bodies: dict[str, bytes], ahead_ms: int, *, replaced: bool
) -> None:
    """A is stopped before each of its device operations in turn, its clock an hour off or not; B
    takes its claim over. Never are both acknowledged, and what was is what is read.

    The six cases of a kind of body share the operations in CI: each is met with two clocks.
    """
    taken_over = 0
    first = 1 if LONG else 1 + (replaced + CLOCKS.index(ahead_ms)) % 3
    for step in count(first, 1 if LONG else 3):
        path = tmp_path / str(step)
        path.mkdir()
        a, b, found, stopped = stopped_at(path, step, ahead_ms, bodies, replaced=replaced)
        won = [name for name, answer in (("A", a), ("B", b)) if isinstance(answer, ObjectInfo)]
        assert len(won) <= 1, f"both acknowledged, A stopped before operation {step}"
        for answer in (a, b):
            assert isinstance(answer, (ObjectInfo, HpstoreError)), answer
        if won:
            assert found == bodies[won[0]], f"{won} was acknowledged, A stopped before {step}"
        taken_over += won == ["B"]
        if not stopped:
            assert won == ["A"]
            break
    assert taken_over > (5 if LONG else 1)


@hypothesis_settings(
    max_examples=60 if LONG else 20,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    turns=st.lists(st.tuples(st.sampled_from("ABC"), st.integers(1, 25)), max_size=25),
    ahead=st.tuples(*(st.sampled_from([0, HOUR_MS, -HOUR_MS]) for _ in range(3))),
)
def test_conditional_puts_of_three_processes_in_any_order_follow_one_another_rule_6(
    tmp_path_factory: pytest.TempPathFactory, turns: list[tuple[str, int]], ahead: tuple[int, ...]
) -> None:
    """Each puts twice on the version that it reads. No version has two acknowledged successors."""
    harness = fresh(tmp_path_factory.mktemp("turns"))
    with harness.open() as pool:
        first = pool.put("k", b"first").version

    processes = {n: TurnProcess(harness, ahead_ms=ms) for n, ms in zip("ABC", ahead, strict=True)}
    acknowledged: list[tuple[str, str]] = []  # version that was there, version that was put

    def job(pool: Pool, name: str) -> None:
        for _ in range(2):
            try:
                seen = pool.stat("k").version
                made = pool.put("k", BODIES[name], if_version=seen).version
            except HpstoreError:
                continue
            acknowledged.append((seen, made))

    with closing_all(*processes.values()):
        for name, process in processes.items():
            process.start(lambda pool, n=name: job(pool, n))  # type: ignore[misc]
        for name, operations in turns:
            processes[name].run(operations)
        for process in processes.values():
            process.run()
    before = [seen for seen, _ in acknowledged]
    assert len(set(before)) == len(before)
    made = {first, *(new for _, new in acknowledged)}
    with harness.open() as pool:
        found = pool.stat("k").version
    if acknowledged:
        assert found in made - set(before) or found not in made


def test_a_put_that_was_overtaken_says_so_and_leaves_the_winner(tmp_path: Path) -> None:
    """It may have been visible for a time; the message asks for nothing but to look."""
    harness = fresh(tmp_path)
    a, b = TurnProcess(harness), TurnProcess(harness)
    with closing_all(a, b):
        a.start(lambda pool: pool.put("k", BODIES["A"], if_absent=True))
        a.run_to("publish")
        b.start(lambda pool: pool.put("k", BODIES["B"], if_absent=True))
        b.run()
        a.run()
        assert isinstance(b.outcome, ObjectInfo)
        assert isinstance(a.outcome, VersionConflict)
        assert b.clock.elapsed >= 3.0  # it has waited as long as a claim may be silent
    assert held_by(harness) == BODIES["B"]


@pytest.mark.parametrize("bodies", [SMALL, BODIES], ids=["copies", "columns"])
@pytest.mark.parametrize("ahead_ms", [0, HOUR_MS, -HOUR_MS], ids=["same", "ahead", "behind"])
def test_of_two_that_were_both_stopped_after_they_looked_one_is_acknowledged_rule_6(
    tmp_path: Path, bodies: dict[str, bytes], ahead_ms: int
) -> None:
    """B takes over A's claim, looks and is stopped, too; A goes on and finds its version there,
    the newest. B looked before it was: so A is acknowledged by a claim of its own, or not."""
    harness = fresh(tmp_path)
    a, b = TurnProcess(harness, ahead_ms=ahead_ms), TurnProcess(harness)
    with closing_all(a, b):
        for process, body in ((a, bodies["A"]), (b, bodies["B"])):
            process.start(lambda pool, body=body: pool.put("k", body, if_absent=True))  # type: ignore[misc]
            process.run_to("publish")
        a.run()
        b.run()
        answers = {"A": a.outcome, "B": b.outcome}
        won = [name for name, answer in answers.items() if isinstance(answer, ObjectInfo)]
        assert won == ["A"], answers
        assert isinstance(b.outcome, VersionConflict)
    assert held_by(harness) == bodies["A"]


def test_a_claim_is_taken_at_once_when_its_key_is_free(tmp_path: Path) -> None:
    """No waiting between conditional puts that do not meet; a refused one gives its claim back."""
    harness = fresh(tmp_path)
    a = TurnProcess(harness)
    with closing(a.pool) as pool:
        version = pool.put("k", b"1", if_absent=True).version
        for number in range(5):
            with pytest.raises(VersionConflict):
                pool.put("k", b"2", if_absent=True)
            version = pool.put("k", b"%d" % number, if_version=version).version
        assert a.clock.elapsed == 0.0


def left_behind(harness: Harness, pool: Pool) -> str:
    """A first value on a device that was away for the second one, which is away now, all of it."""
    old = pool.put("k", b"old")
    first = min(url for url, _ in harness.columns("k"))
    harness.lose([first])
    pool.put("k", b"new")
    harness.bring_back()
    newer = {url for url, path in harness.columns("k") if old.version not in path}
    assert len(newer) == 2
    assert first not in newer
    harness.lose(newer)
    return old.version


def test_no_condition_holds_while_a_newer_version_may_be_hidden(tmp_path: Path) -> None:
    """More than m devices are away, with all of the version that came after the one they left."""
    harness = Harness(tmp_path, data=1, parity=1, devices=6, clock=FakeClock())
    with harness.open() as pool:
        old = left_behind(harness, pool)
        with pytest.raises(TooManyErasures):
            pool.put("k", b"lost update", if_version=old)
        with pytest.raises(TooManyErasures):
            pool.put("another", b"x", if_absent=True)
        harness.bring_back()
        assert pool.get("k") == b"new"


def test_an_older_version_that_a_device_kept_is_not_served_for_one_that_is_hidden(
    tmp_path: Path,
) -> None:
    """PROTOCOL 7: what is seen of a key may all be where the writer of a newer one could not look.
    What is whole elsewhere is served all the same, and the older one to who asks for it."""
    harness = Harness(tmp_path, data=1, parity=1, devices=6, clock=FakeClock())
    with harness.open() as pool:
        for number in range(20):
            pool.put(f"o{number}", b"%d" % number)
        old = left_behind(harness, pool)
        for read in (pool.get, pool.stat, pool.exists, pool.open):
            with pytest.raises(TooManyErasures, match="may not be the newest"):
                read("k")
        assert pool.get("k", version=old) == b"old"
        assert [(found.version, found.current) for found in pool.versions("k")] == [(old, False)]
        there = []
        for number in range(20):
            try:
                assert pool.get(f"o{number}") == b"%d" % number
                there.append(number)
            except TooManyErasures:
                continue
        assert there  # those with both copies on devices that answer
        harness.bring_back()
        assert pool.get("k") == b"new"
        assert pool.versions("k")[0].current


def test_a_tombstone_that_a_device_kept_does_not_hide_a_later_put(tmp_path: Path) -> None:
    """PROTOCOL 7: the same of deletes."""
    harness = Harness(tmp_path, data=1, parity=1, devices=3, clock=FakeClock())
    with harness.open() as pool:
        pool.put("k", b"first")
        pool.delete("k")
        stones = {url for url, _ in harness.columns("k")}
        lost = min(stones)
        harness.lose([lost])
        pool.put("k", b"again")
        harness.bring_back()
        harness.lose([url for url in harness.devices if url != lost])
        with pytest.raises(TooManyErasures, match="may not be the newest"):
            pool.get("k")
        harness.bring_back()
        assert pool.get("k") == b"again"


def test_nothing_is_written_that_no_reader_could_tell_to_be_the_newest(tmp_path: Path) -> None:
    """PROTOCOL 3: while more than m are unknown a put and a delete are refused, and change nothing;
    devices that are back in between are found before that."""
    clock = FakeClock()
    harness = Harness(tmp_path, data=1, parity=1, devices=6, clock=clock)
    with harness.open() as pool:
        pool.put("k", b"there")
        away = [url for url in harness.devices if url not in {u for u, _ in harness.columns("k")}]
        harness.lose(away[:2])
        before = harness.columns("k")
        with pytest.raises(TooFewDevices, match="cannot be written now: 2 devices"):
            pool.put("k", b"hidden")
        with pytest.raises(TooFewDevices, match="cannot be written now"):
            pool.delete("k")
        assert harness.columns("k") == before
        assert pool.get("k") == b"there"
        harness.bring_back()
        clock.advance(3600)
        pool.put("k", b"seen")
        assert pool.get("k") == b"seen"
