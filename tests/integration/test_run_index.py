"""Which manifests are steps: sessions that lost the fence, and crashes amid (PROTOCOL 18)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hpstore.checkpoint import Checkpointer, SaveOptions
from hpstore.checkpoint import steps as steps_module
from hpstore.checkpoint.catalog import fence_record, retain_steps, run_index, writer_fence
from hpstore.checkpoint.catalog.fence_record import FenceRecord, counter_of, fence_key, read_fence
from hpstore.checkpoint.catalog.retain_steps import retain
from hpstore.checkpoint.catalog.retention import Retention
from hpstore.checkpoint.catalog.run_index import put_manifest
from hpstore.checkpoint.catalog.segment_safety import existing_version
from hpstore.checkpoint.catalog.step_catalog import StepCatalog
from hpstore.checkpoint.catalog.writer_fence import take_fence, write_index
from hpstore.checkpoint.format.checkpoint_manifest import manifest_key
from hpstore.checkpoint.tiers import copy_step as copy_module
from hpstore.checkpoint.tiers.copy_step import copy_step
from hpstore.errors import CheckpointError, TooManyErasures, VersionConflict
from hpstore.format.records import FORMAT, seal
from hpstore.pool.pool import Pool
from hpstore.testing.memory_pool import Harness

RUN = "run"
COUNT = 9


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    with Harness(tmp_path, data=2, parity=1, devices=4).open() as opened:
        yield opened


def checkpointer(pool: Pool, keep_last: int | None = None) -> Checkpointer:
    options = SaveOptions(prewrite=False, warm=False)
    return Checkpointer(pool, RUN, keep_last=keep_last, rng=False, save=options)


def save(ckpt: Checkpointer, *steps: int, value: float = 0.0) -> None:
    for step in steps:
        ckpt.save(step, {"w": torch.full((COUNT,), value or float(step))}).result()
        ckpt.wait()


def held(ckpt: Checkpointer) -> dict[int, float]:
    found = {}
    for step in ckpt.steps():
        into = {"w": torch.zeros(COUNT)}
        assert ckpt.restore(into, step) == step
        found[step] = float(into["w"][0])
    return found


def late(pool: Pool, step: int, value: float) -> None:
    """A manifest that a session without the fence has put, as it is found when that went on."""
    with checkpointer(pool) as other:
        save(other, step, value=value)
    overtake(pool, step)


def overtake(pool: Pool, step: int) -> None:
    """Another session has taken the fence before the manifest of a step was put."""
    steps = StepCatalog(pool, RUN)
    steps.listing()
    epoch = counter_of(steps.manifests.pop(step))
    record = read_fence(pool, RUN)
    assert record is not None
    version = pool.stat(fence_key(RUN)).version
    write_index(pool, RUN, record, steps.manifests, version=version, epoch=epoch)


def test_a_manifest_that_came_too_late_is_no_step_for_anybody_rule_18(pool: Pool) -> None:
    """Listed, restored, found by number, protected, watched: it is not there."""
    with checkpointer(pool) as ckpt:
        save(ckpt, 1)
    late(pool, 2, 7.0)
    with checkpointer(pool) as ckpt:
        assert held(ckpt) == {1: 1.0}
        assert ckpt.restore({"w": torch.zeros(COUNT)}) == 1
        for wrong in (
            lambda: ckpt.restore({"w": torch.zeros(COUNT)}, 2),
            lambda: ckpt.steps.protect(2, "best"),
            lambda: ckpt.read(2),
        ):
            with pytest.raises(CheckpointError, match="no checkpoint of step 2"):
                wrong()
        assert list(ckpt.watch(timeout=0.0)) == [1]


@pytest.mark.parametrize("overwrite", [False, True])
def test_the_place_of_a_manifest_that_came_too_late_is_free_rule_18(
    pool: Pool, overwrite: bool
) -> None:
    with checkpointer(pool) as ckpt:
        save(ckpt, 1)
    with checkpointer(pool) as ckpt:  # it has collected garbage
        late(pool, 2, 7.0)
        ckpt.save(2, {"w": torch.full((COUNT,), 2.0)}, overwrite=overwrite).result()
        assert held(ckpt) == {1: 1.0, 2: 2.0}


@pytest.mark.usefixtures("segments_apart")
def test_a_manifest_that_came_too_late_is_garbage_with_what_it_names_rule_18(pool: Pool) -> None:
    with checkpointer(pool) as ckpt:
        save(ckpt, 1)
    late(pool, 2, 7.0)
    assert manifest_key(RUN, 2) in pool.list()
    assert StepCatalog(pool, RUN).collect_garbage() == 1
    assert not [key for key in pool.list(RUN) if "step-000000000002" in key]
    with checkpointer(pool) as ckpt:
        assert held(ckpt) == {1: 1.0}


def test_a_collector_that_was_stopped_removes_no_step_that_took_the_place(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has listed the manifest as garbage; then the step is saved in its place."""
    with checkpointer(pool) as ckpt:
        save(ckpt, 1)
        steps, plain = StepCatalog(pool, RUN), StepCatalog._orphans
        with checkpointer(pool) as other:
            late(pool, 2, 7.0)

            def between(own: StepCatalog, *, all_live: bool = False) -> object:
                found = plain(own, all_live=all_live)
                if own is steps and not all_live:
                    other.save(2, {"w": torch.full((COUNT,), 2.0)}).result()
                return found

            monkeypatch.setattr(StepCatalog, "_orphans", between)
            steps.collect_garbage()
            assert held(other) == {1: 1.0, 2: 2.0}


