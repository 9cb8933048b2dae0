"""Copies of steps in further pools (rule 26), and restores from the nearest that has a step."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hpstore
from hpstore.checkpoint import Tier
from hpstore.checkpoint.catalog.step_catalog import StepCatalog
from hpstore.checkpoint.tiers import tier_copies
from hpstore.checkpoint.tiers.copy_step import CopyStopped, copy_step
from hpstore.errors import CheckpointError, ConfigError, TooFewDevices, VersionConflict
from hpstore.pool.pool import Pool
from tests.integration import rolled_back
from tests.integration.cli_cases import PoolCommands
from tests.integration.rolled_back import (
    RUN,
    TIER_SECONDS,
    checkpointer,
    held,
    save,
    save_all,
    state_of,
    steps_in,
)

both, cold = rolled_back.both, rolled_back.cold  # fixtures


def segments_in(pool: Pool) -> list[str]:
    return [key for key in pool.list(f"{RUN}/") if "segment" in key]


@pytest.mark.usefixtures("both")
def test_each_pool_keeps_its_own_and_a_step_is_read_from_the_nearest(
    pool: Pool, cold: Pool
) -> None:
    with checkpointer(pool, keep_last=2, tiers=[Tier(pool=cold, every=2, keep_last=2)]) as ckpt:
        save_all(ckpt, *range(1, 8))
        ckpt.saver.let_tidy()
        assert steps_in(pool) == [6, 7]
        assert steps_in(cold) == [4, 6]
        assert held(ckpt) == {4: 4.0, 6: 6.0, 7: 7.0}
        state = state_of(0.0)
        assert ckpt.restore(state) == 7
        assert ckpt.last_restore is not None
        assert ckpt.last_restore.tier == ""
        assert ckpt.restore(state, step=6) == 6
        assert ckpt.last_restore.tier == ""
        assert ckpt.restore(state, step=4) == 4
        assert ckpt.last_restore.tier == "cold"
        assert state["free"][0] == 4.0
        (report,) = ckpt.tiers.report()
        assert (report["tier"], report["copied"], report["losses_tolerated"]) == ("cold", 6, 2)
        assert ckpt.counters["tier_copies_total"] == 3
        with pytest.raises(CheckpointError, match="no checkpoint of step 5"):
            ckpt.restore(state, step=5)


@pytest.mark.usefixtures("both")
def test_a_copy_survives_the_losses_of_its_own_pool(pool: Pool, cold: Pool, tmp_path: Path) -> None:
    """The first pool is gone for good; of the second m devices are."""
    with checkpointer(pool, tiers=[Tier(pool=cold)]) as ckpt:
        save(ckpt, 1, 2)
    for name in ("cold0", "cold3"):
        shutil.rmtree(tmp_path / name)
    fresh = [tmp_path / f"new{number}" for number in range(3)]
    with (
        hpstore.create(fresh, data=2, parity=1, config=tmp_path / "new.toml") as new,
        checkpointer(new, tiers=[Tier(pool=cold)]) as ckpt,
    ):
        assert ckpt.latest_valid() == 2
        state = state_of(0.0)
        assert ckpt.restore(state) == 2
        assert torch.equal(state["free"], state_of(2.0)["free"])
        assert torch.equal(state["frozen"], state_of(2.0)["frozen"])
        save(ckpt, 3)  # refers to nothing that the other pool holds
        assert StepCatalog(new, RUN).manifest(3).objects == () or held(ckpt)[3] == 3.0
        shutil.rmtree(tmp_path / "new1")
        assert held(ckpt) == {1: 1.0, 2: 2.0, 3: 3.0}


@pytest.mark.usefixtures("segments_apart")
def test_a_step_that_the_first_pool_lost_comes_from_the_second(pool: Pool, cold: Pool) -> None:
    """The same step, not an older one that the first pool still has."""
    with checkpointer(pool, tiers=[Tier(pool=cold)]) as ckpt:
        save_all(ckpt, 1, 2)
        for segment in ckpt.steps.manifest(2).objects:
            pool.delete(segment.key)
        state = state_of(0.0)
        assert ckpt.restore(state) == 2
        assert state["free"][0] == 2.0
        assert ckpt.restore(state, step=2) == 2


@pytest.mark.usefixtures("segments_apart")
def test_what_did_not_change_is_not_copied_again(pool: Pool, cold: Pool) -> None:
    source, target = StepCatalog(pool, RUN), StepCatalog(cold, RUN)
    with checkpointer(pool) as ckpt:
        save(ckpt, 1, 2)
        first, second = (copy_step(source, step, target) for step in (1, 2))
        assert first.referenced_bytes == 0
        assert 0 < second.bytes < first.bytes <= second.referenced_bytes
        again = copy_step(source, 2, target)
        assert (again.bytes, again.referenced_bytes) == (0, 0)
        target.delete(1)
        assert float(checked(cold, 2)["frozen"][0]) == 7.0


def checked(pool: Pool, step: int) -> dict[str, torch.Tensor]:
    """What a step holds; it must be whole, and nothing must be left over."""
    with checkpointer(pool) as ckpt:
        assert ckpt.verify(step).ok
        assert ckpt.steps.collect_garbage() == 0
        return ckpt.load(step)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Copies in the background say that they have begun, and wait to be let go."""
    begun, go = threading.Event(), threading.Event()

    def waiting(*args: Any, **options: Any) -> Any:
        begun.set()
        assert go.wait(TIER_SECONDS)
        return copy_step(*args, **options)

    monkeypatch.setattr(tier_copies, "copy_step", waiting)
    yield begun, go
    go.set()


