"""Small saves: retention once a minute, in batches, without a listing for each save."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest
import torch

from hpstore.checkpoint import Checkpointer, SaveOptions
from hpstore.checkpoint.catalog.retain_steps import retain
from hpstore.checkpoint.catalog.retention import Retention
from hpstore.checkpoint.catalog.step_catalog import StepCatalog
from hpstore.checkpoint.catalog.writer_fence import take_fence
from hpstore.checkpoint.format.checkpoint_manifest import HEAD_BYTES, Manifest, manifest_key
from hpstore.checkpoint.save import after_commit
from hpstore.checkpoint.save.after_commit import AfterCommits
from hpstore.checkpoint.save.commit import StepCommit
from hpstore.checkpoint.save.save_handle import SaveReport
from hpstore.errors import VersionConflict
from hpstore.pool.admin import PoolAdmin
from hpstore.pool.pool import Pool
from hpstore.testing.memory_pool import Harness

T = TypeVar("T")


@pytest.fixture
def pool(tmp_path: object) -> Iterator[Pool]:
    harness = Harness(tmp_path, data=4, parity=2, devices=6)  # type: ignore[arg-type]
    with harness.open() as opened:
        yield opened


class Listings:
    """Counts the listings of a pool."""

    def __init__(self, pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        for place, name in ((Pool, "list"), (PoolAdmin, "versions_under")):
            monkeypatch.setattr(place, name, self._counted(getattr(place, name)))

    def _counted(self, plain: Callable[..., T]) -> Callable[..., T]:
        def counted(*args: object, **options: object) -> T:
            self.count += 1
            return plain(*args, **options)

        return counted


def test_small_saves_list_nothing_and_their_retention_comes_later(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """dd_small_save: seven listings a save before. What retention leaves goes when somebody asks
    for the steps, and at close()."""
    with Checkpointer(pool, "run", keep_last=2, rng=False) as ckpt:
        ckpt.save(1, {"w": torch.zeros(1000)}).result()
        ckpt.wait()
        listings = Listings(pool, monkeypatch)
        for step in range(2, 9):
            ckpt.save(step, {"w": torch.full((1000,), float(step))}).result()
            ckpt.wait()
        assert listings.count == 0
        assert len([k for k in pool.list("run/") if k.endswith("/manifest")]) == 8
        assert ckpt.steps() == [7, 8]
        for step in range(9, 13):
            ckpt.save(step, {"w": torch.full((1000,), float(step))}).result()
    with Checkpointer(pool, "run", rng=False) as other:
        assert other.steps() == [11, 12]
        assert other.steps.collect_garbage() == 0
    assert [key.rsplit("/", 1)[1] for key in pool.list("run/step-")] == ["manifest", "manifest"]


def small_state(seed: int) -> dict[str, Any]:
    drawn = torch.Generator().manual_seed(seed)
    return {
        "w": torch.randn(300, 500, generator=drawn),
        "none": torch.zeros(0, 3),
        "half": torch.randn(7, generator=drawn).half(),
        "row": torch.randn(64, generator=drawn)[::2],
        "text": "x" * 1000,
    }


def same(found: dict[str, Any], wanted: dict[str, Any]) -> bool:
    return all(
        torch.equal(found[n], v) if torch.is_tensor(v) else found[n] == v for n, v in wanted.items()
    )


@pytest.mark.parametrize("codec", ["", "lz4"])
def test_a_small_save_is_one_object(pool: Pool, codec: str) -> None:
    """dd_small_save: no segment, no note; every way of reading finds it, with two devices lost."""
    wanted = small_state(3)
    with Checkpointer(pool, "run", rng=False, save=SaveOptions(compression=codec or None)) as ckpt:
        report = ckpt.save(7, wanted).result()
        ckpt.wait()
        assert set(pool.list("run")) == {"run/writer", manifest_key("run", 7)}
        assert report.losses_tolerated == 2
        assert report.referenced_bytes == 0
        assert 0 < report.bytes < 700_000
        ckpt.save(8, wanted).result()  # the same again: nothing refers to step 7
        ckpt.delete(7)
    with Checkpointer(pool, "run", rng=False) as ckpt:
        for url in list(pool.config.devices)[:2]:
            pool.evict(url)
        into = {**small_state(4), "text": ""}
        assert ckpt.restore(into) == 8
        assert same(into, wanted)
        assert same(ckpt.load(8), {n: v for n, v in wanted.items() if torch.is_tensor(v)})
        assert torch.equal(ckpt.read(8)["w"][3:5, 7:9], wanted["w"][3:5, 7:9])
        assert same(ckpt.read(8).tree(), wanted)
        assert ckpt.verify(8).ok
        assert ckpt.steps.collect_garbage() == 0


@pytest.mark.parametrize(("first", "second"), [(10, 500_000), (500_000, 10), (10, 11)])
def test_a_step_is_overwritten_by_one_of_the_other_form(
    pool: Pool, first: int, second: int
) -> None:
    """Small by large, large by small: nothing of the first is left, also for a later process."""
    with Checkpointer(pool, "run", rng=False) as ckpt:
        ckpt.save(1, {"w": torch.ones(first)}).result()
        ckpt.save(1, {"w": torch.zeros(second)}, overwrite=True).result()
        ckpt.wait()
        assert len(pool.list("run/step-")) == 1 + (second > 458_752)
        assert not pool.list("run/attempts/")
    with Checkpointer(pool, "run", rng=False) as other:
        into = {"w": torch.full((second,), 7.0)}
        assert other.restore(into) == 1
        assert not into["w"].any()
        assert other.steps.collect_garbage() == 0


@pytest.mark.parametrize(("count", "within"), [(458_752, True), (458_753, False)])
def test_how_much_a_manifest_holds(pool: Pool, count: int, within: bool) -> None:
    with Checkpointer(pool, "run", rng=False) as ckpt:
        ckpt.save(1, {"w": torch.ones(count)}).result()
        ckpt.wait()
        assert (len(pool.list("run/step-")) == 1) is within
        into = {"w": torch.zeros(count)}
        assert ckpt.restore(into) == 1
        assert into["w"].eq(1).all()


def test_facts_come_from_the_beginning_of_a_manifest(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who looks through a thousand steps reads no tensors; a long list of names is read whole."""
    with Checkpointer(pool, "run", rng=False) as ckpt:
        ckpt.save(1, small_state(1), metrics={"loss": 1.5}).result()
        ckpt.save(2, {f"weights.{n}": torch.ones(2) for n in range(2000)}).result()
        ckpt.save(3, {}).result()
    read: list[int] = []
    plain = Pool.get

    def counted(inner: Pool, *args: Any, **options: Any) -> bytes:
        data = plain(inner, *args, **options)
        read.append(len(data))
        return data

    monkeypatch.setattr(Pool, "get", counted)
    steps = StepCatalog(pool, "run")
    assert steps.facts(1).metrics == {"loss": 1.5}
    assert read == [HEAD_BYTES]
    assert steps.facts(2).within_bytes > 0
    assert len(read) == 3
    assert steps.facts(3).segments == ()


