"""ingest(append=True): the samples come behind those that are there, once, as a new version."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpstore.errors import ConfigError, IngestError, ObjectNotFound
from hpstore.loaders import (
    Dataset,
    DatasetWriter,
    Field,
    IngestProgress,
    delete_rows,
    ingest,
    ingest_splits,
    list_versions,
    unfinished_ingests,
    verify_dataset,
)
from hpstore.loaders.ingestion.ingest_journal import Journal
from hpstore.pool.pool import Pool
from tests.integration.cli_cases import PoolCommands
from tests.integration.ingest_cases import (
    SHARD,
    Stop,
    cut_short,
    images,
    keys_left,
    make_pool,
    rows,
    samples,
    stop_after,
    wanted_rows,
)

SMALL: dict[str, Any] = {"shard_bytes": SHARD["shard_bytes"]}


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    with make_pool(tmp_path) as made:
        yield made


def names(pool: Pool, name: str) -> list[str]:
    return [version.name for version in list_versions(pool, name)]


def test_samples_come_behind_those_that_are_there(pool: Pool, tmp_path: Path) -> None:
    """Two folders: the first is the old version, both are the new one, which is clean."""
    first, second = images(tmp_path / "a", 40), images(tmp_path / "b", 30, size=5000)
    ingest(pool, "train", first, seed=3, **SHARD)
    before = rows(pool, "train")
    report = ingest(pool, "train", second, append=True, version="more", **SMALL)
    found = rows(pool, "train")
    assert (report.samples, report.fingerprint) == (30, Dataset(pool, "train").fingerprint)
    assert found[:40] == before
    assert sorted(found[40:]) == sorted(wanted_rows(second))
    assert found[40:] != wanted_rows(second)  # shuffled, as the dataset is
    assert names(pool, "train") == ["v1", "more"]
    with Dataset(pool, "train", version="v1") as old:
        assert len(old) == 40
        assert old.metadata["ingest"] == Dataset(pool, "train").metadata["ingest"]
    origins = Dataset(pool, "train").written_as(np.arange(40, 70))
    assert origins is not None
    assert [wanted_rows(second)[i] for i in origins] == found[40:]
    assert verify_dataset(pool, "train").clean


def test_an_append_that_was_cut_short_goes_on(pool: Pool, tmp_path: Path) -> None:
    """Nothing is visible before the end; then the same dataset as from one run."""
    first, second = images(tmp_path / "a", 20), images(tmp_path / "b", 60)
    for name in ("cut", "whole"):
        ingest(pool, name, first, **SHARD)
    whole = ingest(pool, "whole", second, append=True, **SMALL)
    with pytest.raises(Stop):
        ingest(pool, "cut", second, append=True, progress=stop_after(30), **SMALL)
    kept = unfinished_ingests(pool)["cut"].rows
    assert 0 < kept < 60
    assert len(Dataset(pool, "cut")) == 20
    found = ingest(pool, "cut", second, append=True, **SMALL)
    assert (found.samples, found.resumed_samples) == (60, kept)
    assert found.fingerprint == whole.fingerprint
    assert rows(pool, "cut") == rows(pool, "whole")
    assert not unfinished_ingests(pool)


def test_a_kill_right_after_it_became_visible_appends_nothing_twice(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal is still there: the same call is done, another source is appended."""
    first, second, third = (
        images(tmp_path / n, 20, size=z) for n, z in zip("abc", (8000, 6000, 4000), strict=True)
    )
    ingest(pool, "train", first, **SHARD)

    def killed(_: Journal) -> None:
        raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "remove", killed)
        with pytest.raises(Stop):
            ingest(pool, "train", second, append=True, **SMALL)
    assert len(Dataset(pool, "train")) == 40
    report = ingest(pool, "train", second, append=True, **SMALL)
    assert report.samples == 20
    assert len(Dataset(pool, "train")) == 40
    assert not any("journal" in key for key in keys_left(pool, "train"))
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "remove", killed)
        with pytest.raises(Stop):
            ingest(pool, "train", third, append=True, **SMALL)
    ingest(pool, "train", second, append=True, **SMALL)
    assert len(Dataset(pool, "train")) == 80
    assert verify_dataset(pool, "train").clean


