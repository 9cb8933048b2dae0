"""Splits: train and val of a folder, a table or a DatasetDict are datasets, not classes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpstore.errors import ConfigError, IngestError, VersionConflict
from hpstore.loaders import Dataset, ingest, ingest_splits, list_datasets, open_source
from hpstore.loaders.ingestion.sample_source import BlockwiseSource
from hpstore.loaders.ingestion.source_paths import local_files
from hpstore.loaders.ingestion.source_splits import splits_of
from hpstore.pool.pool import Pool
from tests.integration.cli_cases import PoolCommands
from tests.integration.ingest_cases import Stop, images, make_pool, samples, stop_after


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    with make_pool(tmp_path) as made:
        yield made


def names(pool: Pool) -> list[str]:
    return sorted(found.name for found in list_datasets(pool))


def test_folders_of_images_are_split(pool: Pool, tmp_path: Path) -> None:
    """The classes are those inside each; one of them can be named by itself."""
    for split, count in [("train", 9), ("val", 6)]:
        images(tmp_path / "in" / split, count, 50)
    reports = ingest_splits(pool, "photos", tmp_path / "in")
    assert {split: report.samples for split, report in reports.items()} == {"train": 9, "val": 6}
    assert names(pool) == ["photos/train", "photos/val"]
    with Dataset(pool, "photos/val") as found:
        assert found.metadata["classes"] == ["class0", "class1", "class2"]
    with pytest.raises(ConfigError, match=r"holds the splits train, val: name one .*in/train"):
        ingest(pool, "x", tmp_path / "in")
    assert ingest(pool, "x", tmp_path / "in/val").samples == 6
    with pytest.raises(VersionConflict, match="photos/train, photos/val exist"):
        ingest_splits(pool, "photos", tmp_path / "in")


def test_classes_of_such_names_stay_classes(tmp_path: Path) -> None:
    """A train beside a car is a vehicle; a tar beside the folders, too, is no split."""
    for name in ("train", "car"):
        images(tmp_path / "vehicles" / name, 3, 50)
    assert open_source(tmp_path / "vehicles").metadata["classes"] == ["car", "train"]
    assert splits_of(str(tmp_path)) == {}
    with pytest.raises(ConfigError, match="has no splits"):
        ingest_splits(None, "x", tmp_path / "vehicles")  # type: ignore[arg-type]  # not reached


def test_files_named_for_splits_are_split(pool: Pool, tmp_path: Path) -> None:
    """As Hugging Face's hub names them, and plainly; one split alone is a source."""
    for name, rows in [("train-00000-of-00002", 2), ("train-00001-of-00002", 2), ("test", 1)]:
        lines = "".join(json.dumps({"n": n}) + "\n" for n in range(rows))
        (tmp_path / f"in_{name}.jsonl").write_text(lines)
    assert splits_of(tmp_path) == {}  # in_train: a name like any other
    root = tmp_path / "in"
    root.mkdir()
    for path in tmp_path.glob("in_*"):
        path.rename(root / path.name.removeprefix("in_"))
    reports = ingest_splits(pool, "t", root)
    assert {split: report.samples for split, report in reports.items()} == {"test": 1, "train": 4}
    (root / "test.jsonl").unlink()
    assert splits_of(root) == {}
    assert open_source(root).kind == "jsonl"


def test_a_split_takes_no_files_of_another(tmp_path: Path) -> None:
    """Of val and validation, whatever signs of patterns the folder's name has."""
    folder = tmp_path / "a [b]*"
    folder.mkdir()
    for name in ("x-val", "x-validation-0001", "x-validation-0002", "x-train"):
        (folder / f"{name}.jsonl").write_text(json.dumps({"name": name}))
    found = {split: local_files(where, [".jsonl"]) for split, where in splits_of(folder).items()}
    assert {split: [file.stem for file in files] for split, files in found.items()} == {
        "train": ["x-train"],
        "val": ["x-val"],
        "validation": ["x-validation-0001", "x-validation-0002"],
    }
    (folder / "x-val-1.jsonl").write_text("{}")
    with pytest.raises(ConfigError, match="no pattern names the files"):
        splits_of(folder)


def test_patterns_go_round_no_loop_of_links(tmp_path: Path) -> None:
    """Each sample came 41 times; with two links the pattern never ended."""
    inner = tmp_path / "a/b"
    inner.mkdir(parents=True)
    (tmp_path / ".hidden").mkdir()
    for link in ("one", "two"):
        (inner / link).symlink_to("..")
    (inner / "itself.jsonl").symlink_to("itself.jsonl")
    for folder in (tmp_path, inner, tmp_path / ".hidden"):
        (folder / "x.jsonl").write_text("{}")
    outer = [tmp_path / "a/b/x.jsonl", tmp_path / "x.jsonl"]
    assert local_files(f"{tmp_path}/**/*.jsonl", [".jsonl"]) == outer
    assert local_files(f"{tmp_path}/**/b/**", [".jsonl"]) == outer[:1]
    assert local_files(f"{tmp_path}/*/**/x.jsonl", [".jsonl"]) == outer[:1]
    assert local_files(inner, [".jsonl"]) == outer[:1]


