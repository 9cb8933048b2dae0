"""Checkpoints beside other processes: retention, collectors, hosts with other clocks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hpstore.checkpoint import Checkpointer, SaveOptions
from hpstore.checkpoint.catalog import writer_fence as attempt_notes
from hpstore.checkpoint.catalog.retain_steps import retain
from hpstore.checkpoint.catalog.retention import Retention
from hpstore.checkpoint.catalog.step_catalog import StepCatalog, newest_untried
from hpstore.checkpoint.catalog.writer_fence import (
    ATTEMPT_SECONDS,
    NoteWatch,
    SaveAttempt,
    attempt_lives,
    here,
)
from hpstore.checkpoint.format.checkpoint_manifest import (
    Manifest,
    attempt_key,
    manifest_key,
    segment_key,
)
from hpstore.checkpoint.restore import collective_restore, fill_state
from hpstore.checkpoint.save import after_commit
from hpstore.checkpoint.save.commit import StepCommit
from hpstore.checkpoint.save.rank_vote import RankVote
from hpstore.checkpoint.save.save_traces import SaveTraces
from hpstore.devices.horizon_guard import HorizonGuard
from hpstore.devices.memory import MemoryWriter
from hpstore.errors import CheckpointError, RegistersUnavailable, TooFewDevices, VersionConflict
from hpstore.objects.object_info import ObjectInfo
from hpstore.pool.admin import PoolAdmin
from hpstore.pool.pool import Pool
from hpstore.runtime.clock import SystemClock
from hpstore.testing.memory_pool import Harness

pytestmark = pytest.mark.usefixtures("segments_apart")

NOTE = SaveAttempt(
    step=1,
    nonce="n",
    host="another",
    boot="b",
    pid=1,
    namespace="pid:[1]",
    started_ms=0,
    beat_ms=0,
    session="s",
)


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    """4+2 over eight devices."""
    return Harness(tmp_path, data=4, parity=2, devices=8)


def state(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((100_000,), float(value))}


def save(ckpt: Checkpointer, step: int) -> None:
    ckpt.save(step, state(step)).result()
    ckpt.wait()


@pytest.mark.parametrize("how", ["restore", "manifest", "latest_valid"])
def test_a_step_that_retention_takes_gives_way_to_a_newer_one(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """r06, PROTOCOL 8 and 19: never back to a kept older step while newer ones are committed. Also
    when the manifest itself is gone between the listing and the look at it."""
    monkeypatch.setattr(after_commit, "LEFT_BYTES", 0)  # retention at each save
    with harness.open() as pool, harness.open(read_only=True) as other:
        trainer = Checkpointer(pool, "run", keep_last=1, keep_every=100, rng=False)
        save(trainer, 100)
        save(trainer, 150)
        once: list[int] = []

        def go_on() -> None:
            if not once:
                once.append(1)
                save(trainer, 151)
                save(trainer, 152)

        reader = Checkpointer(other, "run", rng=False)
        if how == "restore":
            plain = fill_state.restore_state

            def late(*args: object) -> object:
                go_on()
                return plain(*args)  # type: ignore[arg-type]

            monkeypatch.setattr(collective_restore, "restore_state", late)
        elif how == "manifest":
            settle = StepCatalog.settle

            def first(steps: StepCatalog, step: int) -> None:
                go_on()
                settle(steps, step)

            monkeypatch.setattr(StepCatalog, "settle", first)
        if how != "latest_valid":
            into = state(0.0)
            assert reader.restore(into) == 152
            assert (into["w"] == 152).all()
        else:
            facts = StepCatalog.facts

            def later(steps: StepCatalog, step: int, version: str | None = None) -> object:
                go_on()
                return facts(steps, step, version)

            monkeypatch.setattr(StepCatalog, "facts", later)
            assert reader.latest_valid() == 152
        reader.close()
        trainer.close()


def test_steps_are_tried_newest_first_with_those_that_came_meanwhile() -> None:
    """A pure choice: what is new in the list comes before what is older than the last try."""
    assert newest_untried([1, 2, 3], set()) == 3
    assert newest_untried([1, 2, 5], {3}) == 5
    assert newest_untried([1, 2], {2, 3}) == 1
    assert newest_untried([], {1}) is None


def test_older_steps_stay_when_devices_go_between_the_check_and_the_manifest(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PROTOCOL 19: the step is looked at once more before retention removes what it replaces."""
    with (
        harness.open() as pool,
        Checkpointer(pool, "run", keep_last=1, rng=False, save=SaveOptions(warm=False)) as ckpt,
    ):
        save(ckpt, 1)
        publish = StepCommit._publish

        def then_lose(commit: StepCommit, written: Sequence[RankVote]) -> object:
            report = publish(commit, written)
            key = written[0].segments[0].key
            harness.lose([url for url, _ in harness.columns(key)][:1])
            return report

        monkeypatch.setattr(StepCommit, "_publish", then_lose)
        save(ckpt, 2)
        assert ckpt.steps() == [1, 2]
        assert ckpt.counters["retentions_postponed_total"] == 1
        harness.bring_back()
        monkeypatch.undo()
        save(ckpt, 3)
        assert ckpt.steps() == [3]