# Any: a method of Pool
def counting(plain: Any, read: list[str]) -> Any:
    """The same, noting the keys that are asked for."""

    def counted(inner: Pool, key: str, *args: Any, **options: Any) -> Any:
        read.append(key)
        return plain(inner, key, *args, **options)

    return counted


@pytest.mark.parametrize("count", [10, 458_753])
def test_what_was_saved_here_is_known(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Retention reads no manifest that its own session has put, and says the same of it. One that
    was replaced by another session is read."""
    with Checkpointer(pool, "run", keep_last=8, rng=False) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, {"w": torch.ones(count) * step}, metrics={"loss": step}).result()
        ckpt.wait()
        read: list[str] = []
        with monkeypatch.context() as patch:
            for name in ("get", "stat"):
                patch.setattr(Pool, name, counting(getattr(Pool, name), read))
            retain(ckpt._catalog, 3, Retention(keep_last=2), now_ms=0)
            assert manifest_key("run", 1) not in read
        assert ckpt._catalog.all() == [2, 3]
        read.clear()
        monkeypatch.setattr(Pool, "get", counting(Pool.get, read))
        for step in (2, 3):
            assert ckpt._catalog.facts(step).metrics == {"loss": float(step)}
        assert not read
        for step in (2, 3):
            assert ckpt._catalog.facts(step) == StepCatalog(pool, "run").facts(step)
        with Checkpointer(pool, "run", rng=False) as other:
            other.save(3, {"w": torch.zeros(count)}, metrics={"loss": 7.0}, overwrite=True).result()
        read.clear()
        assert ckpt._catalog.facts(3).metrics == {"loss": 7.0}
        assert read == [manifest_key("run", 3)]


def test_a_session_that_lost_the_fence_writes_no_small_save(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fence is looked at under the claim: it moves after everything else was looked at."""
    with Checkpointer(pool, "run", rng=False) as old:
        old.save(1, {"w": torch.ones(9)}).result()
        plain = StepCommit._manifest

        def late(commit: StepCommit, written: Any) -> tuple[Manifest, bytes]:
            take_fence(pool, "run", "another")
            return plain(commit, written)

        monkeypatch.setattr(StepCommit, "_manifest", late)
        with pytest.raises(VersionConflict, match="has begun to save under"):
            old.save(2, {"w": torch.ones(9)}).result()
        assert old.steps() == [1]


def test_many_steps_go_with_few_listings(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    with Checkpointer(pool, "run", rng=False) as ckpt:
        for step in range(1, 41):
            ckpt.save(step, {"w": torch.full((10,), float(step))}).result()
    with Checkpointer(
        pool, "run", keep_last=1, rng=False, save=SaveOptions(prewrite=False)
    ) as ckpt:
        listings = Listings(pool, monkeypatch)
        ckpt.save(41, {"w": torch.zeros(10)}).result()
        assert ckpt.steps() == [41]
        assert listings.count < 16


def report(step: int, nbytes: int = 1000) -> SaveReport:
    return SaveReport(
        step=step,
        key="",
        bytes=nbytes,
        referenced_bytes=0,
        staged_seconds=0.0,
        durable_seconds=0.0,
        losses_tolerated=2,
        spare_columns=2,
    )


class Recording:
    """Steps that note what retention is asked for."""

    def __init__(self, pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pool, self.prefix, self.session = pool, "run", "mine"
        self.retained: list[int] = []
        monkeypatch.setattr(after_commit, "fence_session", lambda *_: self.session)
        monkeypatch.setattr(after_commit, "note_expiring", lambda *_: None)
        monkeypatch.setattr(after_commit, "retain", lambda *words, **_: self.retain(*words))

    def is_whole(self, step: int) -> bool:
        return True

    def retain(self, steps: object, step: int, retention: object) -> None:
        self.retained.append(step)


def test_retention_runs_once_a_minute_or_when_much_is_left(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the first save; within a minute not again, unless a run goes back or saves are large."""
    now, steps = [0.0], Recording(pool, monkeypatch)
    retention = Retention(keep_last=1)
    after = AfterCommits(steps, retention, "mine", {}, clock=lambda: now[0])  # type: ignore[arg-type]
    after.committed(report(1))
    assert steps.retained == [1]
    for step in (2, 3):
        after.committed(report(step))
    assert steps.retained == [1]
    now[0] = 61.0
    after.committed(report(4))
    assert steps.retained == [1, 4]
    after.committed(report(5))
    after.committed(report(3))  # a run that was rolled back
    assert steps.retained == [1, 4, 5]
    after.committed(report(6, after_commit.LEFT_BYTES))
    assert steps.retained == [1, 4, 5, 6]
    after.flush()
    assert steps.retained == [1, 4, 5, 6]
    after.committed(report(7))
    after.flush()
    assert steps.retained == [1, 4, 5, 6, 7]


def test_a_session_that_lost_the_fence_removes_nothing(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it left may be another run's by now: that one went back to an earlier step."""
    steps = Recording(pool, monkeypatch)
    retention = Retention(keep_last=1)
    after = AfterCommits(steps, retention, "mine", {}, clock=lambda: 0.0)  # type: ignore[arg-type]
    after.committed(report(1))
    after.committed(report(2))
    steps.session = "another"
    after.flush()
    assert steps.retained == [1]


def test_what_could_not_be_seen_to_is_seen_to_later(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it is unclear who saves here, and after Ctrl-C in the middle."""
    steps: Any = Recording(pool, monkeypatch)
    retention = Retention(keep_last=1)
    after = AfterCommits(steps, retention, "mine", {}, clock=lambda: 0.0)
    steps.session = None
    after.committed(report(1))
    assert steps.retained == []
    steps.session, retain = "mine", steps.retain

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    steps.retain = interrupted
    with pytest.raises(KeyboardInterrupt):
        after.flush()
    steps.retain = retain
    after.flush()
    after.flush()
    assert steps.retained == [1]