def test_a_cut_ingest_goes_on_with_its_split(pool: Pool, tmp_path: Path) -> None:
    """What is published stays as it is; a bad record of a later split names that."""
    for split in ("train", "val"):
        images(tmp_path / "in" / split, 6, 50)
    bad = tmp_path / "in/val/class0/x.jpg"
    bad.write_bytes(b"\xff\xd8cut")
    with pytest.raises(IngestError, match=r"in/val: bad record"):
        ingest_splits(pool, "p", tmp_path / "in", shuffle=False)
    assert names(pool) == ["p/train"]
    bad.unlink()
    with pytest.raises(Stop):
        ingest_splits(pool, "p", tmp_path / "in", progress=stop_after(3))
    assert list(ingest_splits(pool, "p", tmp_path / "in")) == ["val"]
    assert names(pool) == ["p/train", "p/val"]


def test_the_command_splits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A line for each; with --json by name."""
    cli = PoolCommands(tmp_path, capsys, "dataset")
    cli.create(data=2, parity=1, devices=3)
    for split in ("train", "test"):
        images(tmp_path / "in" / split, 3, 50)
    said = cli("ingest", "p", "in")
    assert "p/test: 3 samples" in said
    assert "p/train: 3 samples" in said
    assert set(cli.json("ingest", "p", "in", "--overwrite")) == {"test", "train"}


def test_dataset_dicts_of_hugging_face(pool: Pool, tmp_path: Path) -> None:
    """In memory, streaming and saved; a class is its number, an image its bytes."""
    datasets = pytest.importorskip("datasets", reason="needs datasets (the extra `huggingface`)")
    features = datasets.Features(
        {"n": datasets.Value("int32"), "c": datasets.ClassLabel(names=["a", "b"])}
    )
    parts = {
        split: datasets.Dataset.from_dict(
            {"n": list(range(rows)), "c": ["a", "b"] * (rows // 2)}, features=features
        )
        for split, rows in [("train", 8), ("test", 4)]
    }
    both = datasets.DatasetDict(parts)
    both.save_to_disk(tmp_path / "saved")
    streams = datasets.IterableDatasetDict(
        {split: part.to_iterable_dataset(num_shards=2) for split, part in parts.items()}
    )
    for name, source in [("memory", both), ("streams", streams), ("disk", tmp_path / "saved")]:
        reports = ingest_splits(pool, name, source, shuffle=False)
        assert reports["train"].fields == {"n": ("int32", ()), "c": ("int64", ())}
        found = [(int(s["n"]), int(s["c"])) for s in samples(pool, f"{name}/train")]
        assert found == [(n, n % 2) for n in range(8)]
        assert len(samples(pool, f"{name}/test")) == 4


def test_a_stream_of_hugging_face_has_the_rows_that_a_loop_has(pool: Pool) -> None:
    """Divided by shards, take(n) and skip(n) had others: n of the shards together."""
    datasets = pytest.importorskip("datasets", reason="needs datasets (the extra `huggingface`)")
    whole = datasets.Dataset.from_dict({"i": list(range(50))}).to_iterable_dataset(num_shards=3)
    for number, (stream, blocks) in enumerate(
        [
            (whole.map(lambda row: {"i": 2 * row["i"]}).filter(lambda row: row["i"] % 3), 3),
            (datasets.concatenate_datasets([whole, whole]), 6),
            (whole.take(10), 1),
            (whole.map(lambda row, at: {"i": at}, with_indices=True), 1),
            (whole.filter(lambda row, at: at < 9, with_indices=True), 1),
            (whole.skip(10).select_columns(["i"]), 1),
            (whole.shuffle(seed=1, buffer_size=7), 1),
            (whole.batch(4), 1),
            (datasets.interleave_datasets([whole, whole]), 1),
        ]
    ):
        wanted = [row["i"] for row in stream]
        report = ingest(pool, f"s{number}", stream, shuffle=False, fields=["i"])
        assert report.samples == len(wanted)
        got = [sample["i"].tolist() for sample in samples(pool, f"s{number}")]
        assert got == wanted
        source = open_source(stream)
        assert isinstance(source, BlockwiseSource)
        assert source.blocks == blocks


def test_a_hugging_face_dataset_goes_on(pool: Pool) -> None:
    """What select() left, from any row on; a null makes a field optional. One in a stream, whose
    rows are not looked at before, is a bad record."""
    datasets = pytest.importorskip("datasets", reason="needs datasets (the extra `huggingface`)")
    from tests.unit.test_ingest_sources import check_restart, items_of, plain

    made = datasets.Dataset.from_dict({"n": list(range(3000)), "s": ["x"] * 2999 + [None]})
    for source in (made.select(range(2999, -1, -1)), made.to_iterable_dataset(num_shards=3)):
        opened = open_source(source)
        opened.restrict(["n"], {})
        wanted = list(range(3000))
        found = [plain(item.sample)["n"] for item in items_of(opened)]
        assert sorted(found) == wanted  # type: ignore[type-var]  # ints
        streamed = not hasattr(source, "select")
        again = open_source(source)
        assert again.fields is not None
        assert again.fields["s"].optional is not streamed
        problems = [item.problem for item in items_of(again) if item.problem]
        assert problems == (["it holds a null: 's'"] if streamed else [])
    few = open_source(made.select(range(5)).to_iterable_dataset())
    check_restart(few)
    assert open_source(made).fingerprint() != open_source(made.select(range(3))).fingerprint()
