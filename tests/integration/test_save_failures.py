"""What a save that fails does to the training: on_failure, and what its message says."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

import hpstore
from hpstore.checkpoint import Checkpointer, SaveOptions
from hpstore.checkpoint.catalog.step_catalog import StepCatalog
from hpstore.checkpoint.save import save_failures
from hpstore.errors import CheckpointError, HpstoreError, TooFewDevices, VersionConflict
from hpstore.pool.pool import Pool
from tests.fault.common import poll
from tests.integration.ranks import breaking_put, launch, make_pool, open_pool, put_segments

RUN = "runs/a"
RETRY = SaveOptions(on_failure="retry", warm=False)
WARN = SaveOptions(on_failure="warn", warm=False)
apart = pytest.mark.usefixtures("segments_apart")


class Outage:
    """Puts of keys with `word` in them fail so many times. Counts those that came."""

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        word: str,
        times: float = 1e9,
        error: Callable[[], Exception] = lambda: TooFewDevices("three devices are away"),
    ) -> None:
        self.came, self.left = 0, times
        before = Pool.put

        def put(pool: Pool, key: str, *words: Any, **options: Any) -> Any:
            if word in key:
                self.came += 1
                if self.left > 0:
                    self.left -= 1
                    raise error()
            return before(pool, key, *words, **options)

        patch.setattr(Pool, "put", put)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attempts follow each other at once."""
    monkeypatch.setattr(save_failures, "FIRST_WAIT_SECONDS", 0.0)


def state_of(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((90_000,), float(step)), "n": torch.tensor(step)}


def holds(pool: hpstore.Pool, step: int) -> bool:
    """Whether a step is there, whole, with the values of its own."""
    with Checkpointer(pool, RUN, save=SaveOptions(warm=False)) as ckpt:
        found = ckpt.load(step)
        return ckpt.verify(step).ok and all(
            torch.equal(found[name], value) for name, value in state_of(step).items()
        )


def test_a_failure_says_how_the_pool_is(pool: hpstore.Pool, tmp_path: Path) -> None:
    """Devices that answer, room, the losses that it still bears: without a look at `status`."""
    pool.close()
    (tmp_path / "d0").rename(tmp_path / "away")
    with (
        hpstore.open(tmp_path / "pool.toml") as opened,
        pytest.MonkeyPatch.context() as patch,
        Checkpointer(opened, RUN) as ckpt,
    ):
        Outage(patch, "/manifest")
        with pytest.raises(
            TooFewDevices,
            match=r"no step was committed before: three devices are away \(pool 'pool': 4 of 5 "
            r"devices answer, [0-9.]+ \w+ free on the fullest, 1 further losses tolerated\)",
        ):
            ckpt.save(1, state_of(1)).result()