def test_a_manifest_that_is_no_step_is_not_copied_to_a_tier_rule_18(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor one that is none any more when its copy would be committed."""
    with checkpointer(pool) as ckpt:
        save(ckpt, 1)
    source = StepCatalog(pool, RUN)
    (tmp_path / "tier").mkdir()
    with Harness(tmp_path / "tier", data=2, parity=1, devices=4).open() as tier:
        target = StepCatalog(tier, RUN)

        def overtaken(*words: object, **more: object) -> object:
            overtake(pool, 3)
            return put_manifest(*words, **more)  # type: ignore[arg-type]

        late(pool, 2, 7.0)
        with pytest.raises(CheckpointError, match="no checkpoint of step 2"):
            copy_step(source, 2, target)
        with checkpointer(pool) as ckpt:
            save(ckpt, 3)
        monkeypatch.setattr(copy_module, "put_manifest", overtaken)
        with pytest.raises(CheckpointError, match="removed or saved again"):
            copy_step(source, 3, target)
        assert target.all() == []


def test_an_undo_puts_steps_back_where_a_late_manifest_lies_rule_24(pool: Pool) -> None:
    with checkpointer(pool) as ckpt:
        save(ckpt, 1, 2)
        ckpt.rollback(1)
        assert held(ckpt) == {1: 1.0}
    with checkpointer(pool) as ckpt:
        late(pool, 2, 7.0)
        ckpt.steps.undo_rollback()
        assert held(ckpt) == {1: 1.0, 2: 2.0}


def test_retention_takes_steps_out_before_anything_of_them_goes_rule_19(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in between, it leaves garbage, and no step without objects."""
    with checkpointer(pool, keep_last=2) as ckpt:
        save(ckpt, 1, 2, 3)
        ckpt.saver.flush()
        deleted: list[list[int]] = []
        monkeypatch.setattr(retain_steps, "remove_steps", lambda _, g, v: deleted.append([*v]))
        save(ckpt, 4)
        ckpt.saver.flush()
        monkeypatch.undo()
        assert deleted == [[2]]
        assert held(ckpt) == {3: 3.0, 4: 4.0}
    assert manifest_key(RUN, 2) in pool.list()
    with checkpointer(pool, keep_last=2) as ckpt:  # it collects
        assert manifest_key(RUN, 2) not in pool.list()
        assert held(ckpt) == {3: 3.0, 4: 4.0}


@pytest.mark.parametrize("count", [1, 3])
def test_retention_that_was_stopped_before_it_deletes_leaves_what_was_saved_again_rule_19(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Another session goes back meanwhile, and acknowledges steps of the same numbers."""
    numbers = list(range(2, 2 + count))
    with checkpointer(pool, keep_last=2) as ckpt:
        save(ckpt, 1)
        ckpt.steps.protect(1, "start")
        with checkpointer(pool) as other:
            save(other, *numbers, 8)
        plain = retain_steps.remove_steps

        def stopped(steps: StepCatalog, going: list[int], versions: dict[int, str]) -> None:
            assert sorted(versions) == numbers
            with checkpointer(pool) as other:
                other.rollback(1)
                save(other, *numbers, value=50.0)
            plain(steps, going, versions)

        monkeypatch.setattr(retain_steps, "remove_steps", stopped)
        with checkpointer(pool, keep_last=2) as first:
            save(first, 9)
        monkeypatch.undo()
        assert held(ckpt) == {1: 1.0} | dict.fromkeys(numbers, 50.0)


def test_a_retention_by_hand_leaves_what_was_saved_again_since_it_was_decided(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with checkpointer(pool, keep_last=1) as ckpt, checkpointer(pool) as other:
        save(other, 1, 2, 3)
        plain = retain_steps.decisions_now

        def stopped(*words: object, **more: object) -> object:
            found = plain(*words, **more)  # type: ignore[arg-type]
            with checkpointer(pool) as another:
                another.save(1, {"w": torch.full((COUNT,), 50.0)}, overwrite=True).result()
            return found

        monkeypatch.setattr(steps_module, "decisions_now", stopped)
        assert [found.step for found in ckpt.steps.retain() if not found.stays] == [1, 2]
        assert held(ckpt) == {1: 50.0, 3: 3.0}


def test_retention_of_a_session_that_lost_the_fence_removes_nothing_rule_19(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has decided when another session begins."""
    with checkpointer(pool) as ckpt:
        save(ckpt, 1, 2, 3)
        session = ckpt.saver.session

        def between(own: Pool, key: str) -> str | None:
            found = existing_version(own, key)
            if key == fence_key(RUN):
                take_fence(own, RUN, "another")
            return found

        monkeypatch.setattr(run_index, "existing_version", between)
        retain(ckpt._catalog, 3, Retention(keep_last=1), now_ms=0, session=session)
        monkeypatch.undo()
        assert held(ckpt) == {1: 1.0, 2: 2.0, 3: 3.0}
        retain(ckpt._catalog, 3, Retention(keep_last=1), now_ms=0, session="another")
        assert held(ckpt) == {3: 3.0}


def test_a_take_over_that_is_killed_before_its_end_hides_nothing_and_is_taken_again_rule_18(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with checkpointer(pool) as ckpt:
        save(ckpt, 1, 2)
        with monkeypatch.context() as patch:
            patch.setattr(writer_fence, "write_index", lambda *_, **__: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                take_fence(pool, RUN, "killed")
        assert held(ckpt) == {1: 1.0, 2: 2.0}
        with pytest.raises(VersionConflict, match="has begun to save under"):
            ckpt.save(3, {"w": torch.zeros(COUNT)}).result()
        with checkpointer(pool) as other:
            save(other, 3)
            assert held(other) == {1: 1.0, 2: 2.0, 3: 3.0}


def test_of_two_that_take_the_fence_one_has_it_rule_18(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is stopped between its two puts; the other one begins and commits meanwhile."""
    with checkpointer(pool) as ckpt, checkpointer(pool) as first, checkpointer(pool) as other:
        save(ckpt, 1)
        plain = writer_fence.write_index

        def slow(*args: object, **words: object) -> None:
            monkeypatch.setattr(writer_fence, "write_index", plain)
            save(other, 2)
            plain(*args, **words)  # type: ignore[arg-type]

        monkeypatch.setattr(writer_fence, "write_index", slow)
        with pytest.raises(VersionConflict, match="has begun to save under"):
            first.save(2, {"w": torch.full((COUNT,), 7.0)}).result()
        save(other, 3)
        assert held(other) == {1: 1.0, 2: 2.0, 3: 3.0}


def test_an_older_hpstore_may_save_between_and_loses_nothing(pool: Pool) -> None:
    """Its record of the fence has no index: all manifests are steps, as they were for it."""
    with checkpointer(pool, keep_last=2) as ckpt:
        save(ckpt, 1, 2, 3)
    body = {"session": "old", "host": "h", "boot": "b", "pid": 7, "since_ms": 5}
    pool.put(fence_key(RUN), seal({"format": FORMAT, **body}))
    assert StepCatalog(pool, RUN).all() == [2, 3]
    with checkpointer(pool) as ckpt:
        save(ckpt, 4)
        assert held(ckpt) == {2: 2.0, 3: 3.0, 4: 4.0}
        found = read_fence(pool, RUN)
        assert found is not None
        assert found.epoch is not None
        assert all(step in found.steps for step in (2, 3))


def test_a_damaged_fence_hides_nothing_and_is_replaced(pool: Pool) -> None:
    with checkpointer(pool) as ckpt:
        save(ckpt, 1)
    with checkpointer(pool) as ckpt:
        save(ckpt, 2)
    pool.put(fence_key(RUN), b"rubbish")
    with checkpointer(pool) as ckpt:
        assert held(ckpt) == {1: 1.0, 2: 2.0}
        save(ckpt, 3)
        assert held(ckpt) == {1: 1.0, 2: 2.0, 3: 3.0}


def test_a_fence_whose_copies_are_all_damaged_hides_nothing(
    tmp_path: Path,
) -> None:
    """On the devices: it is lost for good. While a device is away that may have it, nothing is
    listed by guess."""
    harness = Harness(tmp_path, data=2, parity=1, devices=6)
    with harness.open() as opened:
        for step in (1, 2):
            with checkpointer(opened) as ckpt:
                save(ckpt, step)
        copies = harness.columns(fence_key(RUN))
        for url, path in copies:
            harness.flip(url, path, 10)
    with harness.open() as opened:
        with checkpointer(opened) as ckpt:
            assert held(ckpt) == {1: 1.0, 2: 2.0}
            opened.delete(fence_key(RUN))  # by a person
            save(ckpt, 3)
        with checkpointer(opened) as ckpt:
            save(ckpt, 4)
            assert held(ckpt) == {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}
    copies = harness.columns(fence_key(RUN))
    harness.flip(*copies[0], 10)
    harness.lose([copies[1][0]])
    with harness.open() as opened, pytest.raises(TooManyErasures):
        StepCatalog(opened, RUN).all()


def test_counters_that_were_lost_fail_the_commit_that_they_would_hide(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Registers that were lost begin anew, maybe below the epoch of the run."""
    with checkpointer(pool) as ckpt:
        save(ckpt, 1)
    with checkpointer(pool) as ckpt:
        save(ckpt, 2)
        far = FenceRecord.decode(pool.get(fence_key(RUN)), where="")
        monkeypatch.setattr(run_index, "counter_of", lambda _: 0)
        monkeypatch.setattr(fence_record, "counter_of", lambda _: 0)
        with pytest.raises(CheckpointError, match="have lost their counters"):
            ckpt.save(3, {"w": torch.zeros(COUNT)}).result()
        assert far.epoch is not None
        assert 1 in far.steps  # its number is written down: what replaces it counts, and is whole
        ckpt.save(1, {"w": torch.full((COUNT,), 7.0)}, overwrite=True).result()
        assert held(ckpt)[1] == 7.0


def test_a_run_is_copied_whole_to_another_name(pool: Pool) -> None:
    """Object by object, in any order: the copies of manifests are above the epoch."""
    with checkpointer(pool) as ckpt:
        save(ckpt, 1)
    with checkpointer(pool) as ckpt:
        save(ckpt, 2)
    for key in pool.list(RUN):
        pool.put(f"copy/{key.removeprefix(RUN)[1:]}", pool.get(key))
    assert StepCatalog(pool, "copy").all() == [1, 2]


def test_a_small_save_that_replaces_a_step_is_noted_and_others_are_not_rule_18(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with checkpointer(pool) as ckpt:
        put, notes = Pool.put, list[list[str]]()

        def seen(own: Pool, key: str, *args: object, **words: object) -> object:
            if key.endswith("/manifest"):
                notes.append(own.list(f"{RUN}/attempts/"))
            return put(own, key, *args, **words)  # type: ignore[arg-type]

        monkeypatch.setattr(Pool, "put", seen)
        ckpt.save(1, {"w": torch.ones(COUNT)}, overwrite=True).result()
        ckpt.save(1, {"w": torch.zeros(COUNT)}, overwrite=True).result()
        ckpt.wait()
        assert [len(found) for found in notes] == [0, 1]
        assert not pool.list(f"{RUN}/attempts/")
        assert held(ckpt) == {1: 0.0}


def test_a_listing_of_another_thread_takes_no_step_from_a_collector_or_retention_rules_18_19(
    pool: Pool,
) -> None:
    """An older listing, without the last two steps, ends within each newer one of the catalog."""

    class Shared(StepCatalog):
        def __setattr__(self, name: str, value: object) -> None:
            if name == "manifests" and isinstance(value, dict) and hides & {*value}:
                value = {step: v for step, v in value.items() if step not in hides}
            super().__setattr__(name, value)

    hides: set[int] = {4}
    with checkpointer(pool) as ckpt:
        save(ckpt, 1, 2, 3, 4)
        session = ckpt.saver.session
        steps = Shared(pool, RUN)
        assert steps.listing().steps == (1, 2, 3, 4)
        steps.collect_garbage()
        assert held(ckpt) == {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}
        hides = {3}
        retain(steps, 4, Retention(keep_last=2), now_ms=0, session=session)
        assert held(ckpt) == {3: 3.0, 4: 4.0}
