"""A manifest whose put counts although it raised: what it names stays, no error denies it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpstore.errors import (
    DeviceTimeout,
    HpstoreError,
    IngestError,
    RegistersUnavailable,
    VersionConflict,
)
from hpstore.loaders import (
    Dataset,
    DatasetWriter,
    delete_rows,
    delete_version,
    ingest,
    verify_dataset,
)
from hpstore.loaders.dataset.dataset_manifest import journal_key, manifest_key, version_key
from hpstore.loaders.ingestion.ingest_journal import Journal
from hpstore.pool.pool import Pool
from tests.integration.data_sets import FIELDS, SMALL, make_pool, sample, write_samples
from tests.integration.ingest_cases import SHARD, images
from tests.integration.versioned import append


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    with make_pool(tmp_path) as made:
        yield made


def unanswered(monkeypatch: pytest.MonkeyPatch, named: str, error: HpstoreError) -> None:
    """The next put of this key, by default the manifest of a data set of this name, is made, and
    raises as one of which an attempt before it had its name already."""
    put, error.maybe_visible = Pool.put, True

    def putting(pool: Pool, key: str, *args: Any, **options: Any) -> Any:
        made = put(pool, key, *args, **options)
        if key == (named if "/" in named else manifest_key(named)):
            monkeypatch.setattr(Pool, "put", put)
            raise error
        return made

    monkeypatch.setattr(Pool, "put", putting)


EXISTS = "it exists already. The object may have been stored: look."


def test_a_writer_that_meets_its_own_manifest_leaves_what_it_names(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = DatasetWriter(pool, "a", FIELDS, **SMALL)
    for number in range(20):
        writer.write(sample(number))
    unanswered(monkeypatch, "a", VersionConflict(EXISTS))
    with pytest.raises(VersionConflict):
        writer.close()
    assert verify_dataset(pool, "a").clean
    with Dataset(pool, "a") as data:
        assert len(data) == 20


def test_a_change_that_meets_itself_is_made_once_and_keeps_what_it_names(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_samples(pool, "a", range(20))
    unanswered(monkeypatch, "a", VersionConflict(EXISTS))
    with pytest.raises(VersionConflict) as said:
        delete_rows(pool, "a", [3, 4])
    assert "nothing was changed" not in str(said.value)
    unanswered(monkeypatch, "a", VersionConflict(EXISTS))
    with pytest.raises(VersionConflict):
        append(pool, range(20, 25))
    assert verify_dataset(pool, "a").clean
    with Dataset(pool, "a") as data:
        assert len(data) == 23


def test_an_ingest_without_an_answer_does_not_say_that_nothing_is_visible(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "put may have been stored, and is not acknowledged: etcd is away. Look with stat()"
    unanswered(monkeypatch, "a", RegistersUnavailable(text))
    with pytest.raises(RegistersUnavailable, match="is not certain") as said:
        ingest(pool, "a", images(tmp_path / "in", count=6), **SHARD)
    assert said.value.maybe_visible
    assert "Nothing of" not in str(said.value)
    assert verify_dataset(pool, "a").clean


def test_an_ingest_that_meets_its_own_journal_goes_on_when_it_is_called_again(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other process goes on with it, as the error would have it."""
    root = images(tmp_path / "in", count=6)
    unanswered(monkeypatch, journal_key("a"), VersionConflict(EXISTS))
    with pytest.raises(IngestError, match="the same call goes on from there") as said:
        ingest(pool, "a", root, **SHARD)
    assert "that one goes on" not in str(said.value)
    assert ingest(pool, "a", root, **SHARD).samples == 6


def test_an_ingest_is_done_when_its_journal_cannot_be_removed(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That nothing of it is visible would be wrong, and to run it again is refused."""

    def late(_: Journal) -> None:
        raise DeviceTimeout("no answer")

    root = images(tmp_path / "in", count=6)
    monkeypatch.setattr(Journal, "remove", late)
    assert ingest(pool, "a", root, **SHARD).samples == 6
    monkeypatch.undo()
    assert ingest(pool, "a", root, overwrite=True, **SHARD).samples == 6
    assert verify_dataset(pool, "a").clean


def test_a_version_that_was_deleted_is_not_said_to_be_there(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another version's manifest is damaged right after it: what only this one named is left."""
    write_samples(pool, "a", range(10))
    append(pool, range(10, 15), version="more")
    append(pool, range(15, 20))
    delete, damaged = Pool.delete, version_key("a", 2, "more")

    def deleting(there: Pool, key: str) -> None:
        delete(there, key)
        there.put(damaged, b"no manifest")

    monkeypatch.setattr(Pool, "delete", deleting)
    with pytest.raises(HpstoreError, match="version 'v1' of data set 'a' is deleted") as said:
        delete_version(pool, "a", "v1")
    assert "nothing was removed" not in str(said.value)