def test_a_save_that_does_not_fit_frees_what_it_wrote(harness: Harness) -> None:
    """r_full: the manifest finds no room; its segments go, and a smaller save has room again."""
    with (
        harness.open() as pool,
        Checkpointer(pool, "run", rng=False, save=SaveOptions(warm=False)) as ckpt,
    ):
        pool.put("filler", bytes(40 << 20))
        save(ckpt, 1)
        publish = StepCommit._publish

        def full(commit: StepCommit, written: Sequence[RankVote]) -> object:
            for device in harness.devices.values():  # what is kept for deletes is left, no more
                used = device.usage().total - device.usage().free
                device.capacity_bytes = used + used // 200
            return publish(commit, written)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(StepCommit, "_publish", full)
            with pytest.raises(TooFewDevices, match=r"step 2 is not committed, step 1 is.*Full"):
                ckpt.save(2, state(2)).result()
        ckpt.wait()
        assert pool.list("run/step-000000000002/") == []
        assert pool.list("run/attempts/") == []
        for device in harness.devices.values():
            device.capacity_bytes = 1 << 40
        save(ckpt, 3)
        assert ckpt.steps() == [1, 3]


# --- saves of other hosts -----------------------------------------------------------------------


def test_a_note_is_judged_by_how_long_it_stood_still() -> None:
    """r11: another machine's clock says nothing, however far ahead or behind it is."""
    now = [0.0]
    watch = NoteWatch(lambda: now[0])
    assert watch.unchanged_seconds("k", "v1") == 0
    now[0] = ATTEMPT_SECONDS - 1
    assert watch.unchanged_seconds("k", "v1") == ATTEMPT_SECONDS - 1
    assert attempt_lives(NOTE, watch.unchanged_seconds("k", "v1"))
    now[0] += 2
    assert not attempt_lives(NOTE, watch.unchanged_seconds("k", "v1"))
    assert watch.unchanged_seconds("k", "v2") == 0  # it beats
    watch.only([])
    assert watch.unchanged_seconds("k", "v2") == 0


def as_another_host(monkeypatch: pytest.MonkeyPatch, ahead_seconds: float) -> None:
    clock = time.time_ns
    monkeypatch.setattr(attempt_notes, "here", lambda: ("host-b", "boot-b", "pid:[1]"))
    monkeypatch.setattr(time, "time_ns", lambda: clock() + int(ahead_seconds * 1e9))


@pytest.mark.parametrize("ahead", [0.0, 1e6])
def test_a_save_under_way_survives_a_collector_with_another_clock(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, ahead: float
) -> None:
    """r11, PROTOCOL 18: a host whose clock is days ahead collects nothing that lives."""
    with (
        harness.open() as pool,
        Checkpointer(pool, "run", rng=False, save=SaveOptions(warm=False)) as ckpt,
    ):
        save(ckpt, 1)
        manifest = StepCommit._manifest

        def between(commit: StepCommit, written: Sequence[RankVote]) -> tuple[Manifest, bytes]:
            with monkeypatch.context() as patch, harness.open() as other:
                as_another_host(patch, ahead)
                Checkpointer(other, "run", rng=False).close()
            return manifest(commit, written)

        monkeypatch.setattr(StepCommit, "_manifest", between)
        save(ckpt, 2)
        into = state(0.0)
        assert ckpt.restore(into) == 2
        assert (into["w"] == 2).all()


