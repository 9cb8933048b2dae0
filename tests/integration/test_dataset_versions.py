"""Versions of a dataset: append, rows that go, fields that come; what is read stays as it was."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpstore.errors import ConfigError, IntegrityError, ObjectNotFound
from hpstore.loaders import (
    DataLoader,
    Dataset,
    DatasetStore,
    DatasetWriter,
    Field,
    add_field,
    delete_dataset,
    delete_rows,
    delete_version,
    list_versions,
    publish_parts,
    remove_orphans,
    verify_dataset,
)
from hpstore.loaders.dataset.dataset_manifest import manifest_key, version_key
from hpstore.pool.pool import Pool
from tests.integration.data_sets import (
    FIELDS,
    SMALL,
    check_sample,
    make_pool,
    sample,
    write_samples,
)
from tests.integration.versioned import append, holds, names


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    with make_pool(tmp_path) as made:
        yield made


@pytest.mark.parametrize("compression", [None, "lz4"])
def test_what_is_appended_is_a_new_version_and_the_old_one_stays(
    pool: Pool, compression: str | None
) -> None:
    """The same fingerprint as one writer's; both versions are read by name, whole."""
    before = write_samples(pool, "a", range(50), compression=compression)
    append(pool, range(50, 70), version="more")
    append(pool, range(70, 75))
    assert names(pool) == [("v1", 50, False), ("more", 70, False), ("v3", 75, True)]
    assert holds(before, range(50))
    for version, count in (("v1", 50), ("more", 70), ("v3", 75), (None, 75)):
        found = Dataset(pool, "a", version=version)
        assert holds(found, range(count))
        assert found.version == (version or "v3")
    assert verify_dataset(pool, "a").clean
    whole = write_samples(pool, "b", range(75), compression=compression)
    assert whole.fingerprint == Dataset(pool, "a").fingerprint
    with pytest.raises(ObjectNotFound, match="has no version 'v2'; it has v1, more, v3"):
        Dataset(pool, "a", version="v2")


def test_a_shuffled_data_set_is_appended_to_shuffled(pool: Pool) -> None:
    """The samples appended are permuted among themselves; each knows what it was written as."""
    write_samples(pool, "a", range(30), shuffle=True, seed=7)
    append(pool, range(30, 60))
    data = Dataset(pool, "a")
    numbers = data.written_as(np.arange(60))
    assert numbers is not None
    assert sorted(numbers[30:]) == list(range(30)) != list(numbers[30:])
    assert holds(data, [*numbers[:30], *(30 + numbers[30:])])


def test_a_loader_goes_on_while_its_data_set_is_changed(pool: Pool) -> None:
    """Same batches to the end, also in worker processes; a state names the version to open."""
    numbers = range(64)
    write_samples(pool, "a", numbers)
    wanted = [batch["label"].tolist() for batch in loader(Dataset(pool, "a"))]
    made = loader(Dataset(pool, "a"))
    batches = iter(made)
    found = [next(batches)["label"].tolist()]
    append(pool, range(64, 70))
    delete_rows(pool, "a", [0, 1, 2])
    state = made.state_dict()
    found += [batch["label"].tolist() for batch in batches]
    assert found == wanted
    with pytest.raises(ConfigError, match=r"Dataset\(\.\.\., version=\) opens one as it was"):
        loader(Dataset(pool, "a")).load_state_dict(state)
    again = loader(Dataset(pool, "a", version="v1"))
    again.load_state_dict(state)
    assert [batch["label"].tolist() for batch in again] == wanted[1:]


def loader(data: Dataset) -> DataLoader:
    return DataLoader(data, batch_size=8, shuffle=True, seed=1)


def test_a_data_set_pickles_as_the_version_that_it_is(pool: Pool) -> None:
    """Workers that start after a change read what their parent reads; so does a zarr view."""
    old = write_samples(pool, "a", range(10))
    store = pickle.dumps(DatasetStore(pool, "a", fingerprint=old.fingerprint))
    sent = pickle.dumps(old)
    append(pool, range(10, 12))
    assert holds(pickle.loads(sent), range(10))
    assert len(pickle.loads(store)._view()[0]) == 10
    delete_version(pool, "a", "v1")
    with pytest.raises(ConfigError, match="no version of it has fingerprint"):
        pickle.loads(sent)


