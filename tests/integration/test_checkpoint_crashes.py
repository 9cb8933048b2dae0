"""Crash before every device operation of a save, a retention, an overwrite, a delete.

Afterwards each step is wholly old or wholly new, whatever a committed step refers to is there, and
the next checkpointer collects what belongs to nobody.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from hpstore.checkpoint import Checkpointer, SaveOptions
from hpstore.checkpoint.catalog.step_catalog import StepCatalog
from hpstore.checkpoint.catalog.writer_fence import SaveAttempt
from hpstore.checkpoint.format.items import ItemColumns
from hpstore.checkpoint.save.commit import StepCommit
from hpstore.checkpoint.save.save_job import SaveJob
from hpstore.devices.wrappers import CrashCounter, SimulatedCrash
from hpstore.errors import CheckpointError, HpstoreError, RedundancyError
from hpstore.pool.pool import Pool
from hpstore.testing.memory_pool import Harness
from hpstore.units import KIB
from tests.thorough import crash_points

pytestmark = pytest.mark.usefixtures("segments_apart")

T = TypeVar("T")
FROZEN, FREE = 20_000, 18_000  # floats: both large enough to be referenced
CRASHES: dict[str, Callable[[Harness], None]] = {
    "process dies": Harness.restart,
    "power cut": Harness.power_cut,
}
Contents = Mapping[int, frozenset[float | None]]  # by step: what it may hold, None: it is not there


@pytest.fixture(params=list(CRASHES))
def crash(request: pytest.FixtureRequest) -> Callable[[Harness], None]:
    return CRASHES[request.param]


@pytest.fixture(autouse=True)
def the_dead_are_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """The crashed process is this one: say that it died, and let its threads die quietly."""

    def hook(args: threading.ExceptHookArgs) -> None:
        assert issubclass(args.exc_type, SimulatedCrash), args

    def lives(attempt: SaveAttempt, _now_ms: int) -> bool:
        return attempt.pid == 0

    monkeypatch.setattr(threading, "excepthook", hook)
    monkeypatch.setattr("hpstore.checkpoint.catalog.step_catalog.attempt_lives", lives)
    logging.getLogger("hpstore").setLevel(logging.ERROR)


COLD = SaveOptions(warm=False)


def state_of(free: float) -> dict[str, torch.Tensor]:
    """What never changes, and what does."""
    return {"frozen": torch.full((FROZEN,), 7.0), "free": torch.full((FREE,), free)}


def checkpointer(pool: Pool, save: SaveOptions = COLD, **options: Any) -> Checkpointer:
    """As all tests here have it: small, and reading what is stored."""
    return Checkpointer(pool, "run", rng=False, save=save, **options)


def held(ckpt: Checkpointer, step: int) -> float:
    """The number that a step holds; it must be whole."""
    loaded = ckpt.load(step)
    assert torch.equal(loaded["frozen"], torch.full((FROZEN,), 7.0))
    found = float(loaded["free"][0])
    assert torch.equal(loaded["free"], torch.full((FREE,), found))
    return found


def check_contents(pool: Pool, allowed: Contents, *, certain: bool) -> None:
    """Every step holds one of what it may.

    `certain`: nothing that was not acknowledged is about, so nothing may be unclear either.
    """
    ckpt = checkpointer(pool)
    for step, may in allowed.items():
        try:
            found = held(ckpt, step) if step in ckpt.steps() else None
        except RedundancyError:
            assert not certain, f"step {step} cannot be read"
            continue
        assert found in may, f"step {step} holds {found}"


def check_clean(pool: Pool, allowed: Contents, *, and_goes_on: bool) -> None:
    """The newest step restores. The next checkpointer has collected what nobody names, and nothing
    that somebody does."""
    ckpt = checkpointer(pool)
    state = state_of(-1.0)
    step_found = ckpt.restore(state)
    assert step_found == ckpt.steps()[-1]
    assert float(state["free"][0]) in allowed[step_found]
    assert all(None in may for step, may in allowed.items() if step not in ckpt.steps())
    named = {s.key for step in ckpt.steps() for s in ckpt.steps.manifest(step).segments}
    keys = set(pool.list("run"))
    assert {key for key in keys if "/segment-" in key} == named
    assert not [key for key in keys if "/attempts/" in key]
    for step in ckpt.steps():
        assert ckpt.verify(step).ok
    if and_goes_on:
        after = ckpt.steps()[-1] + 1
        ckpt.save(after, state_of(99.0)).result()
        ckpt.wait()
        assert held(ckpt, after) == 99.0


READS = ("open", "read", "list", "stamp", "read_small", "probe")


class BeforeChange(CrashCounter):
    """Dies before a change. A crash before a read leaves what one before the next change does."""

    def around(self, operation: str, nbytes: int, call: Callable[[], T]) -> T:
        if operation in READS and self._operations[0] <= self._crash_at:
            return call()
        return super().around(operation, nbytes, call)


def open_crashing(harness: Harness, crash_at: int) -> tuple[Pool, list[int]]:
    """A pool whose devices die together before change number `crash_at` from now on."""
    changes = [-(10**9)]  # opening does not count
    pool = harness.open(lambda _, device: BeforeChange(device, changes, crash_at))
    changes[0] = 0
    return pool, changes


def crash_everywhere(
    tmp_path: Path,
    before: Callable[[Pool], None],
    act: Callable[[Pool], None],
    crash: Callable[[Harness], None],
    allowed: Contents,
    final: Contents,
) -> int:
    """Run `act` with a crash before change 0, 1, 2, ... of a device until it runs through."""
    harness = Harness(tmp_path, data=2, parity=1, devices=4, unit_bytes=16 * KIB)
    with harness.open() as pool:
        before(pool)
    start = {url: (d.files, d._durable_names) for url, d in harness.devices.items()}
    for crash_at in crash_points():
        for url, device in harness.devices.items():
            device.files, device._durable_names = copy.deepcopy(start[url])
        pool, changes = open_crashing(harness, crash_at)
        try:
            act(pool)
        except SimulatedCrash:
            assert changes[0] > crash_at
        finished = changes[0] <= crash_at
        crash(harness)
        may = final if finished else allowed
        lost = harness.urls[crash_at % len(harness.urls)]
        harness.lose([lost])
        with harness.open(read_only=True) as again:
            check_contents(again, may, certain=finished)
        harness.bring_back()
        with harness.open() as again:
            check_clean(again, may, and_goes_on=finished or crash_at % 15 == 0)
        if finished:
            return crash_at
    raise AssertionError("unreachable")


def save(pool: Pool, *pairs: tuple[int, float], **options: Any) -> None:
    """Save steps one after the other; retention, too, is over at the return."""
    ckpt = checkpointer(pool, **options)
    for step, free in pairs:
        ckpt.save(step, state_of(free)).result()
        ckpt.wait()
    ckpt.close()


def test_a_save_that_refers_to_older_segments_is_old_or_new(
    tmp_path: Path, crash: Callable[[Harness], None]
) -> None:
    """PROTOCOL 18, 19: frozen weights lie in step 1's segment; retention drops the step before."""

    def act(pool: Pool) -> None:
        ckpt = checkpointer(pool, keep_last=1)
        assert ckpt.restore(state_of(0.0)) == 2
        report = ckpt.save(3, state_of(3.0)).result()
        assert report.referenced_bytes == 4 * FROZEN
        ckpt.wait()

    count = crash_everywhere(
        tmp_path,
        lambda pool: save(pool, (1, 1.0), (2, 2.0), keep_last=1),
        act,
        crash,
        {2: frozenset({2.0, None}), 3: frozenset({3.0, None})},
        {2: frozenset({None}), 3: frozenset({3.0})},
    )
    assert count > 50


