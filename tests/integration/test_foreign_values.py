"""Values keep what they are between formats: through zarr and back, from dataset to dataset, from
the files of a tar, and with the unit that times have."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from torch.utils.data import Subset

from hpstore.errors import ConfigError
from hpstore.loaders import (
    Dataset,
    DatasetStore,
    DatasetWriter,
    Field,
    Mixture,
    ZarrDataset,
    ingest,
)
from hpstore.loaders.dataset.row_filter import filter_mask
from hpstore.pool.pool import Pool
from tests.integration.data_sets import make_pool

FIELDS = {
    "half": Field("bfloat16", (40,), optional=True),
    "score": Field("bfloat16"),
    "label": Field("int64", optional=True),
    "box": Field("float32", (4,)),
}


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    with make_pool(tmp_path) as made:
        yield made


def rows_of(count: int) -> list[dict[str, Any]]:
    return [
        {
            "half": torch.full((40,), i / 7, dtype=torch.bfloat16) if i % 3 else None,
            "score": torch.tensor(i / 10, dtype=torch.bfloat16),
            "label": i if i % 2 else None,
            "box": np.full(4, i, np.float32),
        }
        for i in range(count)
    ]


def sample_of(data: Any, number: int) -> Any:
    """A sample, of whose values it is not known what they are."""
    return data[number]


def write(pool: Pool, name: str, fields: Mapping[str, Field], rows: Any, **how: Any) -> None:
    with DatasetWriter(pool, name, dict(fields), **how) as writer:
        for row in rows:
            writer.write(row)


def require_equal(first: Dataset, second: Dataset) -> None:
    assert dict(first.fields) == dict(second.fields)
    assert len(first) == len(second)
    for row in range(len(first)):
        ours, theirs = sample_of(first, row), sample_of(second, row)
        for name, value in ours.items():
            if isinstance(value, torch.Tensor):
                assert theirs[name].dtype == value.dtype
                assert torch.equal(theirs[name], value)
            else:
                assert theirs[name] == value


def test_bfloat16_and_none_come_back_through_zarr(pool: Pool) -> None:
    """zarr has neither: the attributes of the arrays say what they are."""
    write(pool, "a", FIELDS, rows_of(9))
    group = zarr.open_group(DatasetStore(pool, "a"), mode="r")
    ingest(pool, "b", group, shuffle=False)
    with Dataset(pool, "a") as first, Dataset(pool, "b") as second:
        require_equal(first, second)
        sample = sample_of(ZarrDataset(group), 4)
        assert sample["score"].dtype == torch.bfloat16
        assert torch.equal(sample["score"], sample_of(first, 4)["score"])
        assert sample["half_mask"].item()


def test_an_array_of_zarr_that_only_says_so_has_no_mask(pool: Pool, tmp_path: Path) -> None:
    """The name of an array that is not there, or is no mask, is not believed."""
    group = zarr.open_group(tmp_path / "z", mode="w")
    for name, mask in (("x", "gone"), ("y", "x"), ("w", 3)):
        made = group.create_array(name, data=np.arange(4, dtype=np.uint16))
        made.attrs.update({"hpstore_mask": mask, "hpstore_dtype": "float32"})
    ingest(pool, "c", group, shuffle=False)
    with Dataset(pool, "c") as data:
        assert set(data.fields.values()) == {Field("uint16")}


@pytest.mark.parametrize("subset", [False, True])
def test_a_dataset_of_hpstore_is_ingested_with_its_fields(pool: Pool, subset: bool) -> None:
    """JSON that is text in the first samples, images, None behind the first 64, classes, units."""
    fields = {**FIELDS, "j": Field("json"), "i": Field("image", optional=True)}
    rows: list[dict[str, Any]] = [{**row, "j": "text", "i": b"\xff\xd8\xff"} for row in rows_of(70)]
    rows[-1] |= {"j": {"deep": [1, None]}, "i": None}
    facts = {"classes": {"label": ["a", "b"]}, "units": {"label": "timestamp[ms]"}}
    write(pool, "a", fields, rows, metadata=facts)
    with Dataset(pool, "a") as first:
        ingest(pool, "b", Subset(first, range(len(first))) if subset else first, shuffle=False)
        with Dataset(pool, "b") as second:
            require_equal(first, second)
            assert second.classes == {"label": ["a", "b"]}
            assert second.metadata["units"] == facts["units"]


def test_times_of_another_unit_are_not_appended_or_mixed(pool: Pool, tmp_path: Path) -> None:
    """They are ints: milliseconds behind nanoseconds would be times of another century."""
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    kinds = {
        "ms": arrow.timestamp("ms"),
        "us": arrow.timestamp("us"),
        "zone": arrow.timestamp("us", "Europe/Paris"),
        "other": arrow.timestamp("us", "Asia/Tokyo"),
        "lists": arrow.list_(arrow.duration("s")),
        "longer": arrow.list_(arrow.duration("ms")),
    }
    for name, kind in kinds.items():
        values = [[1, 2], [3]] if arrow.types.is_list(kind) else [1, 2]
        parquet.write_table(arrow.table({"t": arrow.array(values, kind)}), tmp_path / name)
        (tmp_path / name).rename(tmp_path / f"{name}.parquet")
        ingest(pool, name, tmp_path / f"{name}.parquet", shuffle=False)
    for there, added in (("ms", "us"), ("us", "zone"), ("lists", "longer")):
        with pytest.raises(ConfigError, match=r"the unit of 't'.*Nothing was appended"):
            ingest(pool, there, tmp_path / f"{added}.parquet", append=True, shuffle=False)
        with Dataset(pool, there) as one, Dataset(pool, added) as two:
            assert len(one) == 2
            with pytest.raises(ConfigError, match="differ in the unit of 't'"):
                Mixture([one, two], weights=[1, 1])
    ingest(pool, "zone", tmp_path / "other.parquet", append=True, shuffle=False)
    ingest(pool, "ms", tmp_path / "ms.parquet", append=True, shuffle=False)
    with Dataset(pool, "zone") as data:
        assert [int(sample_of(data, i)["t"]) for i in range(4)] == [1, 2, 1, 2]


def tar_of(path: Path, members: Mapping[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


@pytest.mark.parametrize("ending", [".tar", ".tar.gz"])
def test_files_of_a_tar_are_what_the_user_says(pool: Pool, tmp_path: Path, ending: str) -> None:
    """Images, JSON, lists of texts, chats, numbers of all kinds: from their bytes, or bad records
    that say why."""
    fields = {
        "png": Field("image"),
        "json": Field("json"),
        "tags": Field("str", (None,)),
        "chat": Field("chat"),
        "ok": Field("bool"),
        "half": Field("bfloat16"),
        "z": Field("complex64"),
    }
    chat = [{"role": "user", "content": "hi"}]
    good = {
        "png": b"\x89PNG",
        "json": b' {"b": [1, null], "a": 0.5}\n',
        "tags": b'["x", "\\u00e9"]',
        "chat": b'[{"role": "user", "content": "hi"}]',
        "ok": b"True\n",
        "half": b"0.5",
        "z": b"1+2j",
    }
    bad = {"json": b'{"a": 1, "a": 2}', "tags": b'["x", 1]', "ok": b"yes", "half": b"x"}
    members = {f"{row}.{name}": data for row in range(2) for name, data in good.items()}
    for place, (name, data) in enumerate(bad.items()):
        members |= {f"bad{place}.{n}": data if n == name else d for n, d in good.items()}
    where = tar_of(tmp_path / f"a{ending}", members)
    report = ingest(
        pool, "t", where, fields=fields, check_images=False, on_error="skip", shuffle=False
    )
    assert report.samples == 2
    assert len(report.skipped) == len(bad)
    with Dataset(pool, "t") as stored:
        sample = sample_of(stored, 1)
        assert sample["png"] == b"\x89PNG"
        assert sample["json"] == {"b": [1, None], "a": 0.5}
        assert sample["tags"] == ["x", "é"]
        assert sample["chat"] == chat
        assert sample["ok"].item() is True
        assert sample["half"].item() == 0.5
        assert sample["z"].item() == 1 + 2j


def test_a_list_of_numbers_and_bools_is_no_array(pool: Pool) -> None:
    """numpy makes 1 of True."""
    with DatasetWriter(pool, "l", {"x": Field("int64", (None,))}) as writer:
        for value in ([True, 2], [[1], [False]]):
            with pytest.raises(ConfigError, match="and of bools"):
                writer.write({"x": value})
        writer.write({"x": [1, 2]})


def test_filters_round_numbers_as_the_field_does(pool: Pool) -> None:
    """Of bfloat16 as numpy does of float16 and float32, of complex numbers in lists, too."""
    fields = {"h": Field("bfloat16"), "z": Field("complex64")}
    write(pool, "f", fields, [{"h": x, "z": x} for x in (0.1, 0.3, 257.0)])
    with Dataset(pool, "f") as data:
        for condition, kept in (
            (("h", "==", 0.1), [True, False, False]),
            (("h", "in", [0.1, 0.3]), [True, True, False]),
            (("h", "<=", 0.1), [True, False, False]),
            (("h", "==", 257), [False, False, False]),
            (("h", "<", 1e300), [True, True, True]),
            (("z", "in", [0.1]), [True, False, False]),
            (("z", "==", 0.1), [True, False, False]),
        ):
            assert filter_mask(data, [condition]).tolist() == kept, condition


@pytest.mark.parametrize("optional", [False, True])
def test_an_image_that_lies_elsewhere_is_a_bad_record(
    pool: Pool, tmp_path: Path, optional: bool
) -> None:
    """A struct of Hugging Face with a path and no bytes is not None; a null instead of the struct
    is."""
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [
        {"bytes": b"1", "path": "a"},
        {"bytes": None, "path": "b"},
        {"bytes": b"3", "path": "c"},
    ]
    kind = arrow.struct([("bytes", arrow.binary()), ("path", arrow.string())])
    column = arrow.array([*rows, None] if optional else rows, kind)
    parquet.write_table(arrow.table({"image": column}), tmp_path / "a.parquet")
    report = ingest(pool, "i", tmp_path / "a.parquet", on_error="skip", shuffle=False)
    assert [found.name for found in report.skipped] == ["a.parquet: block 0 row 1"]
    with Dataset(pool, "i") as data:
        found = [sample_of(data, row)["image"] for row in range(len(data))]
    assert found == [b"1", b"3", *([None] if optional else [])]
