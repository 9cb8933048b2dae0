"""Data sets become visible at once or not at all: names, parts, removal, crashes."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpstore.devices.wrappers import SimulatedCrash
from hpstore.errors import ConfigError, HpstoreError, ObjectNotFound, TooFewDevices, VersionConflict
from hpstore.loaders import (
    Dataset,
    DatasetWriter,
    Field,
    delete_dataset,
    publish_parts,
    remove_orphans,
    verify_dataset,
    written_parts,
)
from hpstore.loaders.dataset import publish_dataset, remove_dataset
from hpstore.loaders.dataset.stored_manifests import published_manifest
from hpstore.pool.pool import Pool
from hpstore.testing.memory_pool import Harness
from hpstore.units import KIB
from tests.integration.data_sets import (
    FIELDS,
    SMALL,
    check_sample,
    make_pool,
    sample,
    write_samples,
)

COUNT = 60


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    with make_pool(tmp_path) as made:
        yield made


def nothing_but(pool: Pool, *keys: str) -> bool:
    return pool.list("data/") == sorted(keys)


def stored(writer: DatasetWriter) -> None:
    """Wait for the thread that puts what is full."""
    writer._part_writers[0]._uploads.settle()
    assert writer.pool.list(f"data/{writer.name}/")


def test_nothing_is_visible_before_close_and_nothing_after_an_exception(pool: Pool) -> None:
    """Abandoned writers leave no object; the error is the caller's."""
    writer = DatasetWriter(pool, "a", FIELDS, **SMALL)

    def work() -> None:
        with writer:
            for number in range(COUNT):
                writer.write(sample(number))
            with pytest.raises(ObjectNotFound, match="no data set 'a'"):
                Dataset(pool, "a")
            assert pool.list("data/a/")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    assert nothing_but(pool)
    with pytest.raises(ConfigError, match="abandoned"):
        writer.write(sample(0))


@pytest.mark.parametrize("append", [False, True])
def test_a_writer_whose_data_set_is_deleted_publishes_nothing(pool: Pool, append: bool) -> None:
    """It published a data set without the objects that were deleted with it."""
    if append:
        write_samples(pool, "a", range(3))
    writer = DatasetWriter(pool, "a", FIELDS, append=append, **({} if append else SMALL))
    for number in range(COUNT):
        writer.write(sample(number))
    stored(writer)
    delete_dataset(pool, "a")
    with pytest.raises((VersionConflict, ObjectNotFound), match=r"was deleted while|no data set"):
        writer.close()
    assert nothing_but(pool)