def test_warn_goes_on_training(
    pool: hpstore.Pool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither the next save, nor wait, nor close raises; one line a failure. The handle, counters
    and last_failure have it; the step before is current, the next save commits."""
    with Checkpointer(pool, RUN, save=WARN) as ckpt:
        ckpt.save(1, state_of(1)).result()
        with monkeypatch.context() as patch:
            Outage(patch, RUN)
            second, third = ckpt.save(2, state_of(2)), ckpt.save(3, state_of(3))
            ckpt.wait()
        assert isinstance(ckpt.saver.last_failure, TooFewDevices)
        assert ckpt.counters["saves_failed_total"] == 2
        lines = [text for text in caplog.messages if "the training goes on" in text]
        assert len(lines) == 2
        assert "step 2 is not committed, step 1 is still current" in lines[0]
        assert isinstance(second.outcome(), TooFewDevices)
        for handle in (second, third):
            with pytest.raises(TooFewDevices, match="three devices are away"):
                handle.result()
        assert ckpt.steps() == [1]
        ckpt.save(4, state_of(4)).result()
        assert ckpt.saver.last_failure is None
        with monkeypatch.context() as patch:
            Outage(patch, RUN)
            ckpt.save(5, state_of(5))
            ckpt.close()
    assert holds(pool, 1)
    assert holds(pool, 4)


def test_raise_is_the_default_and_raises_once(
    pool: hpstore.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the next save, which then can be made."""
    with Checkpointer(pool, RUN) as ckpt:
        with monkeypatch.context() as patch:
            Outage(patch, RUN)
            failed = ckpt.save(1, state_of(1))
            poll(30, failed.done)
        with pytest.raises(TooFewDevices):
            ckpt.save(2, state_of(2))
        ckpt.save(2, state_of(2)).result()
        assert ckpt.counters["saves_failed_total"] == 1


def test_warn_does_not_bear_another_job_or_a_fault_of_the_program(
    pool: hpstore.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another job that saves here would be so to the end; an error that is not ours is a bug."""
    with Checkpointer(pool, RUN, save=WARN) as ckpt:
        ckpt.save(1, state_of(1)).result()
        with pytest.raises(CheckpointError, match="a/b"):
            ckpt.save(2, {"a": {"b": object()}})
        with monkeypatch.context() as patch:
            Outage(patch, RUN, error=lambda: RuntimeError("a bug"))
            ckpt.save(3, state_of(3))
            with pytest.raises(RuntimeError, match="a bug"):
                ckpt.wait()
        with Checkpointer(pool, RUN) as newcomer:
            newcomer.save(4, state_of(4)).result()
        ckpt.save(5, state_of(5))
        with pytest.raises(VersionConflict):
            ckpt.wait()


@apart
def test_warn_goes_on_when_the_first_slice_cannot_begin(
    pool: hpstore.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state larger than the memory for staging is written while the trainer waits in save()."""
    options = SaveOptions(on_failure="warn", memory="128KiB", warm=False)
    with Checkpointer(pool, RUN, save=options) as ckpt:
        with monkeypatch.context() as patch:
            Outage(patch, "/attempts/")
            handle = ckpt.save(1, state_of(1))
            assert handle.done()
            assert isinstance(handle.outcome(), TooFewDevices)
        ckpt.save(2, state_of(2)).result()
        assert ckpt.counters["sliced_saves_total"] == 2
        assert ckpt.counters["saves_failed_total"] == 1
    assert holds(pool, 2)


@apart
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("word", ["/writer", "/attempts/", "/segment-", "/manifest"])
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_retry_writes_the_staged_bytes_again(
    pool: hpstore.Pool, monkeypatch: pytest.MonkeyPatch, word: str, compression: str | None
) -> None:
    """Whichever put fails twice. The trainer has changed the tensors meanwhile; compressing and
    closing the gap of what is referenced change the arena, once."""
    options = SaveOptions(on_failure="retry", warm=False, compression=compression)
    frozen = torch.randn(50_000)
    with Checkpointer(pool, RUN, rng=False, save=options) as ckpt:
        if word != "/writer":  # the fence: put by the first save alone
            ckpt.save(1, {"frozen": frozen, **state_of(1)}).result()
        with monkeypatch.context() as patch:
            outage = Outage(patch, word, times=2)
            state = {"frozen": frozen, **state_of(2)}
            handle = ckpt.save(2, state)
            state["w"].fill_(-1.0)
            report = handle.result()
        assert outage.came >= 3
        assert ckpt.counters["saves_retried_total"] == 2
        assert ckpt.counters["saves_failed_total"] == 0
        assert (report.referenced_bytes > 0) == (word != "/writer")
        assert ckpt.saver.last_failure is None
        assert torch.equal(ckpt.load(2)["frozen"], frozen)
        assert ckpt.steps.collect_garbage() == 0
        ckpt.save(3, {"frozen": frozen, **state_of(3)}).result()
    assert holds_besides(pool, 2)
    assert holds_besides(pool, 3)


def holds_besides(pool: hpstore.Pool, step: int) -> bool:
    """As holds(), of a step with more in it."""
    with Checkpointer(pool, RUN, save=SaveOptions(warm=False)) as ckpt:
        found = ckpt.load(step, ["w", "n"])
        return ckpt.verify(step).ok and all(
            torch.equal(found[name], value) for name, value in state_of(step).items()
        )


@pytest.mark.usefixtures("quick")
def test_retry_of_a_save_within_its_manifest(
    pool: hpstore.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small save is one put."""
    with Checkpointer(pool, RUN, save=RETRY) as ckpt:
        ckpt.save(1, state_of(1)).result()
        with monkeypatch.context() as patch:
            Outage(patch, "/manifest", times=3)
            ckpt.save(2, state_of(2)).result()
        assert ckpt.counters["saves_retried_total"] == 3
    assert holds(pool, 2)


def visible() -> Exception:
    error = TooFewDevices("one copy was written")
    error.maybe_visible = True
    return error


@apart
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("words", "error", "why"),
    [
        ({}, visible, "its manifest may be there all the same"),
        ({"memory": "128KiB"}, None, "does not hold all of it any more"),
        ({}, lambda: CheckpointError("no"), ""),
        ({}, lambda: RuntimeError("a bug"), ""),
    ],
)
def test_what_cannot_be_tried_again_is_raised(
    pool: hpstore.Pool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    words: dict[str, Any],
    error: Callable[[], Exception] | None,
    why: str,
) -> None:
    """A manifest that may be visible, bytes that are gone, an error that another try would meet."""
    options = SaveOptions(on_failure="retry", warm=False, **words)
    with Checkpointer(pool, RUN, save=options) as ckpt:
        with monkeypatch.context() as patch:
            more = {} if error is None else {"error": error}
            outage = Outage(patch, "/manifest", times=1, **more)
            handle = ckpt.save(1, state_of(1))
            with pytest.raises((TooFewDevices, CheckpointError, RuntimeError)):
                handle.result()
        assert outage.came == 1
        assert ckpt.counters["saves_retried_total"] == 0
        assert why in caplog.text


@pytest.mark.usefixtures("quick")
def test_retry_ends(pool: hpstore.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """After so many attempts, or so many seconds; then it is raised as by "raise"."""
    with Checkpointer(pool, RUN, save=RETRY) as ckpt:
        ckpt.save(1, state_of(1)).result()
        with monkeypatch.context() as patch:
            outage = Outage(patch, "/manifest")
            ckpt.save(2, state_of(2))
            with pytest.raises(TooFewDevices):
                ckpt.wait()
            assert outage.came == save_failures.MAX_ATTEMPTS
    late = SaveOptions(on_failure="retry", retry_seconds=0)
    with Checkpointer(pool, RUN, save=late) as ckpt, monkeypatch.context() as patch:
        outage = Outage(patch, "/manifest")
        ckpt.save(2, state_of(2))
        with pytest.raises(TooFewDevices):
            ckpt.wait()
        assert outage.came == 1


def test_a_newer_save_is_not_kept_waiting_by_retries(
    pool: hpstore.Pool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The one before gets one more attempt at once and is given up with a warning; the newer one
    commits."""
    for name in ("FIRST_WAIT_SECONDS", "LONGEST_WAIT_SECONDS"):
        monkeypatch.setattr(save_failures, name, 10_000.0)
    options = SaveOptions(on_failure="retry", retry_seconds=20_000)
    with Checkpointer(pool, RUN, save=options) as ckpt:
        ckpt.save(1, state_of(1)).result()
        outage = Outage(monkeypatch, "/manifest", times=2)
        older = ckpt.save(2, state_of(2))
        poll(30, lambda: ckpt.counters["saves_retried_total"] == 1)
        assert not older.done()
        ckpt.save(3, state_of(3)).result()
        assert outage.came == 3
        with pytest.raises(TooFewDevices):
            older.result()
        assert "the training goes on (on_failure='retry', 1 saves failed so far)" in caplog.text
        assert ckpt.steps() == [1, 3]


@apart
@pytest.mark.usefixtures("quick")
def test_a_retry_whose_references_are_gone_commits_nothing(
    pool: hpstore.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two attempts the step that the save refers to is deleted: its bytes are staged no
    more."""
    frozen = torch.randn(50_000)
    with Checkpointer(pool, RUN, rng=False, save=RETRY) as ckpt:
        ckpt.save(1, {"frozen": frozen, **state_of(1)}).result()

        def deleted() -> Exception:
            StepCatalog(pool, RUN).delete(1)
            return TooFewDevices("away")

        with monkeypatch.context() as patch:
            Outage(patch, "/segment-", times=1, error=deleted)
            handle = ckpt.save(2, {"frozen": frozen, **state_of(2)})
            with pytest.raises(CheckpointError, match="which the save refers to, is gone"):
                handle.result()
        assert ckpt.steps() == []


def fail_on_one(rank: int, world: int, directory: Path) -> None:
    put_segments()
    with open_pool(directory) as pool:
        with pytest.raises(CheckpointError, match="the ranks have different on_failure"):
            Checkpointer(pool, "run", save=SaveOptions(on_failure="warn" if rank else "raise"))
        with Checkpointer(pool, "run", save=WARN) as ckpt:
            ckpt.save(1, {"mine": ckpt.per_rank(torch.ones(9_000))}).result()

            def away() -> None:
                raise TooFewDevices("away")

            for step, word in ((2, "segment-"), (3, "attempts/"), (4, "manifest")):
                # segments fail on rank 1 alone; notes and manifests are put by rank 0
                restore = breaking_put(pool, word, away) if rank == (step == 2) else None
                handle = ckpt.save(step, {"mine": ckpt.per_rank(torch.ones(9_000))})
                ckpt.wait()
                if restore is not None:
                    restore()
                assert isinstance(handle.outcome(), HpstoreError)
                assert ckpt.saver.last_failure is handle.outcome()
            stage = ckpt.saver._stage._stage

            def full(*_: object) -> NoReturn:
                raise MemoryError("no more")

            if rank:  # what fails as it is staged, on one rank alone, is borne by all as well
                ckpt.saver._stage._stage = full  # type: ignore[method-assign,assignment]
            handle = ckpt.save(5, {"mine": ckpt.per_rank(torch.ones(9_000))})
            ckpt.wait()
            ckpt.saver._stage._stage = stage  # type: ignore[method-assign]
            assert isinstance(handle.outcome(), CheckpointError)
            assert "rank 1: MemoryError" in str(handle.outcome())
            ckpt.save(5, {"mine": ckpt.per_rank(torch.ones(9_000))}).result()
            assert ckpt.steps() == [1, 5]
            assert ckpt.counters["saves_failed_total"] == 4


def test_ranks_bear_a_failure_together(tmp_path: Path) -> None:
    """One rank's put fails, or rank 0's: all go on and save the next step together. Ranks that
    differ are refused."""
    make_pool(tmp_path)
    launch(tmp_path, 2, fail_on_one)


def lose_one(rank: int, world: int, directory: Path) -> None:
    put_segments()
    options = SaveOptions(on_failure="warn", commit_seconds=20, drain_seconds=1)
    with open_pool(directory) as pool:
        ckpt = Checkpointer(pool, "run", save=options)
        ckpt.save(1, {"mine": ckpt.per_rank(torch.ones(9_000))}).result()
        if rank == 1:
            breaking_put(pool, "segment-", lambda: os.kill(os.getpid(), signal.SIGKILL))
        ckpt.save(2, {"mine": ckpt.per_rank(torch.zeros(9_000))})
        with pytest.raises(CheckpointError, match="died or did not answer"):
            ckpt.wait()
        assert ckpt.steps() == [1]


def test_a_rank_that_is_gone_is_never_borne(tmp_path: Path) -> None:
    """It dies while it writes: what is left of the job cannot agree on anything any more."""
    make_pool(tmp_path)
    launch(tmp_path, 2, lose_one, killed=(1,))


def interrupt_one(rank: int, world: int, directory: Path) -> None:
    with open_pool(directory) as pool, Checkpointer(pool, "run", save=WARN) as ckpt:
        state = {"mine": ckpt.per_rank(torch.ones(9_000))}
        ckpt.save(1, state).result()
        stage = ckpt.saver._stage._stage

        def interrupted(*_: object) -> NoReturn:
            raise KeyboardInterrupt

        if rank:
            ckpt.saver._stage._stage = interrupted  # type: ignore[method-assign,assignment]
            with pytest.raises(KeyboardInterrupt):
                ckpt.save(2, state)
            ckpt.saver._stage._stage = stage  # type: ignore[method-assign]
        else:
            ckpt.save(2, state)
            with pytest.raises(CheckpointError, match="rank 1: KeyboardInterrupt"):
                ckpt.wait()
        assert ckpt.steps() == [1]


def test_an_interrupt_of_one_rank_reaches_its_user_and_stops_all(tmp_path: Path) -> None:
    """While it stages, with on_failure="warn": it was borne as any other failure of a rank."""
    make_pool(tmp_path)
    launch(tmp_path, 2, interrupt_one)
