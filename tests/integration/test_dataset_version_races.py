"""Versions of a dataset: two who change it at once, and what was stopped in between."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpstore
from hpstore.errors import ObjectNotFound, VersionConflict
from hpstore.loaders import (
    Dataset,
    DatasetWriter,
    Field,
    add_field,
    delete_dataset,
    delete_rows,
    remove_orphans,
    verify_dataset,
)
from hpstore.loaders.dataset import dataset_versions, remove_dataset
from hpstore.loaders.dataset.dataset_manifest import DatasetManifest, version_key
from hpstore.loaders.writer import dataset_changes
from hpstore.pool.pool import Pool
from tests.integration.data_sets import FIELDS, make_pool, sample, write_samples
from tests.integration.versioned import append, holds, names


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    with make_pool(tmp_path) as made:
        yield made


def test_of_two_who_append_at_once_both_are_there(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The later one puts its samples behind those of the other, in a version of its own."""
    write_samples(pool, "a", range(10))
    late = DatasetWriter(pool, "a", FIELDS, append=True)
    late.write(sample(30))
    append(pool, range(20, 22))
    late.close()
    assert holds(Dataset(pool, "a"), [*range(10), 20, 21, 30])

    keep = dataset_versions._keep

    def overtaken(*args: Any) -> None:  # between the look at the newest version and the put
        monkeypatch.setattr(dataset_versions, "_keep", keep)
        append(pool, range(40, 41))
        keep(*args)

    monkeypatch.setattr(dataset_versions, "_keep", overtaken)
    append(pool, range(50, 51))
    assert holds(Dataset(pool, "a"), [*range(10), 20, 21, 30, 40, 50])
    assert [version for version, _, _ in names(pool)] == ["v1", "v2", "v3", "v4", "v5"]


@pytest.mark.parametrize("replaced", ["before it is kept", "after it is kept"])
def test_an_append_that_a_replacement_overtakes_leaves_no_version_without_objects(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, replaced: str
) -> None:
    """PROTOCOL 25: what is listed can be read, and the samples come behind what replaced it."""
    write_samples(pool, "a", range(10))
    keep = dataset_versions._keep

    def overtaken(*args: Any) -> None:
        monkeypatch.setattr(dataset_versions, "_keep", keep)
        if replaced == "after it is kept":
            keep(*args)
        write_samples(pool, "a", range(20, 25), overwrite=True)
        if replaced == "before it is kept":
            keep(*args)

    monkeypatch.setattr(dataset_versions, "_keep", overtaken)
    append(pool, range(30, 32))
    assert holds(Dataset(pool, "a"), [*range(20, 25), 30, 31])
    kept = replaced == "after it is kept"
    assert names(pool) == [("v1", 10, False)] * kept + [("v2", 5, False), ("v3", 7, True)]
    for version, _, _ in names(pool):
        assert verify_dataset(pool, "a", version=version).clean
    assert remove_orphans(pool, "a") == 0