def test_an_overwrite_of_a_step_is_old_or_new(
    tmp_path: Path, crash: Callable[[Harness], None]
) -> None:
    """save(overwrite=True): the step holds what it held or what it is to hold, never a mixture."""

    def act(pool: Pool) -> None:
        ckpt = checkpointer(pool)
        assert ckpt.restore(state_of(0.0)) == 2
        ckpt.save(2, state_of(20.0), overwrite=True).result()

    crash_everywhere(
        tmp_path,
        lambda pool: save(pool, (1, 1.0), (2, 2.0)),
        act,
        crash,
        {1: frozenset({1.0}), 2: frozenset({2.0, 20.0})},
        {1: frozenset({1.0}), 2: frozenset({20.0})},
    )


def test_a_delete_takes_a_step_and_nothing_that_others_refer_to(
    tmp_path: Path, crash: Callable[[Harness], None]
) -> None:
    """protect(), then delete() of the step whose segment all others refer to."""

    def act(pool: Pool) -> None:
        ckpt = checkpointer(pool)
        ckpt.steps.protect(2, "best")
        ckpt.delete(1)
        with pytest.raises(CheckpointError, match="protected as 'best'"):
            ckpt.delete(2)
        ckpt.steps.unprotect("best")
        ckpt.delete(2)

    kept = frozenset({3.0})
    crash_everywhere(
        tmp_path,
        lambda pool: save(pool, (1, 1.0), (2, 2.0), (3, 3.0)),
        act,
        crash,
        {1: frozenset({1.0, None}), 2: frozenset({2.0, None}), 3: kept},
        {1: frozenset({None}), 2: frozenset({None}), 3: kept},
    )