def test_what_another_process_appends_meanwhile_stays(pool: Pool, tmp_path: Path) -> None:
    """A writer appends while the folder is read: its sample, then all of the folder's."""
    ingest(pool, "train", images(tmp_path / "a", 20), **SHARD)
    source = images(tmp_path / "b", 20, size=6000)

    def beside(done: IngestProgress) -> None:
        if done.records == 10:
            fields = {"image": Field("bytes"), "label": Field("int64")}
            with DatasetWriter(pool, "train", fields, append=True) as writer:
                writer.write({"image": b"other", "label": 7})

    ingest(pool, "train", source, append=True, progress=beside, **SMALL)
    found = rows(pool, "train")
    assert found[20] == (b"other", 7)
    assert sorted(found[21:]) == sorted(wanted_rows(source))
    assert names(pool, "train") == ["v1", "v2", "v3"]


def test_a_source_without_samples_changes_nothing(pool: Pool, tmp_path: Path) -> None:
    ingest(pool, "train", images(tmp_path / "a", 9), **SHARD)
    report = ingest(pool, "train", [], append=True)
    assert report.samples == 0
    assert names(pool, "train") == ["v1"]
    assert not any("journal" in key for key in keys_left(pool, "train"))


def test_fields_are_those_of_the_dataset(pool: Pool) -> None:
    """None is taken where the dataset's field is optional; other fields are refused."""
    ingest(pool, "t", [{"n": 1, "s": "a"}, {"n": None, "s": "b"}], shuffle=False)
    ingest(pool, "t", [{"n": 3, "s": "c"}], append=True)
    assert [sample["s"] for sample in samples(pool, "t")] == ["a", "b", "c"]
    with pytest.raises(IngestError, match="it lacks 's'"):
        ingest(pool, "t", [{"n": 3}], append=True)
    with pytest.raises(IngestError, match="it has 'x'"):
        ingest(pool, "t", [{"n": 3, "s": "d", "x": 1}], append=True)
    with pytest.raises(ConfigError, match="nothing was appended"):
        ingest(pool, "t", [{"s": "d"}], fields={"s": Field("str")}, append=True, resume=False)
    assert len(Dataset(pool, "t")) == 3


def test_what_cannot_be_appended_is_refused(pool: Pool, tmp_path: Path) -> None:
    """No dataset, two ways to change it, a name without a version, other classes, splits."""
    root = images(tmp_path / "a", 9)
    with pytest.raises(ObjectNotFound):
        ingest(pool, "train", root, append=True)
    ingest(pool, "train", root, **SHARD)
    with pytest.raises(ConfigError, match="choose one"):
        ingest(pool, "train", root, append=True, overwrite=True)
    with pytest.raises(ConfigError, match="version="):
        ingest(pool, "new", root, version="x")
    (root / "class0").rename(root / "cats")
    with pytest.raises(ConfigError, match="the same numbers would stand for others"):
        ingest(pool, "train", root, append=True)
    images(tmp_path / "split" / "train", 3)
    images(tmp_path / "split" / "val", 3)
    with pytest.raises(ConfigError, match="one split at a time"):
        ingest_splits(pool, "train", str(tmp_path / "split"), append=True)
    assert names(pool, "train") == ["v1"]


def test_an_unfinished_ingest_of_another_kind_is_refused(pool: Pool, tmp_path: Path) -> None:
    """One that would replace the dataset is not gone on with by an append."""
    root = images(tmp_path / "a", 60)
    ingest(pool, "train", root, **SHARD)
    cut_short(pool, "train", root, 30, overwrite=True, layout="rows")
    with pytest.raises(IngestError, match="append was None"):
        ingest(pool, "train", root, append=True, **SHARD)
    assert len(Dataset(pool, "train")) == 60


def test_parts_of_old_versions_stay_when_an_ingest_begins_again(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed right after it was visible; rows are deleted; replaced: the first version is read."""
    root = images(tmp_path / "a", 20)

    def killed(_: Journal) -> None:
        raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "remove", killed)
        with pytest.raises(Stop):
            ingest(pool, "train", root, shuffle=False, **SHARD)
    delete_rows(pool, "train", [0])
    ingest(pool, "train", root, overwrite=True, **SHARD)
    with Dataset(pool, "train", version="v1") as old:
        found = old.__getitems__(list(range(20)))
    assert [(s["image"], int(s["label"])) for s in found] == wanted_rows(root)


def test_the_command_appends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """hpstore dataset ingest --append --version."""
    cli = PoolCommands(tmp_path, capsys, "dataset")
    cli.create(data=2, parity=1, devices=3)
    images(tmp_path / "a", 9)
    images(tmp_path / "b", 6)
    cli("ingest", "train", "a")
    said = cli("ingest", "train", "b", "--append", "--version", "second")
    assert said.startswith("train: 6 samples")
    assert [row["name"] for row in cli.json("versions", "train")] == ["v1", "second"]
    assert cli.json("info", "train")["samples"] == 15
    assert "exists" in cli("ingest", "train", "b", code=5)