def test_a_version_kept_while_objects_go_goes_with_them(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PROTOCOL 25: the other order, in which the change looks before the objects went."""
    old = write_samples(pool, "a", range(10))
    delete = remove_dataset.delete_if_there

    def keeps(there: Pool, key: str) -> None:
        pool.put(version_key("a", 1, "v1"), old.manifest.encode())
        monkeypatch.setattr(remove_dataset, "delete_if_there", delete)
        delete(there, key)

    monkeypatch.setattr(remove_dataset, "delete_if_there", keeps)
    write_samples(pool, "a", range(5), overwrite=True)
    assert names(pool) == [("v2", 5, True)]


def test_a_part_that_is_written_again_takes_no_version(pool: Pool) -> None:
    """Its note has a number, too, which is none of a version."""
    write_samples(pool, "a", range(10))
    append(pool, range(10, 12))
    for number in range(2):
        with DatasetWriter(pool, "a", FIELDS, part=(0, 2), overwrite=True) as writer:
            writer.write(sample(number))
    assert names(pool) == [("v1", 10, False), ("v2", 12, True)]


def test_rows_go_beside_an_append_but_not_beside_another_change(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was appended meanwhile stays; of two who take rows away one is refused, nothing left."""
    write_samples(pool, "a", range(10))
    meanwhile(monkeypatch, lambda: append(pool, range(10, 12)))
    delete_rows(pool, "a", [0])
    assert holds(Dataset(pool, "a"), range(1, 12))

    meanwhile(monkeypatch, lambda: delete_rows(pool, "a", [3]))
    with pytest.raises(VersionConflict, match="changed by another process meanwhile"):
        delete_rows(pool, "a", [5])
    assert holds(Dataset(pool, "a"), [1, 2, 3, *range(5, 12)])
    meanwhile(monkeypatch, lambda: append(pool, range(12, 13)))
    with pytest.raises(VersionConflict, match="changed by another process meanwhile"):
        add_field(pool, "a", "new", Field("int64"), range(10))
    assert remove_orphans(pool, "a") == 0


def meanwhile(monkeypatch: pytest.MonkeyPatch, other: Callable[[], object]) -> None:
    """Another process does something right before the next change is published."""
    change = dataset_versions.change_dataset

    def late(*args: Any, **options: Any) -> DatasetManifest:
        monkeypatch.setattr(dataset_changes, "change_dataset", change)
        other()
        return change(*args, **options)

    monkeypatch.setattr(dataset_changes, "change_dataset", late)


def test_a_field_of_a_data_set_that_is_deleted_meanwhile_leaves_nothing(pool: Pool) -> None:
    write_samples(pool, "a", range(10))

    def values(rows: range) -> Any:
        delete_dataset(pool, "a")
        return np.zeros(len(rows), np.int8)

    with pytest.raises(ObjectNotFound, match="no data set 'a'"):
        add_field(pool, "a", "score", Field("int8"), values)
    assert pool.list("data/a/") == []


def test_a_name_of_a_version_is_given_once(pool: Pool) -> None:
    """The one who comes second is refused; what it wrote is gone."""
    write_samples(pool, "a", range(5))
    append(pool, range(5, 6), version="x")
    append(pool, range(6, 7))
    before = pool.list("data/")
    with pytest.raises(VersionConflict, match="has a version 'x'; nothing was changed"):
        append(pool, range(7, 8), version="x")
    assert pool.list("data/") == before
    assert holds(Dataset(pool, "a"), range(7))


def test_a_change_that_was_stopped_before_its_manifest_changes_nothing(pool: Pool) -> None:
    """The manifest of the newest version is there twice then; the next change goes on."""
    data = write_samples(pool, "a", range(20))
    pool.put(version_key("a", 1, "v1"), data.manifest.encode())
    assert names(pool) == [("v1", 20, True)]
    assert holds(Dataset(pool, "a", version="v1"), range(20))
    append(pool, range(20, 22))
    assert names(pool) == [("v1", 20, False), ("v2", 22, True)]


def test_a_record_of_a_deleted_data_set_is_not_taken_for_a_version(pool: Pool) -> None:
    """It would be read as what it is not: the change is refused, and says what to do."""
    other = write_samples(pool, "b", range(3))
    pool.put(version_key("a", 1, "v1"), other.manifest.encode())
    write_samples(pool, "a", range(20))
    with pytest.raises(VersionConflict, match="is of a data set 'a' that was deleted"):
        append(pool, range(20, 22))
    assert holds(Dataset(pool, "a"), range(20))


def _append_in_a_process(config: str, first: int) -> None:
    with hpstore.open(config) as opened:
        append(opened, range(first, first + 3))


def test_processes_append_at_once(pool: Pool, tmp_path: Path) -> None:
    """Four of them: all samples are there, each part in its order."""
    write_samples(pool, "a", range(5))
    context = multiprocessing.get_context("forkserver")
    config = str(tmp_path / "pool.toml")
    started = [
        context.Process(target=_append_in_a_process, args=(config, 10 * n)) for n in range(1, 5)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join()
        assert process.exitcode == 0
    data = Dataset(pool, "a")
    labels = data.scalars("label", np.arange(len(data))).tolist()
    assert labels[:5] == list(range(5))
    triples = sorted(tuple(labels[at : at + 3]) for at in range(5, 17, 3))
    assert triples == [(10 * n, 10 * n + 1, 10 * n + 2) for n in range(1, 5)]
    assert [version for version, _, _ in names(pool)] == ["v1", "v2", "v3", "v4", "v5"]