def test_rows_go_by_number_and_by_predicate(pool: Pool) -> None:
    """The others keep their order and their bytes; parts without a loss are not written anew."""
    write_samples(pool, "a", range(40))
    append(pool, range(40, 60))
    objects = set(pool.list("data/a/"))
    told = delete_rows(pool, "a", [41, -1, 41])
    assert (told.rows, told.version) == (58, "v3")
    left = [n for n in range(60) if n not in (41, 59)]
    assert holds(Dataset(pool, "a"), left)
    new = {key for key in set(pool.list("data/a/")) - objects if "/parts/" not in key}
    parts = Dataset(pool, "a").manifest.parts
    assert [part.rows for part in parts] == [40, 18]
    assert all(f"/{parts[1].nonce}/" in key for key in new)

    delete_rows(pool, "a", lambda columns: columns["label"] % 3 == 0, version="thirds")
    left = [n for n in left if n % 3]
    assert holds(Dataset(pool, "a"), left)
    assert Dataset(pool, "a").fingerprint == fingerprint_of(pool, left)
    assert verify_dataset(pool, "a").clean
    assert holds(Dataset(pool, "a", version="v2"), range(60))


def numbers_in(pool: Pool) -> list[int]:
    with Dataset(pool, "b") as data:
        return [int(data[n]["n"]) for n in range(len(data))]


def test_rows_go_by_numbers_that_are_there(pool: Pool) -> None:
    """bfloat16 comes as numbers, not as its bits; where there is none, the mask says so."""
    fields = {"n": Field("int64"), "b": Field("bfloat16"), "o": Field("float32", optional=True)}
    with DatasetWriter(pool, "b", fields, **SMALL) as writer:
        for number in range(8):
            writer.write({"n": number, "b": number - 4.0, "o": None if number % 2 else 0.0})
    delete_rows(pool, "b", lambda columns: columns["b"] < -2)
    assert numbers_in(pool) == [2, 3, 4, 5, 6, 7]
    delete_rows(pool, "b", lambda columns: (columns["o"] == 0) & columns["o_mask"])
    assert numbers_in(pool) == [3, 5, 7]


def fingerprint_of(pool: Pool, numbers: list[int]) -> str:
    with DatasetWriter(pool, "other", FIELDS, overwrite=True, **SMALL) as writer:
        for number in numbers:
            writer.write(sample(number))
    return Dataset(pool, "other").fingerprint


def test_rows_that_go_are_refused_when_they_are_not_there_or_all(pool: Pool) -> None:
    """Each error leaves the dataset and its objects as they were."""
    write_samples(pool, "a", range(10))
    before = pool.list("data/")
    wrong: list[tuple[Any, str]] = [
        ([10], "no sample 10, it has 10"),
        ([-11], "no sample -11"),
        ([0.5], "whole numbers, or a function"),
        ((n for n in [0]), "rows are a generator"),
        (0, "rows are a int"),
        (range(10), "no sample of data set 'a' would be left"),
        (lambda columns: columns["label"], "one True or False for each"),
        (lambda columns: np.array([True]), "one True or False for each"),
    ]
    for rows, words in wrong:
        with pytest.raises(ConfigError, match=words):
            delete_rows(pool, "a", rows)
    assert delete_rows(pool, "a", []).version == "v1"
    assert pool.list("data/") == before


NEW_FIELDS: dict[str, tuple[Field, Callable[[int], Any]]] = {
    "score": (Field("float64"), float),
    "mask": (Field("uint8", (9,)), lambda n: np.full(9, n % 256, np.uint8)),
    "large": (Field("float32", (600,)), lambda n: np.full(600, n, np.float32)),
    "words": (Field("str"), lambda n: f"word {n}" * (n % 5)),
    "path": (Field("int32", (None, 2)), lambda n: np.full((n % 4, 2), n, np.int32)),
    "maybe": (Field("int16", optional=True), lambda n: None if n % 3 else n),
    "json": (Field("json", optional=True), lambda n: {"n": n} if n % 2 else None),
}


@pytest.mark.parametrize("kind", NEW_FIELDS)
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_field_comes_with_a_value_for_each_sample(
    pool: Pool, kind: str, compression: str | None
) -> None:
    """Single values lie beside what is there; the old version has no such field."""
    made, value = NEW_FIELDS[kind]
    write_samples(pool, "a", range(30), compression=compression, shuffle=True)
    append(pool, range(30, 45))
    numbers = Dataset(pool, "a").scalars("label", np.arange(45))
    shards = {key for key in pool.list("data/a/") if "/stream-" in key}
    told = add_field(
        pool, "a", "new", made, lambda rows: [value(int(numbers[row])) for row in rows]
    )
    assert told.fields is not None
    assert list(told.fields) == [*FIELDS, "new"]
    data = Dataset(pool, "a")
    for row in range(45):
        found = data[row]
        new = found.pop("new")
        check_sample(found, int(numbers[row]))
        wanted = value(int(numbers[row]))
        plain = wanted is None or isinstance(wanted, str | int | float | dict)
        assert new == wanted if plain else np.array_equal(new, wanted)
    beside = kind in ("score", "mask", "maybe")
    assert ({key for key in pool.list("data/a/") if "/stream-" in key} == shards) == beside
    assert verify_dataset(pool, "a").clean
    assert list(Dataset(pool, "a", version="v2").fields) == list(FIELDS)
    assert list(Dataset(pool, "a", fields=["new"])[0]) == ["new"]
    assert written_as(data) == written_as(Dataset(pool, "a", version="v2"))
    assert remove_orphans(pool, "a") == 0
    assert len(Dataset(pool, "a")) == 45