@pytest.mark.parametrize("late", [False, True])
def test_a_deletion_and_a_writer_see_each_other(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """PROTOCOL 25: the manifest is put while the deletion is between the manifest and the objects,
    or (`late`) behind its last look. Either takes it away again."""
    put, look = publish_dataset._require_whole, published_manifest
    writer = DatasetWriter(pool, "a", FIELDS, **SMALL)
    for number in range(COUNT):
        writer.write(sample(number))
    monkeypatch.setattr(publish_dataset, "_require_whole", put if late else lambda *_: None)
    looks: list[str] = []

    def looking(*given: Any) -> Any:  # Any: passed on
        looks.append("again" if looks else "first")
        if not late and looks[-1] == "again":
            writer.close()
        return look(*given)

    monkeypatch.setattr(remove_dataset, "published_manifest", looking)
    stored(writer)
    delete_dataset(pool, "a")
    assert looks == ["first", "again"]
    if late:
        with pytest.raises(VersionConflict, match="deleted while it was written"):
            writer.close()
    with pytest.raises(ObjectNotFound):
        Dataset(pool, "a")


def test_a_taken_name_is_kept_unless_overwrite(pool: Pool) -> None:
    """Refused at the start, and at the end when two writers raced: the first one's is unchanged."""
    with DatasetWriter(pool, "a", FIELDS, **SMALL) as first:
        late = DatasetWriter(pool, "a", FIELDS, **SMALL)
        first.write(sample(1))
    late.write(sample(2))
    with pytest.raises(VersionConflict):
        late.close()
    with pytest.raises(VersionConflict, match="overwrite=True"):
        DatasetWriter(pool, "a", FIELDS)
    data = Dataset(pool, "a")
    check_sample(data[0], 1)
    assert {key.split("/")[2] for key in pool.list("data/a/")} == {
        "manifest",
        data.manifest.parts[0].nonce,
    }


def test_overwrite_replaces_and_tells_those_who_read_the_old_one(pool: Pool) -> None:
    """Old objects go; an open data set says that it was replaced, also when it moves process."""
    old = write_samples(pool, "a", range(20))
    copy = pickle.dumps(old)
    new = write_samples(pool, "a", range(20, 25), overwrite=True)
    assert new.fingerprint != old.fingerprint
    for number, found in enumerate(new.__getitems__(range(5)), 20):
        check_sample(found, number)
    with pytest.raises(ObjectNotFound, match=f"replaced or deleted.*{old.fingerprint}"):
        old[0]
    with pytest.raises(ConfigError, match="was replaced"):
        pickle.loads(copy)
    assert remove_orphans(pool, "a") == 0


def test_parts_are_published_together(pool: Pool) -> None:
    """Missing ones are named; the result is that of one writer of all samples."""
    whole = write_samples(pool, "whole", range(COUNT))
    bounds = [0, 25, 25, COUNT]  # the part in the middle is empty
    for i in (2, 0):
        with DatasetWriter(pool, "a", FIELDS, part=(i, 3), **SMALL) as writer:
            for number in range(bounds[i], bounds[i + 1]):
                writer.write(sample(number))
        assert sorted(written_parts(pool, "a")) == ([(2, 3)] if i else [(0, 3), (2, 3)])
    with pytest.raises(ConfigError, match="lacks part 1 of 3"):
        publish_parts(pool, "a")
    with pytest.raises(ObjectNotFound, match="publish_parts"):
        Dataset(pool, "a")
    with pytest.raises(VersionConflict):
        DatasetWriter(pool, "a", FIELDS, part=(0, 3))
    with DatasetWriter(pool, "a", FIELDS, part=(1, 3), **SMALL):
        pass
    info = publish_parts(pool, "a", metadata={"by": "three"})
    data = Dataset(pool, "a")
    assert data.fingerprint == info.fingerprint == whole.fingerprint
    assert (info.rows, info.parts, data.metadata) == (COUNT, 3, {"by": "three"})
    for number, found in enumerate(data.__getitems__(range(COUNT))):
        check_sample(found, number)
    assert data.stripes()[-1] == COUNT
    assert verify_dataset(pool, "a").clean
    assert written_parts(pool, "a") == {}
    with pytest.raises(ConfigError, match="no parts"):
        publish_parts(pool, "a")


def test_parts_that_differ_are_not_mixed(pool: Pool) -> None:
    """Other fields, other counts of parts, parts that were published before."""
    for part, fields in [((0, 2), {"y": Field("int8")}), ((1, 2), {"y": Field("int16")})]:
        with DatasetWriter(pool, "a", fields, part=part):
            pass
    with pytest.raises(ConfigError, match="part 1 has fields"):
        publish_parts(pool, "a")
    with DatasetWriter(pool, "a", {"y": Field("int8")}, part=(0, 3)):
        pass
    with pytest.raises(ConfigError, match="different counts"):
        publish_parts(pool, "a")
    delete_dataset(pool, "a")
    for i in range(2):
        with DatasetWriter(pool, "a", {"y": Field("int8")}, part=(i, 2)) as writer:
            writer.write({"y": i})
    notes = {key: pool.get(key) for key in pool.list("data/a/parts/")}
    publish_parts(pool, "a")
    for key, note in notes.items():  # as if the process had died before it removed them
        pool.put(key, note)
    with pytest.raises(ConfigError, match="no parts"):
        publish_parts(pool, "a", overwrite=True)
    with DatasetWriter(pool, "a", {"y": Field("int8")}, part=(0, 2), overwrite=True) as writer:
        writer.write({"y": 7})
    with pytest.raises(ConfigError, match="lacks part 1 of 2"):
        publish_parts(pool, "a", overwrite=True)
    assert Dataset(pool, "a").scalars("y", np.arange(2)).tolist() == [0, 1]


def test_deleting_takes_everything_of_it_and_nothing_else(pool: Pool) -> None:
    """Also parts and leftovers; not the data set whose name begins the same."""
    other = write_samples(pool, "a/b", range(3))
    write_samples(pool, "a", range(3))
    with DatasetWriter(pool, "a", FIELDS, part=(0, 2), overwrite=True, **SMALL) as writer:
        writer.write(sample(0))
    pool.put("data/a/0123456789abcdef/stream-0/000000", b"left")
    delete_dataset(pool, "a")
    assert all(key.startswith("data/a/b/") for key in pool.list("data/"))
    check_sample(other[2], 2)
    with pytest.raises(ObjectNotFound, match="no data set 'a'"):
        delete_dataset(pool, "a")


def test_a_failed_put_fails_the_writer_and_publishes_nothing(tmp_path: Path) -> None:
    """Too few devices in mid-write: the next write raises, and the one after, and close."""
    harness = Harness(tmp_path, data=2, parity=1, devices=3)
    with harness.open() as pool:
        writer = DatasetWriter(pool, "a", FIELDS, **SMALL)
        harness.lose(harness.urls[:2])

        def work() -> None:
            for number in range(COUNT):
                writer.write(sample(number))

        with pytest.raises(TooFewDevices):
            work()
        with pytest.raises(ConfigError, match="failed before; nothing was published"):
            writer.write(sample(0))
        harness.bring_back()
        with pytest.raises(ConfigError, match="failed before"):
            writer.close()
        pool.admin.refresh()
        assert nothing_but(pool)


def test_an_error_after_the_manifest_went_out_removes_nothing(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PROTOCOL 8: an unacknowledged put may be visible; then its samples must be there."""
    put = Pool.put

    def fails_late(self: Pool, key: str, *args: Any, **options: Any) -> Any:
        done = put(self, key, *args, **options)
        if key.endswith("/manifest"):
            raise TooFewDevices("no acknowledgement")
        return done

    writer = DatasetWriter(pool, "a", FIELDS, **SMALL)
    writer.write(sample(0))
    monkeypatch.setattr(Pool, "put", fails_late)
    with pytest.raises(TooFewDevices):
        writer.close()
    monkeypatch.undo()
    check_sample(Dataset(pool, "a")[0], 0)
    assert remove_orphans(pool, "a") == 0


def test_overwriting_a_published_part_leaves_the_data_set_whole(pool: Pool) -> None:
    """Its note was still there: the new part replaces the note, not what is published."""
    with DatasetWriter(pool, "a", {"y": Field("int8")}, part=(0, 1)) as writer:
        writer.write({"y": 1})
    note = pool.get("data/a/parts/0-of-1")
    publish_parts(pool, "a")
    pool.put("data/a/parts/0-of-1", note)  # as if the process had died before it removed it
    with DatasetWriter(pool, "a", {"y": Field("int8")}, part=(0, 1), overwrite=True) as writer:
        writer.write({"y": 2})
    assert Dataset(pool, "a").scalars("y", np.arange(1)).tolist() == [1]
    publish_parts(pool, "a", overwrite=True)
    assert Dataset(pool, "a").scalars("y", np.arange(1)).tolist() == [2]
    assert len(pool.list("data/a/")) == 2


def test_closing_is_all_or_nothing_at_every_crash_point(tmp_path: Path) -> None:
    """PROTOCOL 4, 6: all devices die before operation i; the data set is whole or not there."""
    batch = {"x": np.full((30, 9000), 5, np.uint8), "y": np.arange(30, dtype=np.int8)}
    crash_at, finished, seen = 0, False, set[str]()
    while not finished:
        directory = tmp_path / str(crash_at)
        directory.mkdir()
        harness = Harness(directory, data=2, parity=1, devices=3)
        pool, operations = harness.open_crashing(crash_at)
        try:
            with DatasetWriter(
                pool,
                "a",
                {"x": Field("uint8", (9000,)), "y": Field("int8")},
                unit_bytes=4 * KIB,
                shard_bytes=150 * KIB,
            ) as writer:
                writer.write_batch(batch)
            finished = operations[0] <= crash_at
        except (SimulatedCrash, HpstoreError):
            pass
        harness.power_cut()
        with harness.open() as again:
            try:
                data = Dataset(again, "a")
            except ObjectNotFound:
                seen.add("nothing")
                assert not finished
            else:
                seen.add("all")
                assert verify_dataset(again, "a").clean
                assert len(data) == 30
        crash_at += 7
    assert seen == {"nothing", "all"}