def test_the_first_pool_keeps_a_step_until_it_is_copied(
    pool: Pool, cold: Pool, gate: tuple[threading.Event, threading.Event]
) -> None:
    """Retention passes over it; of those that wait the newest alone is copied."""
    begun, go = gate
    with checkpointer(pool, keep_last=1, tiers=[Tier(pool=cold)]) as ckpt:
        save(ckpt, 1)
        assert begun.wait(TIER_SECONDS)
        save(ckpt, 2, 3, 4)
        ckpt.saver.let_tidy()
        assert steps_in(pool) == [1, 4]
        assert not ckpt.tiers.wait(0.0)
        go.set()
        assert ckpt.tiers.wait(TIER_SECONDS)
        assert steps_in(cold) == [1, 4]
        assert ckpt.counters["tier_copies_skipped_total"] == 2
        save(ckpt, 5)
        ckpt.saver.let_tidy()
        assert steps_in(pool)[0] > 1


@pytest.mark.usefixtures("segments_apart")
def test_a_killed_copy_shows_nothing_and_the_next_process_makes_it(pool: Pool, cold: Pool) -> None:
    with checkpointer(pool) as ckpt:
        save(ckpt, 1, 2)
    pid = os.fork()
    if not pid:
        copy_step(
            StepCatalog(pool, RUN),
            2,
            StepCatalog(cold, RUN),
            progress=lambda done, total: os.kill(os.getpid(), signal.SIGKILL),
        )
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert steps_in(cold) == []
    with checkpointer(pool, tiers=[Tier(pool=cold)]) as ckpt:
        assert ckpt.tiers.wait(TIER_SECONDS)
    assert steps_in(cold) == [2]
    assert float(checked(cold, 2)["free"][0]) == 2.0
    assert len(segments_in(cold)) == len(StepCatalog(cold, RUN).manifest(2).objects)


def gone(ckpt: Any) -> None:
    ckpt.delete(1)


def saved_again(ckpt: Any) -> None:
    ckpt.save(1, state_of(9.0), overwrite=True).result()