def test_a_save_whose_segments_were_collected_is_not_acknowledged(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PROTOCOL 18: taken for dead all the same, it raises, and the step before stays current."""
    with (
        harness.open() as pool,
        Checkpointer(pool, "run", rng=False, save=SaveOptions(warm=False)) as ckpt,
    ):
        save(ckpt, 1)
        manifest = StepCommit._manifest

        def between(commit: StepCommit, written: Sequence[RankVote]) -> tuple[Manifest, bytes]:
            with monkeypatch.context() as patch, harness.open() as other:
                patch.setattr(
                    "hpstore.checkpoint.catalog.step_catalog.attempt_lives", lambda *_: False
                )
                assert StepCatalog(other, "run").collect_garbage() == 1
            return manifest(commit, written)

        monkeypatch.setattr(StepCommit, "_manifest", between)
        with pytest.raises(CheckpointError, match="took this save for dead"):
            ckpt.save(2, state(2)).result()
        monkeypatch.undo()
        assert ckpt.steps() == [1]
        save(ckpt, 2)
        assert ckpt.steps() == [1, 2]


def collect_between(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, broken: str | None = None
) -> None:
    """Another process takes this save for dead and collects, after its fence check and before its
    manifest. `broken`: what of hpstore.checkpoint.catalog.dead_saves fails in it, as if
    it were killed there."""
    manifest = StepCommit._manifest

    def fail(*_: object, **__: object) -> None:
        raise CheckpointError("killed")

    def between(commit: StepCommit, written: Sequence[RankVote]) -> tuple[Manifest, bytes]:
        with monkeypatch.context() as patch, harness.open() as other:
            if broken is not None:
                patch.setattr(f"hpstore.checkpoint.catalog.{broken}", fail)
            patch.setattr(StepCatalog, "_is_dead", lambda *_: True)
            StepCatalog(other, "run").collect_garbage()
        return manifest(commit, written)

    monkeypatch.setattr(StepCommit, "_manifest", between)


def test_segments_stay_while_the_note_of_their_save_is_there(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PROTOCOL 18: what is not ended is protected: an acknowledged save has all that it names."""
    with (
        harness.open() as pool,
        Checkpointer(pool, "run", rng=False, save=SaveOptions(warm=False)) as ckpt,
    ):
        save(ckpt, 1)
        collect_between(harness, monkeypatch, "step_catalog.end_save")
        save(ckpt, 2)
        into = state(0.0)
        assert ckpt.restore(into) == 2
        assert (into["w"] == 2).all()


def test_a_collector_that_is_killed_leaves_a_mark_that_the_next_one_goes_on_from(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PROTOCOL 18: between the removal of a note and the decision, the mark protects as the note
    did; the save that it is of is over."""
    with (
        harness.open() as pool,
        Checkpointer(pool, "run", rng=False, save=SaveOptions(warm=False)) as ckpt,
    ):
        save(ckpt, 1)
        collect_between(harness, monkeypatch, "dead_saves.decide")
        remove = SaveTraces.remove_segments
        monkeypatch.setattr(SaveTraces, "remove_segments", lambda _: None)  # it is killed, too
        with pytest.raises(CheckpointError, match="took this save for dead"):
            ckpt.save(2, state(2)).result()
        monkeypatch.undo()
        assert SaveTraces.remove_segments is remove
        steps = StepCatalog(pool, "run")
        listing = steps.listing()
        assert [step for step, _ in listing.condemned.values()] == [2]
        of_it = {key for key, (step, _) in listing.segments.items() if step == 2}
        assert of_it
        assert steps.still_named(of_it) == set()  # what it refers to is protected, not its own
        assert not steps._orphans(all_live=True)[0]
        assert steps.collect_garbage() == len(of_it)
        assert not steps.listing().condemned
        assert pool.list("run/step-") == [key for key in pool.list("run/") if "0001/" in key]


class Ahead(SystemClock):
    ms = 10_000

    def wall_ms(self) -> int:
        return super().wall_ms() + self.ms


def test_a_renewal_that_was_stopped_does_not_bring_a_note_back(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PROTOCOL 18: a save whose host's clock is ahead was stopped as it renewed its note; that
    would be newer than what deletes it, and the save go on to name segments that are gone."""
    key = attempt_key("run", 2, "00000000000000aa")
    note = replace(NOTE, step=2, nonce="00000000000000aa", manifest=manifest_key("run", 2))
    with harness.open() as other, harness.open() as pool:
        ahead = pool._store.counter._clock = Ahead()
        version = pool.put(key, note.encode()).version
        attempt_notes.take_fence(other, "run", "another session")
        publish, collected = MemoryWriter.publish, list[str]()

        def first_collect(writer: MemoryWriter, path: str, guard: HorizonGuard | None) -> None:
            if "attempts" in path and not collected:
                collected.append(path)
                StepCatalog(other, "run").collect_garbage()
                assert not other.list("run/attempts/")
            publish(writer, path, guard)

        monkeypatch.setattr(MemoryWriter, "publish", first_collect)
        ahead.ms += 1000
        with pytest.raises(VersionConflict):
            pool.put(key, note.encode(), if_version=version)
        assert collected
        assert not pool.exists(key)


@pytest.mark.parametrize("kills", ["before the note goes", "before the decision"])
def test_a_mark_is_gone_on_from_wherever_its_collector_was_killed(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, kills: str
) -> None:
    """PROTOCOL 18, under a prefix that has the names of notes and marks in it."""
    prefix = "a/attempts/condemned/b"
    with harness.open() as pool:
        key = attempt_key(prefix, 9, "00000000000000aa")
        pool.put(key, replace(NOTE, step=9, nonce="00000000000000aa", session="old").encode())
        segment = segment_key(prefix, 9, "00000000000000aa", 0, 0)
        pool.put(segment, bytes(10))
        attempt_notes.take_fence(pool, prefix, "new")
        steps = StepCatalog(pool, prefix)

        def fail(*_: object, **__: object) -> None:
            raise CheckpointError("killed")

        where = "_delete" if kills == "before the note goes" else "decide"
        with monkeypatch.context() as patch:
            patch.setattr(f"hpstore.checkpoint.catalog.dead_saves.{where}", fail)
            assert steps.collect_garbage() == 0
        listing = steps.listing()
        assert len(listing.condemned) == 1
        assert len(listing.attempts) == (where == "_delete")
        assert segment in pool.list()
        with monkeypatch.context() as patch:  # and once more
            patch.setattr("hpstore.checkpoint.catalog.dead_saves.decide", fail)
            assert steps.collect_garbage() == 0
        assert not steps.listing().attempts
        assert pool.list() == pool.list(f"{prefix}/")
        assert steps.collect_garbage() == 1
        assert pool.list(prefix) == [f"{prefix}/writer"]


def test_a_save_of_which_it_is_unclear_what_became_keeps_its_note_until_it_is_decided(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PROTOCOL 18: a manifest whose put was not answered may come; its segments must be there."""
    with (
        harness.open() as pool,
        Checkpointer(pool, "run", rng=False, save=SaveOptions(warm=False)) as ckpt,
    ):
        save(ckpt, 1)
        put = Pool.put

        def unanswered(own: Pool, key: str, *args: object, **words: object) -> ObjectInfo:
            info = put(own, key, *args, **words)  # type: ignore[arg-type]
            if key.endswith("0002/manifest"):
                raise RegistersUnavailable("may have been stored", key=key)
            return info

        monkeypatch.setattr(Pool, "put", unanswered)
        with pytest.raises(RegistersUnavailable, match="may be committed or not"):
            ckpt.save(2, state(2)).result()
        monkeypatch.undo()
        assert [step for step, _ in ckpt._catalog.listing().attempts.values()] == [2]
        ckpt.steps.collect_garbage()
        assert not ckpt._catalog.listing().attempts
        into = state(0.0)
        assert ckpt.restore(into) == 2
        assert (into["w"] == 2).all()


def test_an_overwrite_that_is_over_leaves_the_step_that_it_replaced(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PROTOCOL 18: not acknowledged, and what was committed before is read."""
    with (
        harness.open() as pool,
        Checkpointer(pool, "run", rng=False, save=SaveOptions(warm=False)) as ckpt,
    ):
        save(ckpt, 1)
        collect_between(harness, monkeypatch)
        with pytest.raises(CheckpointError, match=r"step 1 is still current.*for dead"):
            ckpt.save(1, state(7), overwrite=True).result()
        monkeypatch.undo()
        into = state(0.0)
        assert ckpt.restore(into) == 1
        assert (into["w"] == 1).all()
        assert len([key for key in pool.list("run/") if "segment-" in key]) == 1


def test_a_step_that_one_more_loss_would_end_does_not_count_for_retention(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PROTOCOL 8, 19: as a save under way leaves it, with one copy of its manifest. Settled, it
    counts."""
    with (
        harness.open() as pool,
        Checkpointer(pool, "run", rng=False, save=SaveOptions(warm=False)) as ckpt,
    ):
        for step in (1, 2, 3):
            save(ckpt, step)
        key = manifest_key("run", 2)
        for url, path in harness.columns(key)[1:]:
            del harness.devices[url].files[path]
        with monkeypatch.context() as patch:
            patch.setattr(PoolAdmin, "settle", refused)
            retain(StepCatalog(pool, "run"), 3, Retention(keep_last=2), now_ms=0)
        assert ckpt.steps() == [1, 2, 3]
        retain(StepCatalog(pool, "run"), 3, Retention(keep_last=2), now_ms=0)
        assert ckpt.steps() == [2, 3]
        assert len(harness.columns(key)) == 3


def refused(*_: object) -> None:
    raise TooFewDevices("it cannot be settled now")


def test_what_a_fenced_session_left_is_collected_without_a_clock(harness: Harness) -> None:
    """A session that lost the fence cannot commit: its note and segments go at once."""
    with harness.open() as pool:
        key = attempt_key("run", 9, "00000000000000aa")
        pool.put(key, replace(NOTE, step=9, nonce="00000000000000aa", session="old").encode())
        segment = segment_key("run", 9, "00000000000000aa", 0, 0)
        pool.put(segment, bytes(10))
        assert here()[0] != NOTE.host
        with Checkpointer(pool, "run", rng=False, save=SaveOptions(warm=False)) as ckpt:
            assert key in pool.list()  # nothing says that it is over
            save(ckpt, 1)
            assert ckpt.steps.collect_garbage() == 1
            assert key not in pool.list()
            assert segment not in pool.list()