def written_as(data: Dataset) -> Any:
    found = data.written_as(np.arange(len(data)))
    assert found is not None
    return found.tolist()


def test_a_field_is_refused_that_is_there_or_does_not_fit(pool: Pool) -> None:
    """The dataset and its objects are as they were."""
    write_samples(pool, "a", range(10))
    before = pool.list("data/")
    wrong: list[tuple[str, Field, Any, str]] = [
        ("label", Field("int64"), range(10), "has a field 'label'"),
        ("new", Field("int64"), iter(range(10)), "values are a range_iterator"),
        ("new", Field("int64"), range(9), "9 values of field 'new' for 10 samples"),
        ("new", Field("int64"), lambda rows: [1], "1 values of field 'new'"),
        ("new", Field("int64"), ["x"] * 10, "field 'new'"),
        ("new", Field("str"), lambda rows: ["x"], "1 values of field 'new'"),
        ("new", Field("str"), [1] * 10, "field 'new'"),
        ("new/x", Field("int64"), range(10), "field"),
    ]
    for name, made, values, words in wrong:
        with pytest.raises(ConfigError, match=words):
            add_field(pool, "a", name, made, values)
    assert pool.list("data/") == before


def test_what_is_appended_must_fit(pool: Pool, tmp_path: Path) -> None:
    """Errors at once, before anything is written."""
    with pytest.raises(ObjectNotFound, match="no data set 'a'"):
        DatasetWriter(pool, "a", FIELDS, append=True)
    write_samples(pool, "a", range(5))
    fewer = {name: made for name, made in FIELDS.items() if name != "text"}
    with pytest.raises(ConfigError, match="has fields"):
        DatasetWriter(pool, "a", fewer, append=True)
    for wrong in ({"overwrite": True}, {"part": (0, 2)}):
        with pytest.raises(ConfigError, match="append=True goes with neither"):
            DatasetWriter(pool, "a", FIELDS, append=True, **wrong)
    for label in ("", "v7", "a b", "-x", "x" * 65, "a/b"):
        with pytest.raises(ConfigError, match="up to 64 letters"):
            DatasetWriter(pool, "a", FIELDS, append=True, version=label)
    with pytest.raises(ConfigError, match="a new data set begins at v1"):
        DatasetWriter(pool, "b", FIELDS, version="first")
    before = pool.list("data/")
    append(pool, range(0))
    append_nothing = names(pool)
    assert append_nothing == [("v1", 5, True)]
    assert pool.list("data/") == before


def test_a_version_is_deleted_with_what_no_other_names(pool: Pool) -> None:
    """The newest is refused; shared parts stay; an old version that goes leaves no object."""
    write_samples(pool, "a", range(20))
    append(pool, range(20, 30))
    delete_rows(pool, "a", [0])
    with pytest.raises(ConfigError, match="is the newest"):
        delete_version(pool, "a", "v3")
    with pytest.raises(ObjectNotFound, match="no version 'v9'"):
        delete_version(pool, "a", "v9")
    assert delete_version(pool, "a", "v1") == 0  # v2 has its part
    assert delete_version(pool, "a", "v2") > 0
    assert names(pool) == [("v3", 29, True)]
    assert holds(Dataset(pool, "a"), range(1, 30))
    assert remove_orphans(pool, "a") == 0
    delete_dataset(pool, "a")
    assert pool.list("data/") == []


def test_what_replaces_a_data_set_leaves_the_versions_that_are_kept(pool: Pool) -> None:
    """By a writer, and by parts; numbers go on; the dataset goes with all of them."""
    write_samples(pool, "a", range(20))
    append(pool, range(20, 22))
    write_samples(pool, "a", range(5), overwrite=True)
    assert names(pool) == [("v1", 20, False), ("v3", 5, True)]
    assert holds(Dataset(pool, "a", version="v1"), range(20))
    for part in range(2):
        write_part(pool, part)
    publish_parts(pool, "a", overwrite=True)
    assert names(pool) == [("v1", 20, False), ("v4", 4, True)]
    assert holds(Dataset(pool, "a", version="v1"), range(20))
    assert remove_orphans(pool, "a") == 0
    delete_dataset(pool, "a")
    assert pool.list("data/") == []