def test_a_sliced_save_is_old_or_new(tmp_path: Path, crash: Callable[[Harness], None]) -> None:
    """A state larger than the staging memory: slices are written before save() returns."""

    def act(pool: Pool) -> None:
        ckpt = checkpointer(pool, SaveOptions(memory=80 * KIB, reuse=False, warm=False))
        ckpt.save(2, state_of(2.0)).result()
        assert ckpt.counters["sliced_saves_total"] == 1

    crash_everywhere(
        tmp_path,
        lambda pool: save(pool, (1, 1.0)),
        act,
        crash,
        {1: frozenset({1.0}), 2: frozenset({2.0, None})},
        {1: frozenset({1.0}), 2: frozenset({2.0})},
    )


# --- without a crash ------------------------------------------------------------------------


def before_put(pool: Pool, word: str, act: Callable[[], object]) -> None:
    """Once, right before the pool puts a key with `word` in it."""
    original = pool.put

    def put(key: str, *args: Any, **options: Any) -> Any:
        if word in key:
            pool.put = original  # type: ignore[method-assign]
            act()
        return original(key, *args, **options)

    pool.put = put  # type: ignore[method-assign]


@pytest.fixture
def harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Harness:
    """A pool whose saves are all taken for alive."""
    monkeypatch.setattr("hpstore.checkpoint.catalog.step_catalog.attempt_lives", lambda *_: True)
    return Harness(tmp_path, data=2, parity=1, devices=4, unit_bytes=16 * KIB)


@pytest.mark.parametrize("word", ["segment", "manifest"])
def test_what_a_living_save_refers_to_is_never_removed(harness: Harness, word: str) -> None:
    """PROTOCOL 18: delete and collect at any moment of a save that refers to what is deleted."""
    with harness.open() as pool, harness.open() as other:
        ckpt = checkpointer(pool)
        ckpt.save(1, state_of(1.0)).result()
        ckpt.wait()

        def act() -> None:
            StepCatalog(other, "run").delete(1)
            checkpointer(other)  # which collects garbage

        before_put(pool, word, act)
        assert ckpt.save(2, state_of(2.0)).result().referenced_bytes == 4 * FROZEN
        ckpt.close()
        assert ckpt.steps() == [2]
        assert ckpt.verify(2).ok
        assert held(checkpointer(other), 2) == 2.0