@pytest.mark.usefixtures("both")
@pytest.mark.parametrize("change", [gone, saved_again])
def test_a_step_that_changes_while_it_is_copied_is_not_committed(
    pool: Pool, cold: Pool, change: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the last moment before the manifest is put."""
    with checkpointer(pool) as ckpt:
        save(ckpt, 1)
        put = Pool.put

        def acting(there: Pool, key: str, data: object, *args: Any, **options: Any) -> Any:
            if there is cold and key.endswith("/manifest"):
                monkeypatch.setattr(Pool, "put", put)
                change(ckpt)
            return put(there, key, data, *args, **options)

        monkeypatch.setattr(Pool, "put", acting)
        with pytest.raises(CheckpointError, match="removed or saved again while it was copied"):
            copy_step(StepCatalog(pool, RUN), 1, StepCatalog(cold, RUN))
    assert cold.list(f"{RUN}/") == []


@pytest.mark.usefixtures("both")
def test_two_that_copy_at_once_leave_one_whole_copy(pool: Pool, cold: Pool) -> None:
    with checkpointer(pool) as ckpt:
        save(ckpt, 1)
    meet = threading.Barrier(2)
    found: list[Any] = []

    def copying() -> None:
        meet.wait(TIER_SECONDS)
        try:
            found.append(copy_step(StepCatalog(pool, RUN), 1, StepCatalog(cold, RUN)))
        except VersionConflict as error:  # the other one's manifest was not read as a whole yet
            found.append(error)

    threads = [threading.Thread(target=copying) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert any(not isinstance(each, Exception) for each in found)
    assert float(checked(cold, 1)["free"][0]) == 1.0
    assert len(segments_in(cold)) == len(StepCatalog(cold, RUN).manifest(1).objects)


@pytest.mark.usefixtures("both")
def test_a_step_of_another_line_is_replaced(pool: Pool, cold: Pool) -> None:
    source, target = StepCatalog(pool, RUN), StepCatalog(cold, RUN)
    with checkpointer(pool) as ckpt:
        save(ckpt, 1)
        copy_step(source, 1, target)
        ckpt.save(1, state_of(5.0), overwrite=True).result()
        copy_step(source, 1, target)
    assert float(checked(cold, 1)["free"][0]) == 5.0


def test_a_rollback_reaches_all_pools(
    pool: Pool, cold: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a copy by another process that stood still in the middle: it is not committed after."""
    with checkpointer(pool, tiers=[Tier(pool=cold, every=2)]) as ckpt:
        save_all(ckpt, 1, 2, 3, 4)
        target, put = StepCatalog(cold, RUN), Pool.put
        target.delete(4)

        def acting(there: Pool, key: str, data: object, *args: Any, **options: Any) -> Any:
            if there is cold and key.endswith("/manifest"):
                monkeypatch.setattr(Pool, "put", put)
                ckpt.rollback(2)
                ckpt.steps.undo_rollback()  # the same version of step 4 is there again, or another
                assert ckpt.tiers.wait(TIER_SECONDS)
                ckpt.rollback(2)
            return put(there, key, data, *args, **options)

        monkeypatch.setattr(Pool, "put", acting)
        with pytest.raises(CheckpointError):
            copy_step(StepCatalog(pool, RUN), 4, target)
        assert (steps_in(pool), steps_in(cold)) == ([1, 2], [2])
        assert ckpt.restore(state_of(0.0)) == 2
        ckpt.steps.undo_rollback()
        assert ckpt.tiers.wait(TIER_SECONDS)
        assert steps_in(cold) == [2, 4]


def test_a_rollback_by_a_process_without_tiers_counts_there(pool: Pool, cold: Pool) -> None:
    """As the command line's. An evaluator passes its copies over, a training removes them."""
    with checkpointer(pool, tiers=[Tier(pool=cold)]) as ckpt:
        save_all(ckpt, 1, 2, 3)
        with checkpointer(pool) as other:
            other.rollback(1)
        assert (ckpt.steps(), ckpt.latest_valid(), steps_in(cold)) == ([1], 1, [1, 2, 3])
        assert ckpt.restore(state_of(0.0)) == 1
    with checkpointer(pool, tiers=[Tier(pool=cold)]) as ckpt:
        assert steps_in(cold) == [1]
        save_all(ckpt, 2, 3, shift=0.5)
        assert held(ckpt) == {1: 1.0, 2: 2.5, 3: 3.5}
        ckpt.delete(1)
        StepCatalog(pool, RUN).delete(2)
        assert held(ckpt) == {2: 2.5, 3: 3.5}


@pytest.mark.usefixtures("both")
def test_a_run_goes_back_to_a_step_that_a_tier_alone_has(pool: Pool, cold: Pool) -> None:
    """What else is there alone goes for good, which is asked for."""
    with checkpointer(pool, tiers=[Tier(pool=cold)]) as ckpt:
        save_all(ckpt, 1, 2, 3)
        for step in (1, 2):
            StepCatalog(pool, RUN).delete(step)
        with pytest.raises(CheckpointError, match=r"the later steps \[2\] are in cold alone"):
            ckpt.rollback(1)
        assert ckpt.steps() == [1, 2, 3]
        assert ckpt.rollback(1, force=True).hidden == (3,)
        assert held(ckpt) == {1: 1.0}
        assert (steps_in(pool), steps_in(cold)) == ([1], [1])


def test_a_rollback_is_refused_while_a_tier_cannot_take_part(
    pool: Pool, cold: Pool, tmp_path: Path
) -> None:
    """Else its later steps would be restored. Nothing is hidden."""
    with checkpointer(pool, tiers=[Tier(pool=cold)]) as ckpt:
        save_all(ckpt, 1, 2)
        StepCatalog(cold, RUN).protect(2, "paper")
        with pytest.raises(CheckpointError, match="step 2 is protected as 'paper' in cold"):
            ckpt.rollback(1)
        assert (steps_in(pool), steps_in(cold)) == ([1, 2], [1, 2])
        StepCatalog(cold, RUN).unprotect("paper")
        for number in range(3):
            shutil.rmtree(tmp_path / f"cold{number}")
        with pytest.raises(TooFewDevices):
            ckpt.rollback(1)
        assert steps_in(pool) == [1, 2]


def test_no_tier_lets_steps_go_before_all_can_take_part(
    pool: Pool, cold: Pool, tmp_path: Path
) -> None:
    """The last of them is away: the first has lost no step for good."""
    devices = [tmp_path / f"far{number}" for number in range(3)]
    with (
        hpstore.create(devices, data=1, parity=1, config=tmp_path / "far.toml") as far,
        checkpointer(pool, tiers=[Tier(pool=cold), Tier(pool=far)]) as ckpt,
    ):
        save_all(ckpt, 1, 2)
        for device in devices[:2]:
            shutil.rmtree(device)
        with pytest.raises(TooFewDevices):
            ckpt.rollback(1, force=True)
        assert [steps_in(one) for one in (pool, cold)] == [[1, 2]] * 2


def test_a_rollback_that_fails_names_the_tiers_that_have_let_steps_go(
    pool: Pool, cold: Pool
) -> None:
    with checkpointer(pool, tiers=[Tier(pool=cold)]) as ckpt:
        save_all(ckpt, 1, 2)
        pool.put(f"{RUN}/attempts/000000000003-00ff", b"who knows")
        with pytest.raises(CheckpointError, match=r"Nothing was hidden.* cold let later steps go"):
            ckpt.rollback(1)
        assert (steps_in(pool), steps_in(cold)) == ([1, 2], [1])


def test_a_copy_of_a_step_that_went_is_not_said_to_be_committed(
    pool: Pool, cold: Pool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In the first pool: it was deleted while it was copied."""
    put = Pool.put

    def acting(there: Pool, key: str, data: object, *args: Any, **options: Any) -> Any:
        if there is cold and key.endswith("/manifest"):
            StepCatalog(pool, RUN).delete(1)
        return put(there, key, data, *args, **options)

    monkeypatch.setattr(Pool, "put", acting)
    with checkpointer(pool, tiers=[Tier(pool=cold)]) as ckpt:
        save_all(ckpt, 1)
        assert ckpt.steps() == []
    assert "step 1 was not copied to cold" in caplog.text
    assert "is committed" not in caplog.text


def test_a_tier_that_is_away_fails_no_save(
    pool: Pool, cold: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is counted and shown, and the next due step is copied when it is back."""
    put = Pool.put

    def refusing(there: Pool, *args: Any, **options: Any) -> Any:
        if there is cold:
            raise TooFewDevices("1 of 5 devices can be written, 3 are needed")
        return put(there, *args, **options)

    tier = Tier(pool=cold, retry_seconds=0.0)
    with checkpointer(pool, tiers=[tier]) as ckpt:
        monkeypatch.setattr(Pool, "put", refusing)
        save_all(ckpt, 1)
        assert ckpt.counters["tier_copies_failed_total"] == 1
        assert ckpt.tiers.report()[0]["error"] == "1 of 5 devices can be written, 3 are needed"
        assert ckpt.restore(state_of(0.0)) == 1
        monkeypatch.setattr(Pool, "put", put)
        save_all(ckpt, 2)
        assert ckpt.tiers.report()[0]["error"] is None
    assert steps_in(cold) == [2]


def test_a_run_is_not_begun_anew_because_a_tier_is_away(
    pool: Pool, cold: Pool, tmp_path: Path
) -> None:
    """The first pool is empty: whether there is something to go on from is unclear."""
    with checkpointer(cold) as ckpt:
        save(ckpt, 1)
    with checkpointer(pool, tiers=[Tier(pool=cold)]) as ckpt:
        for number in range(4):
            shutil.rmtree(tmp_path / f"cold{number}")
        with pytest.raises(TooFewDevices):
            ckpt.restore(state_of(0.0))
        with pytest.raises(TooFewDevices):
            ckpt.latest_valid()


def test_a_step_is_not_deleted_in_some_of_its_pools_alone(
    pool: Pool, cold: Pool, tmp_path: Path
) -> None:
    """While a tier is away: the step would come back with it."""
    with checkpointer(pool, tiers=[Tier(pool=cold)]) as ckpt:
        save_all(ckpt, 1)
        for number in range(4):
            shutil.rmtree(tmp_path / f"cold{number}")
        with pytest.raises(TooFewDevices):
            ckpt.delete(1)
        with pytest.raises(TooFewDevices):
            ckpt.steps.protect(1, "best")
        assert steps_in(pool) == [1]
        assert StepCatalog(pool, RUN).protected() == {}


def test_a_copy_can_be_stopped(pool: Pool, cold: Pool) -> None:
    with checkpointer(pool) as ckpt:
        save(ckpt, 1)
    stop = threading.Event()
    stop.set()
    with pytest.raises(CopyStopped):
        copy_step(StepCatalog(pool, RUN), 1, StepCatalog(cold, RUN), stop=stop)
    assert cold.list(f"{RUN}/") == []


def test_wrong_tiers_are_refused(pool: Pool, cold: Pool) -> None:
    with pytest.raises(ConfigError, match="takes an open pool"):
        Tier(pool="cold.toml")  # type: ignore[arg-type]
    for options in ({"every": 0}, {"every": 1.5}, {"rate_bytes_per_second": 0}):
        with pytest.raises(ConfigError):
            Tier(pool=cold, **options)
    with pytest.raises(ConfigError, match="set that, too"):
        Tier(pool=cold, keep_every=10)
    with pytest.raises(ConfigError, match="a pool of its own"):
        checkpointer(pool, tiers=[Tier(pool=pool)])
    with pytest.raises(ConfigError, match="takes Tier"):
        checkpointer(pool, tiers=[cold])


def test_the_command_copies_steps(
    pool: Pool, cold: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By number and by "latest"; a second time there is nothing to write."""
    with checkpointer(pool) as ckpt:
        save(ckpt, 1, 2)
    cli = PoolCommands(tmp_path, capsys, "checkpoint")
    other = tmp_path / "cold.toml"
    assert [row["step"] for row in cli.json("copy", RUN, other, "latest", "1")] == [1, 2]
    assert steps_in(cold) == [1, 2]
    assert [row["bytes"] for row in cli.json("copy", RUN, other, "2")] == [0]
    assert "losses tolerated" in cli("copy", RUN, other)
    cli("copy", RUN, tmp_path / "pool.toml", code=2)
    assert "is the same pool" in cli.err