def write_part(pool: Pool, part: int) -> None:
    with DatasetWriter(pool, "a", FIELDS, part=(part, 2), overwrite=True) as writer:
        for number in (2 * part, 2 * part + 1):
            writer.write(sample(number))


def test_a_damaged_version_keeps_what_it_may_name(pool: Pool) -> None:
    """PROTOCOL 25: nothing is removed while it is not known whose it is; the newest one is read."""
    write_samples(pool, "a", range(20))
    append(pool, range(20, 22))
    append(pool, range(22, 23))
    pool.put(version_key("a", 2, "v2"), b"{}")
    assert [v.problem != "" for v in list_versions(pool, "a")] == [False, True, False]
    with pytest.raises(IntegrityError, match="version v2 of data set 'a' cannot be read"):
        delete_version(pool, "a", "v1")
    with pytest.raises(IntegrityError, match="nothing was removed"):
        remove_orphans(pool, "a")
    write_samples(pool, "a", range(3), overwrite=True)
    assert holds(Dataset(pool, "a", version="v1"), range(20))
    delete_dataset(pool, "a")
    assert pool.list("data/") == []


def test_an_older_hpstore_refuses_a_data_set_with_versions(pool: Pool) -> None:
    """It would remove what versions name. Without versions the bytes are as they were."""
    data = write_samples(pool, "a", range(5))
    assert b'"format":1' in pool.get(manifest_key("a")).replace(b" ", b"")
    append(pool, range(5, 6))
    assert b'"format":2' in pool.get(manifest_key("a")).replace(b" ", b"")
    assert replace(data.manifest, version=1).encode() == pool.get(version_key("a", 1, "v1"))


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 7)),
        st.tuples(st.just("delete"), st.integers(0, 2**30)),
        st.tuples(st.just("forget"), st.integers(0, 2**30)),
    ),
    max_size=7,
)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps=STEPS)
def test_every_version_is_what_it_was_whatever_came_after(pool: Pool, steps: Any) -> None:
    """Against lists: numbers of samples by version, after any changes."""
    fields = {"x": Field("int64"), "t": Field("str")}
    with DatasetWriter(pool, "a", fields, overwrite=True) as writer:
        writer.write_batch({"x": np.arange(6), "t": [str(n) for n in range(6)]})
    for found in list_versions(pool, "a")[:-1]:
        delete_version(pool, "a", found.name)
    first = Dataset(pool, "a").version
    kept, newest, fresh = {first: list(range(6))}, first, 6
    for what, number in steps:
        rows = kept[newest]
        if what == "append":
            with DatasetWriter(pool, "a", fields, append=True) as writer:
                for value in range(fresh, fresh + number):
                    writer.write({"x": value, "t": str(value)})
            rows, fresh = [*rows, *range(fresh, fresh + number)], fresh + number
        elif what == "delete" and len(rows) > 1:
            goes = [at for at in range(len(rows) - 1) if number >> at & 1]
            delete_rows(pool, "a", goes)
            rows = [value for at, value in enumerate(rows) if at not in goes]
        elif what == "forget" and len(kept) > 1:
            old = sorted(set(kept) - {newest})
            going = old[number % len(old)]
            delete_version(pool, "a", going)
            del kept[going]
        newest = Dataset(pool, "a").version
        kept[newest] = rows
    assert sorted(v.name for v in list_versions(pool, "a")) == sorted(kept)
    for version, rows in kept.items():
        data = Dataset(pool, "a", version=version)
        assert [int(s["x"]) for s in data.__getitems__(range(len(data)))] == rows
        assert [s["t"] for s in data.__getitems__(range(len(data)))] == [str(n) for n in rows]
    assert remove_orphans(pool, "a") == 0


def test_a_batch_reads_across_parts_with_later_columns(pool: Pool) -> None:
    """A part appended after a field came has its column under its own nonce; batches mix both."""
    fields = {"x": Field("int64")}
    with DatasetWriter(pool, "a", fields) as writer:
        writer.write_batch({"x": np.arange(10)})
    add_field(pool, "a", "y", Field("int64"), np.arange(10) * 2)
    with DatasetWriter(pool, "a", {**fields, "y": Field("int64")}, append=True) as writer:
        writer.write_batch({"x": np.arange(10, 20), "y": np.arange(10, 20) * 2})
    delete_rows(pool, "a", [3, 13])
    batch = next(iter(DataLoader(Dataset(pool, "a"), batch_size=18)))
    assert torch.equal(batch["x"] * 2, batch["y"])
    assert len(batch["x"]) == 18
    add_field(pool, "a", "z", Field("int64"), lambda rows: np.array(rows))
    assert Dataset(pool, "a")[17]["z"] == 17
    assert verify_dataset(pool, "a").clean
