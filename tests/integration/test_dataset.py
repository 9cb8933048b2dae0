"""Data sets on real directories: written, read back, refused, shuffled."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset

from hpstore.errors import ConfigError
from hpstore.loaders import (
    Dataset,
    DatasetWriter,
    Field,
    delete_dataset,
    list_datasets,
    verify_dataset,
)
from hpstore.loaders.writer import stream_writer
from hpstore.maintenance.rebuild import Progress
from hpstore.pool.pool import Pool
from tests.integration.data_sets import (
    FIELDS,
    SMALL,
    check_sample,
    make_pool,
    sample,
    write_samples,
)

COUNT = 60

OLD_CORPUS = b'{"format": 1, "shards": [5]}'  # as hpstore wrote before it had data sets


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    with make_pool(tmp_path) as made:
        yield made


@pytest.mark.parametrize("layout", ["rows", "columns"])
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_samples_come_back(pool: Pool, layout: str, compression: str | None) -> None:
    """One by one, from the end, many at once, in threads; several shards; verify is clean."""
    data = write_samples(pool, "train", range(COUNT), layout=layout, compression=compression)
    assert len(data) == COUNT
    assert list(data.fields) == list(FIELDS)
    big = [stream for stream in data.streams if stream.name in ("rows", "image", "raw")]
    assert all(stream.shard_count > 1 for stream in big)
    check_sample(data[7], 7)
    check_sample(data[-1], COUNT - 1)
    order = [3, 3, *range(COUNT)]
    for number, found in zip(order, data.__getitems__(order), strict=True):
        check_sample(found, number)
    assert data.__getitems__([]) == []
    for bad in (COUNT, -COUNT - 1):
        with pytest.raises(IndexError, match=f"which has {COUNT}"):
            data[bad]
    failed: list[Exception] = []

    def read(first: int) -> None:
        try:
            for number in range(first, COUNT, 4):
                check_sample(data[number], number)
        except Exception as error:  # noqa: BLE001 (raised by the test)
            failed.append(error)

    threads = [threading.Thread(target=read, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed
    seen: list[Progress] = []
    report = verify_dataset(pool, "train", progress=seen.append)
    assert report.clean
    assert json.loads(json.dumps(report.as_dict()))["clean"]
    assert seen[-1].done == seen[-1].total == len(seen)
    data.close()


def test_fields_can_be_chosen(pool: Pool) -> None:
    """In the order asked for; streams without one of them are not read."""
    write_samples(pool, "train", range(8), layout="columns")
    data = Dataset(pool, "train", fields=["label", "raw"])
    assert [stream.name for stream in data.streams] == ["raw"]
    assert list(data[3]) == ["label", "raw"]
    assert data.stripes().tolist() == Dataset(pool, "train").stripes().tolist()
    assert data[3]["raw"] == sample(3)["raw"]
    with pytest.raises(ConfigError, match="no field 'rwa'"):
        Dataset(pool, "train", fields=["rwa"])
    assert len(Dataset(pool, "train", fields=["box"])[2]["box"]) == 4


def test_torchs_own_loader_takes_it(pool: Pool) -> None:
    """DataLoader with and without a worker, Subset, default_collate of fixed fields."""
    with DatasetWriter(pool, "x", {"x": Field("float32", (30,)), "y": Field("int64")}) as writer:
        writer.write_batch({"x": torch.arange(3000.0).reshape(100, 30), "y": np.arange(100)})
    data = Dataset(pool, "x")
    for workers in (0, 1):
        loader = DataLoader(
            Subset(data, range(10, 50)),
            batch_size=8,
            num_workers=workers,
            multiprocessing_context="fork" if workers else None,
        )
        seen = [(batch["x"][:, 0].tolist(), batch["y"].tolist()) for batch in loader]
        assert [n for _, y in seen for n in y] == list(range(10, 50))
        assert [n for x, _ in seen for n in x] == [30.0 * n for n in range(10, 50)]


def test_a_write_that_is_refused_leaves_the_writer_usable(pool: Pool) -> None:
    """Wrong dtype, shape, field, row counts: named; the good samples around them are stored."""
    with DatasetWriter(pool, "train", FIELDS, **SMALL) as writer:
        assert writer.write(sample(0)) == 0
        good = sample(1)
        for wrong, says in [
            ({**good, "image": good["image"].astype(np.int8)}, "sample 1: field 'image' has dtype"),
            ({**good, "image": good["image"][:2]}, r"field 'image' has shape \(2, 40, 40\)"),
            ({**good, "sound": good["sound"][0]}, "field 'sound' has shape"),
            ({**good, "text": b"x"}, "field 'text' is a bytes"),
            ({k: v for k, v in good.items() if k != "box"}, "lacks field 'box'"),
            ({**good, "more": 1}, "'more', which is no field"),
        ]:
            with pytest.raises(ConfigError, match=says):
                writer.write(wrong)
        with pytest.raises(ConfigError, match="different numbers of rows"):
            writer.write_batch(
                {name: [value] * (1 + (name == "label")) for name, value in good.items()}
            )
        assert len(writer) == 1
        assert writer.write_batch({name: [value] for name, value in good.items()}) == range(1, 2)
    data = Dataset(pool, "train")
    for number in range(2):
        check_sample(data[number], number)


def test_an_empty_data_set_is_one(pool: Pool) -> None:
    """No samples: length 0, no stripes, clean; of scalars alone too."""
    for name, fields in [("a", FIELDS), ("b", {"y": Field("int8")})]:
        with DatasetWriter(pool, name, fields):
            pass
        data = Dataset(pool, name)
        assert len(data) == 0
        assert data.stripes().tolist() == [0]
        assert verify_dataset(pool, name).clean
        with pytest.raises(IndexError):
            data[0]


def test_a_record_longer_than_a_shard_makes_its_shard_longer(pool: Pool) -> None:
    """Between small ones; it crosses pages, which locate says."""
    values = [b"a", os.urandom(2_000_000), b"b", os.urandom(100_000)]
    with DatasetWriter(pool, "x", {"x": Field("bytes")}, **SMALL) as writer:
        writer.write_batch({"x": values})
    data = Dataset(pool, "x")
    assert [found["x"] for found in data.__getitems__(range(4))] == values
    assert data.locate(data.streams[0], np.arange(4)).page.tolist()[1] == -1
    assert data.streams[0].rows.tolist() == [1, 3]
    assert verify_dataset(pool, "x").clean


@pytest.mark.parametrize("rows", [300, 17_000])
def test_batches_of_many_sizes_choose_their_page(pool: Pool, rows: int) -> None:
    """Held back until the mean is known, or until close: every row is its own."""
    values = [str(row).encode() * (row % 7) for row in range(rows)]
    with DatasetWriter(pool, "x", {"x": Field("bytes")}) as writer:
        writer.write_batch({"x": values[:200]})
        writer.write_batch({"x": values[200:]})
    data = Dataset(pool, "x")
    assert [found["x"] for found in data.__getitems__(range(rows))] == values


def test_the_caller_may_change_his_arrays_after_a_write(pool: Pool) -> None:
    """Values are copied, also while the page is not chosen yet."""
    array, ragged = np.zeros((4, 100), np.uint8), np.ones((2, 3), np.float32)
    with DatasetWriter(
        pool,
        "x",
        {"x": Field("uint8", (100,)), "r": Field("float32", (None, 3)), "s": Field("uint8", (4,))},
    ) as writer:
        for number in range(4):
            array[:], ragged[:] = number, number
            writer.write({"x": array[0], "r": ragged, "s": array[1, :4]})
        array[:], ragged[:] = 99, 99
    for number, found in enumerate(Dataset(pool, "x").__getitems__(range(4))):
        assert all(np.all(np.asarray(found[name]) == number) for name in "xrs")


def test_shuffled_on_write_is_a_permutation_that_is_kept(pool: Pool) -> None:
    """The same samples, another order, the same for the same seed; who is where is known."""
    rows = range(COUNT)
    data = write_samples(pool, "a", rows, shuffle=True, seed=3)
    order = data.written_as(np.arange(COUNT))
    assert order is not None
    assert sorted(order.tolist()) == list(rows)
    assert order.tolist() != list(rows)
    for number, found in zip(order.tolist(), data.__getitems__(rows), strict=True):
        check_sample(found, number)
    again = write_samples(pool, "b", rows, shuffle=True, seed=3, compression="lz4")
    assert again.fingerprint == data.fingerprint
    assert write_samples(pool, "c", rows, shuffle=True, seed=4).fingerprint != data.fingerprint
    assert write_samples(pool, "d", rows).written_as(np.arange(COUNT)) is None
    assert verify_dataset(pool, "a").clean
    nonces = {key.split("/")[2] for key in pool.list("data/a/") if "stream" in key}
    assert nonces == {data.manifest.parts[0].nonce}  # the first pass was removed


def test_metadata_is_json(pool: Pool) -> None:
    """What cannot be written down is refused at the start."""
    for wrong in ({"x": object()}, {"x": float("nan")}):
        with pytest.raises(ConfigError, match="metadata of a data set is JSON"):
            DatasetWriter(pool, "a", FIELDS, metadata=wrong)


def test_metadata_and_facts_are_kept(pool: Pool) -> None:
    """What the writer recorded; what a list of data sets shows."""
    data = write_samples(pool, "a/b", range(5), metadata={"source": "x", "n": [1, None]})
    assert data.metadata == {"source": "x", "n": [1, None]}
    pool.put("data/texts/manifest", OLD_CORPUS)
    pool.put("data/broken/manifest", b'{"kind": "dataset", "format": 1, "digest": ""}')
    found = {info.name: info for info in list_datasets(pool)}
    assert sorted(found) == ["a/b", "broken"]
    assert found["a/b"].rows == 5
    assert found["a/b"].fingerprint == data.fingerprint
    assert found["a/b"].created == pool.stat("data/a/b/manifest").created
    assert "digest" in found["broken"].problem


def test_a_corpus_of_an_earlier_version_is_no_data_set(pool: Pool) -> None:
    """It says what it is; deleting as a data set is refused."""
    pool.put("data/texts/manifest", OLD_CORPUS)
    for call in (Dataset, delete_dataset, verify_dataset):
        with pytest.raises(ConfigError, match="corpus of tokens of an earlier"):
            call(pool, "texts")
    assert pool.exists("data/texts/manifest")


@pytest.mark.parametrize(
    ("size", "rows", "held"), [(1000, 7, True), (1000, 8, False), (150_000, 8, True)]
)
def test_records_wait_for_their_page_until_it_is_clear(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, size: int, rows: int, held: bool
) -> None:
    """A few records choose where all of twice or half their size would choose the same."""
    monkeypatch.setattr(stream_writer, "CLEAR_ROWS", 8)
    writer = DatasetWriter(pool, "train", {"raw": Field("bytes")}, unit_bytes=None)
    writer.write_batch({"raw": [bytes(size)] * rows})
    (stream,) = writer._part_writers[0]._streams
    assert bool(stream._pending) == held
    writer.close()
    assert verify_dataset(pool, "train").clean