def test_a_step_that_was_deleted_since_is_not_referred_to(harness: Harness) -> None:
    """Somebody deletes the step before between two saves: the next one writes everything."""
    with harness.open() as pool, harness.open() as other:
        ckpt = checkpointer(pool)
        ckpt.save(1, state_of(1.0)).result()
        ckpt.wait()
        StepCatalog(other, "run").delete(1)
        assert ckpt.save(2, state_of(2.0)).result().referenced_bytes == 0
        ckpt.close()
        assert held(checkpointer(other), 2) == 2.0


@pytest.mark.parametrize("lost", ["frozen", "free"])
def test_a_save_whose_results_do_not_cover_the_plan_is_refused(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """One item's result is lost on the way: the save fails, nothing of it is left."""
    original = ItemColumns.add

    def add(self: ItemColumns, items: Any, **options: Any) -> None:
        kept = [n for n, item in enumerate(items) if item.name != lost]
        if options.get("digests") is not None:
            options["digests"] = [options["digests"][n] for n in kept]
        original(self, [items[n] for n in kept], **options)

    with harness.open() as pool:
        ckpt = checkpointer(pool)
        ckpt.save(1, state_of(1.0)).result()
        ckpt.wait()
        keys = pool.list("run")
        monkeypatch.setattr(ItemColumns, "add", add)
        with pytest.raises(CheckpointError, match=f"step 1 is still current: .*'{lost}'"):
            ckpt.save(2, state_of(2.0)).result()
        monkeypatch.undo()
        assert pool.list("run") == keys
        ckpt.save(2, state_of(2.0)).result()
        assert held(ckpt, 2) == 2.0
        ckpt.close()


def test_a_failed_save_says_which_step_is_still_good(harness: Harness) -> None:
    """A device error in the segment, the note, the fence or the manifest: the message names it."""

    def broken() -> None:
        raise RedundancyError("2 of 4 devices are full")

    with harness.open() as pool:
        save(pool, (1, 1.0))
        for step, word in ((2, "segment"), (3, "attempts"), (4, "writer"), (5, "manifest")):
            ckpt = checkpointer(pool)
            before_put(pool, word, broken)
            with pytest.raises(HpstoreError, match="full") as caught:
                ckpt.save(step, state_of(2.0)).result()
            assert "1 is still current" in str(caught.value), word
            ckpt.close()
            assert ckpt.latest_valid() == 1


@pytest.mark.parametrize(
    "where", [(StepCommit, "_require_safe"), (SaveJob, "_note_attempt")], ids=lambda w: w[1]
)
def test_an_unforeseen_error_leaves_no_note_of_a_living_save(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, where: tuple[type, str]
) -> None:
    """A defect raises in the middle: the heartbeat ends, or garbage would stay for ever."""
    original = getattr(*where)

    def broken(self: object, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        raise ZeroDivisionError

    with harness.open() as pool:
        ckpt = checkpointer(pool)
        monkeypatch.setattr(*where, broken)
        with pytest.raises(ZeroDivisionError):
            ckpt.save(1, state_of(1.0)).result()
        monkeypatch.undo()
        ckpt.close()
        assert pool.list("run") == ["run/writer"]
        assert "hpstore-beat" not in {thread.name for thread in threading.enumerate()}


def test_an_error_that_no_peer_can_be_told_of_leaves_no_note_either(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above, in slices, where the trainer's thread begins the save; and a peer has died."""

    def broken(*_: object) -> bytes:
        raise CheckpointError("another rank died")

    original = SaveJob._note_attempt

    def noted(self: SaveJob, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        raise ZeroDivisionError

    with harness.open() as pool:
        ckpt = checkpointer(pool, SaveOptions(memory=4 * FROZEN, warm=False))
        monkeypatch.setattr(SaveJob, "_note_attempt", noted)
        monkeypatch.setattr(ckpt._ranks, "broadcast", broken)
        with pytest.raises(CheckpointError, match="died"):
            ckpt.save(1, state_of(1.0))
        monkeypatch.undo()
        ckpt.close()
        assert pool.list("run") == ["run/writer"]
        assert "hpstore-beat" not in {thread.name for thread in threading.enumerate()}
