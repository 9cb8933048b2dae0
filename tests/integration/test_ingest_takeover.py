"""An ingest beside another one of the same name, and one that takes over what another has left."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hpstore.errors import IngestError, ObjectNotFound, VersionConflict
from hpstore.loaders import (
    Dataset,
    IngestProgress,
    IngestReport,
    delete_dataset,
    ingest,
    unfinished_ingests,
    verify_dataset,
)
from hpstore.loaders.dataset.dataset_manifest import nonce_of
from hpstore.loaders.dataset.publish_dataset import joined_content
from hpstore.loaders.ingestion.ingest_journal import Journal, Progressed
from hpstore.pool.pool import Pool
from tests.integration.ingest_cases import (
    SHARD,
    Stop,
    cut_short,
    images,
    keys_left,
    make_pool,
    rows,
    stop_after,
    wanted_rows,
)


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    with make_pool(tmp_path) as made:
        yield made


def test_of_two_ingests_of_one_name_one_stops(pool: Pool, tmp_path: Path) -> None:
    """The journal tells: the one that is behind ends, the data set of the other is whole. Which one
    that is depends on whether the first has finished a part when the second one begins."""
    root = images(tmp_path / "in")
    done: list[IngestReport] = []
    stopped: list[Exception] = []

    def run(progress: Callable[[IngestProgress], None] | None = None) -> None:
        try:
            done.append(ingest(pool, "train", root, progress=progress, **SHARD))
        except (IngestError, VersionConflict) as error:
            stopped.append(error)

    def other(now: IngestProgress) -> None:
        if now.records == 30 and not (done or stopped):
            run()

    run(other)
    assert len(done) == 1
    (error,) = stopped
    assert re.search("another process|exists", str(error))
    assert sorted(rows(pool, "train")) == sorted(wanted_rows(root))
    assert verify_dataset(pool, "train").clean


@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize("after", [1, 30])
def test_an_ingest_that_is_behind_removes_nothing(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int, resume: bool
) -> None:
    """Another one goes on between its look at the journal and its first word there: what that one
    is writing stays. Without another one, the same call removes it and is whole."""
    root = images(tmp_path / "in")
    kept = cut_short(pool, "cut", root, after)
    assert (kept > 0) == (after > 1)
    writing = [f"data/cut/{n}/begun" for n in unfinished_ingests(pool)["cut"].writing]
    for key in writing:
        pool.put(key, b"half a part")
    before, plain = keys_left(pool, "cut"), Journal.read

    def overtaken(self: Journal) -> Progressed | None:
        monkeypatch.setattr(Journal, "read", plain)
        found, other = plain(self), Journal(pool, "cut")
        told = other.read()
        assert told is not None
        other.save(told)
        return found

    monkeypatch.setattr(Journal, "read", overtaken)
    with pytest.raises(IngestError, match="another process"):
        ingest(pool, "cut", root, resume=resume, **SHARD)
    assert keys_left(pool, "cut") == before
    report = ingest(pool, "cut", root, resume=resume, **SHARD)
    assert report.resumed_samples == (kept if resume else 0)
    assert verify_dataset(pool, "cut").clean
    assert not set(writing) & set(keys_left(pool, "cut"))
    with Dataset(pool, "cut") as found:
        nonces = {part.nonce for part in found.manifest.parts}
    assert {nonce_of("cut", key) for key in keys_left(pool, "cut")} <= {None, *nonces}


@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_an_ingest_that_ends_as_it_takes_over_leaves_nothing_behind(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int, resume: bool
) -> None:
    """Before its first word, after it, and in the midst of removing what an earlier one left: the
    next one knows all of that, and removes it."""
    root = images(tmp_path / "in")
    kept, left = cut_short(pool, "cut", root, 30), [steps]
    for nonce in unfinished_ingests(pool)["cut"].writing:
        for number in range(4):
            pool.put(f"data/cut/{nonce}/{number}", b"begun")

    def dying(plain: Any) -> Any:  # Any: a method, and what it is given
        def call(*given: Any, **options: Any) -> Any:
            if not left[0]:
                raise Stop
            left[0] -= 1
            return plain(*given, **options)

        return call

    with monkeypatch.context() as patched:
        patched.setattr(Pool, "put", dying(Pool.put))
        patched.setattr(Pool, "delete", dying(Pool.delete))
        with pytest.raises(Stop):
            ingest(pool, "cut", root, resume=resume, **SHARD)
    assert unfinished_ingests(pool)["cut"].rows == (kept if resume or not steps else 0)
    ingest(pool, "cut", root, **SHARD)
    assert verify_dataset(pool, "cut").clean
    with Dataset(pool, "cut") as found:
        nonces = {part.nonce for part in found.manifest.parts}
    assert {nonce_of("cut", key) for key in keys_left(pool, "cut")} <= {None, *nonces}


def test_an_ingest_whose_parts_another_one_removes_publishes_nothing(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one begins anew when all is written but the manifest."""
    root = images(tmp_path / "in")
    where = "hpstore.loaders.ingestion.part_committer.joined_content"

    def joined(*given: Any) -> Any:  # Any: passed on
        found = joined_content(*given)
        monkeypatch.setattr(where, joined_content)
        with pytest.raises(Stop):
            ingest(pool, "cut", root, resume=False, progress=stop_after(1), **SHARD)
        return found

    monkeypatch.setattr(where, joined)
    with pytest.raises(IngestError, match="another process"):
        ingest(pool, "cut", root, **SHARD)
    with pytest.raises(ObjectNotFound):
        Dataset(pool, "cut")


@pytest.mark.parametrize("when", [30, 60])
def test_an_ingest_whose_data_set_is_deleted_leaves_nothing(
    pool: Pool, tmp_path: Path, when: int
) -> None:
    """In the midst of it, and when all is read: parts that are finished later go, too."""
    root = images(tmp_path / "in")

    def delete(now: IngestProgress) -> None:
        if now.records == when:
            delete_dataset(pool, "gone")

    with pytest.raises(IngestError, match="was ended meanwhile by another process"):
        ingest(pool, "gone", root, progress=delete, **SHARD)
    assert keys_left(pool, "gone") == []


def test_an_ingest_that_another_one_takes_over_leaves_what_that_one_knows(
    pool: Pool, tmp_path: Path
) -> None:
    """The other one is cut short then. Of the first one there is nothing that no journal names."""
    root = images(tmp_path / "in")

    def taken(now: IngestProgress) -> None:
        """Between two parts of eight: the third one is in the journal, the fourth is not full."""
        if now.records == 28:
            assert any(unfinished_ingests(pool)["cut"].rows == 24 for _ in range(10_000))
            cut_short(pool, "cut", root, 50)

    with pytest.raises(IngestError, match="another process"):
        ingest(pool, "cut", root, progress=taken, **SHARD)
    left = unfinished_ingests(pool)["cut"]
    named = {None, *left.writing, *(part.nonce for part in left.parts)}
    assert {nonce_of("cut", key) for key in keys_left(pool, "cut")} <= named
    assert ingest(pool, "cut", root, **SHARD).resumed_samples == left.rows > 0
    assert sorted(rows(pool, "cut")) == sorted(wanted_rows(root))
