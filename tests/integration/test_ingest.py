"""ingest: what is in the source is in the data set, whole or not at all, also after a kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpstore.errors import (
    ConfigError,
    DeviceFull,
    IngestError,
    ObjectNotFound,
    SomeFailed,
    TooFewDevices,
    VersionConflict,
)
from hpstore.loaders import (
    Dataset,
    DatasetWriter,
    Field,
    IngestProgress,
    delete_dataset,
    ingest,
    list_datasets,
    remove_orphans,
    unfinished_ingests,
    verify_dataset,
)
from hpstore.loaders.dataset.publish_dataset import joined_content
from hpstore.loaders.ingestion.ingest_journal import Journal, Progressed
from hpstore.pool.pool import Pool
from tests.integration.ingest_cases import (
    SHARD,
    cut_short,
    images,
    keys_left,
    make_pool,
    rows,
    samples,
    wanted_rows,
)

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    with make_pool(tmp_path) as made:
        yield made


def test_an_image_folder_is_there_in_a_recorded_order(pool: Pool, tmp_path: Path) -> None:
    """Every file once, with its class; the order is told by the map; many parts, clean."""
    root = images(tmp_path / "in")
    report = ingest(pool, "train", root, seed=3, **SHARD)
    wanted = wanted_rows(root)
    with Dataset(pool, "train") as found:
        origins = found.written_as(np.arange(60))
        assert found.metadata["classes"] == ["class0", "class1", "class2"]
        assert len(found.manifest.parts) > 5
    assert origins is not None
    assert rows(pool, "train") == [wanted[i] for i in origins]
    assert sorted(origins) == list(range(60))
    assert list(origins) != sorted(origins)
    assert (report.samples, report.order["seed"], report.skipped) == (60, 3, ())
    assert verify_dataset(pool, "train").clean
    assert not any("journal" in key for key in keys_left(pool, "train"))


def test_parts_make_the_same_data_set_as_one_writer(pool: Pool, tmp_path: Path) -> None:
    """The fingerprint is that of the samples: not of how many parts they were written in."""
    root = images(tmp_path / "in")
    made = ingest(pool, "many", root, shuffle=False, **SHARD)
    fields = {"image": Field("bytes"), "label": Field("int64")}
    with DatasetWriter(pool, "whole", fields) as writer:
        for image, label in wanted_rows(root):
            writer.write({"image": image, "label": label})
    assert Dataset(pool, "whole").fingerprint == made.fingerprint
    assert rows(pool, "many") == wanted_rows(root)


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_cut_ingest_goes_on_and_equals_an_uninterrupted_one(
    pool: Pool, tmp_path: Path, shuffle: bool
) -> None:
    """Stopped twice: nothing is visible, parts are kept and not read again, the end is the same."""
    root = images(tmp_path / "in")
    whole = ingest(pool, "whole", root, shuffle=shuffle, **SHARD)
    kept = cut_short(pool, "cut", root, 25, shuffle=shuffle)
    more = cut_short(pool, "cut", root, 45, shuffle=shuffle)
    assert 0 < kept < more < 60
    assert [d.name for d in list_datasets(pool)] == ["whole"]
    with pytest.raises(ObjectNotFound):
        Dataset(pool, "cut")
    seen: list[IngestProgress] = []
    report = ingest(pool, "cut", root, shuffle=shuffle, progress=seen.append, **SHARD)
    assert seen[0].records == more + 1
    assert report.resumed_samples == more
    assert report.fingerprint == whole.fingerprint
    assert report.bytes == whole.bytes
    assert verify_dataset(pool, "cut").clean
    assert len(keys_left(pool, "cut")) == len(keys_left(pool, "whole"))


def test_the_next_part_is_filled_while_the_first_one_is_stored(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The put of the first shard waits for records that come behind its part."""
    root = images(tmp_path / "in")
    put, behind, waited = Pool.put, threading.Event(), list[bool]()

    def slow(self: Pool, key: str, *args: Any, **options: Any) -> Any:
        if "stream-0" in key and not waited:
            waited.append(behind.wait(20))
        return put(self, key, *args, **options)

    def progress(done: IngestProgress) -> None:
        if done.records >= 12:  # parts have seven
            behind.set()

    monkeypatch.setattr(Pool, "put", slow)
    ingest(pool, "train", root, progress=progress, **SHARD)
    assert waited == [True]
    assert verify_dataset(pool, "train").clean


def test_an_ingest_of_one_part_makes_few_puts(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two words in the journal, the shard, the manifest; all that lies beside goes together."""
    root = images(tmp_path / "in", 12)
    puts: list[str] = []
    together: list[list[str]] = []
    put, put_many = Pool.put, Pool.put_many

    def counted(self: Pool, key: str, *args: Any, **options: Any) -> Any:
        puts.append(key.rpartition("/")[2])
        return put(self, key, *args, **options)

    def counted_many(self: Pool, objects: Any, *args: Any, **options: Any) -> Any:
        together.append([key.split("/", 3)[3] for key in objects])
        return put_many(self, objects, *args, **options)

    monkeypatch.setattr(Pool, "put", counted)
    monkeypatch.setattr(Pool, "put_many", counted_many)
    ingest(pool, "train", root)
    assert sorted(puts) == ["000000", "journal", "journal", "manifest"]
    assert [sorted(keys) for keys in together] == [
        ["column-1/000000", "column-order/000000", "stream-0/000000.side", "stream-0/pages"]
    ]
    assert verify_dataset(pool, "train").clean
    with Dataset(pool, "train") as found:
        made = found.manifest
    assert made.content == joined_content(pool, "train", made, made.parts)


def test_a_small_object_that_cannot_be_put_ends_the_ingest_with_its_error(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not with one that counts those that were put together; the next run goes on."""
    root = images(tmp_path / "in")
    put_many, calls = Pool.put_many, [0]

    def full(self: Pool, objects: Any, *args: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == 3:
            failed = SomeFailed("1 of 4")
            failed.failed = {key: DeviceFull("no space left") for key in objects}
            raise failed
        return put_many(self, objects, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Pool, "put_many", full)
        with pytest.raises(DeviceFull, match=r"no space left.*samples are kept"):
            ingest(pool, "train", root, **SHARD)
    assert ingest(pool, "train", root, **SHARD).resumed_samples > 0
    assert sorted(rows(pool, "train")) == sorted(wanted_rows(root))


def test_streams_go_on_too(pool: Pool) -> None:
    """A function that yields the same again is drawn from up to the place, in windows."""

    def numbers() -> Iterator[dict[str, object]]:
        for i in range(400):
            yield {"i": i, "b": bytes([i % 256]) * 1000}

    whole = ingest(pool, "whole", numbers, window_bytes=50_000, **SHARD)
    assert 0 < cut_short(pool, "cut", numbers, 222, window_bytes=50_000) < 400
    report = ingest(pool, "cut", numbers, window_bytes=50_000, **SHARD)
    assert report.fingerprint == whole.fingerprint
    assert report.order["kind"] == "windows"
    order = [int(sample["i"]) for sample in samples(pool, "cut")]
    with Dataset(pool, "cut") as found:
        written = found.written_as(np.arange(400))
        assert written is not None
        assert written.tolist() == order
    assert sorted(order) == list(range(400))


def test_another_source_seed_or_fields_are_refused(pool: Pool, tmp_path: Path) -> None:
    """With both sides shown; nothing is lost by it; restart throws the parts away."""
    root = images(tmp_path / "in")
    kept = cut_short(pool, "cut", root, 30)
    changes: list[tuple[dict[str, Any], str]] = [
        ({"seed": 1}, "order was .* now"),
        ({"shuffle": False}, "order was"),
        ({"fields": ["image"]}, "fields were"),
        ({"layout": "columns"}, "layout was auto"),
    ]
    for options, said in changes:
        with pytest.raises(IngestError, match=said):
            ingest(pool, "cut", root, **SHARD, **options)
    victim = next(root.rglob("*.jpg"))
    before = victim.read_bytes()
    victim.write_bytes(before + b"\0")
    with pytest.raises(IngestError, match=r"the source has changed.*--restart"):
        ingest(pool, "cut", root, **SHARD)
    assert unfinished_ingests(pool)["cut"].rows == kept
    report = ingest(pool, "cut", root, resume=False, **SHARD)
    assert report.resumed_samples == 0
    assert sorted(rows(pool, "cut")) == sorted(wanted_rows(root))
    with Dataset(pool, "cut") as found:
        nonces = {part.nonce for part in found.manifest.parts}
    left = {key.split("/")[2] for key in keys_left(pool, "cut")} - {"manifest"}
    assert left == nonces, "objects of the first try are left"


@pytest.mark.parametrize("change", ["grows", "is replaced", "goes"])
def test_a_file_that_changes_while_it_is_read_ends_the_ingest(
    pool: Pool, tmp_path: Path, change: str
) -> None:
    """Samples were of both. The next call finds another source, as after a cut."""
    path, line = tmp_path / "a.jsonl", '{"x": "' + "y" * 4000 + '"}\n'
    path.write_text(line * 60)

    def changed(now: IngestProgress) -> None:
        if now.records == 30:
            path.rename(tmp_path / "b")
            if change != "goes":
                path.write_text(line * (61 if change == "grows" else 60))

    with pytest.raises(IngestError, match="changed while it was read"):
        ingest(pool, "a", path, progress=changed, **SHARD)
    assert list_datasets(pool) == []
    path.write_text(line)
    with pytest.raises(IngestError, match="source has changed"):
        ingest(pool, "a", path, **SHARD)
    assert ingest(pool, "a", path, resume=False, **SHARD).samples == 1


def test_bad_records_are_named_and_left_out_when_asked(pool: Pool, tmp_path: Path) -> None:
    """A cut image and a dead link: an error by name, or left out, counted, with what was wrong."""
    root = images(tmp_path / "in")
    cut = root / "class1/00001.jpg"
    cut.write_bytes(cut.read_bytes()[:-10])
    (root / "class2/dead.jpg").symlink_to("nowhere")
    with pytest.raises(IngestError, match=r"bad record class\d/.*--on-error skip"):
        ingest(pool, "train", root, **SHARD)
    assert list_datasets(pool) == []
    report = ingest(pool, "train", root, on_error="skip", **SHARD)
    problems = {s.name: s.problem for s in report.skipped}
    assert set(problems) == {"class1/00001.jpg", "class2/dead.jpg"}
    assert "cut short" in problems["class1/00001.jpg"]
    assert "cannot be read" in problems["class2/dead.jpg"]
    assert (report.samples, report.as_dict()["skipped_count"]) == (59, 2)
    assert len(rows(pool, "train")) == 59


def test_skipped_records_are_remembered_over_a_cut(pool: Pool) -> None:
    """Each is reported once, whichever run left it out; too many are an error."""
    source = [{"x": np.full(1000, i, "i4") if i % 10 else i} for i in range(200)]
    fields = {"x": Field("int32", (1000,))}
    options: dict[str, Any] = {"fields": fields, "on_error": "skip", "shuffle": False}
    cut_short(pool, "cut", source, 150, **options)
    with pytest.raises(IngestError, match=r"more than 17 bad records.*list\[170\]"):
        ingest(pool, "cut", source, max_skipped=17, **SHARD, **options)
    report = ingest(pool, "cut", source, **SHARD, **options)
    assert [s.origin for s in report.skipped] == list(range(0, 200, 10))
    assert [s.name for s in report.skipped][:2] == ["list[0]", "list[10]"]
    assert "is 0" in report.skipped[0].problem or "int" in report.skipped[0].problem
    first = [int(sample["x"][0]) for sample in samples(pool, "cut")]
    assert first == [i for i in range(200) if i % 10]


def test_a_full_pool_keeps_what_is_done(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No space in the middle: the error says what is kept and what to do; then it goes on."""
    root = images(tmp_path / "in")
    put, count = Pool.put, 0

    def full(self: Pool, key: str, *args: Any, **options: Any) -> Any:
        nonlocal count
        count += "stream-0" in key
        if count > 4:
            raise DeviceFull(f"no space left for {key}")
        return put(self, key, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Pool, "put", full)
        with pytest.raises(DeviceFull, match=r"no space.*samples are kept.*goes on from there"):
            ingest(pool, "train", root, **SHARD)
    assert list_datasets(pool) == []
    assert ingest(pool, "train", root, **SHARD).resumed_samples > 0
    assert sorted(rows(pool, "train")) == sorted(wanted_rows(root))


def test_a_failed_publication_loses_nothing(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the last part and the manifest: all parts are kept, the next run only publishes."""
    root = images(tmp_path / "in")

    def fail(*_: object, **__: object) -> None:
        raise TooFewDevices("just now")

    with monkeypatch.context() as patch:
        patch.setattr("hpstore.loaders.ingestion.part_committer.publish", fail)
        with pytest.raises(TooFewDevices, match="60 samples are kept"):
            ingest(pool, "train", root, **SHARD)
    assert ingest(pool, "train", root, **SHARD).resumed_samples == 60
    assert sorted(rows(pool, "train")) == sorted(wanted_rows(root))
    assert verify_dataset(pool, "train").clean


def test_a_part_stays_when_its_note_may_have_been_put(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The put of the journal fails and is visible all the same: what it names must be there."""
    root = images(tmp_path / "in")
    save = Journal.save

    def unclear(self: Journal, progressed: Progressed) -> None:
        save(self, progressed)
        if progressed.parts:
            raise TooFewDevices("not acknowledged")

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "save", unclear)
        with pytest.raises(TooFewDevices):
            ingest(pool, "train", root, **SHARD)
    assert ingest(pool, "train", root, **SHARD).resumed_samples > 0
    assert verify_dataset(pool, "train").clean


def test_a_kill_right_after_publication_is_no_unfinished_ingest(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal that is still there names parts of the data set: they stay."""
    root = images(tmp_path / "in", 12)
    with monkeypatch.context() as patch:
        patch.setattr("hpstore.loaders.ingestion.ingest_journal.Journal.remove", lambda _: None)
        ingest(pool, "train", root, **SHARD)
    other = images(tmp_path / "other", 6)
    with pytest.raises(VersionConflict, match="exists"):
        ingest(pool, "train", root, **SHARD)
    cut_short(pool, "train", other, 4, overwrite=True)
    assert sorted(rows(pool, "train")) == sorted(wanted_rows(root))
    ingest(pool, "train", other, overwrite=True, **SHARD)
    assert sorted(rows(pool, "train")) == sorted(wanted_rows(other))
    assert unfinished_ingests(pool) == {}


def test_a_taken_name_is_refused_before_anything_is_read(pool: Pool, tmp_path: Path) -> None:
    """Also by a data set that came while the ingest was running; overwrite replaces it whole."""
    root = images(tmp_path / "in", 12)
    first = ingest(pool, "train", root, **SHARD)
    with pytest.raises(VersionConflict, match="exists"):
        ingest(pool, "train", tmp_path / "nowhere")
    half = images(tmp_path / "half", 6)
    second = ingest(pool, "train", half, overwrite=True, **SHARD)
    assert first.fingerprint != second.fingerprint
    assert sorted(rows(pool, "train")) == sorted(wanted_rows(half))
    assert remove_orphans(pool, "train") == 0, "objects of the replaced one are left"


def test_orphans_are_removed_and_an_unfinished_ingest_is_not(pool: Pool, tmp_path: Path) -> None:
    """remove_orphans knows the journal; deleting the name deletes the parts and the journal."""
    root = images(tmp_path / "in")
    kept = cut_short(pool, "cut", root, 30)
    remove_orphans(pool, "cut")
    assert unfinished_ingests(pool)["cut"].rows == kept
    assert ingest(pool, "cut", root, **SHARD).resumed_samples == kept
    assert verify_dataset(pool, "cut").clean
    delete_dataset(pool, "cut")
    cut_short(pool, "cut", root, 30)
    delete_dataset(pool, "cut")
    assert keys_left(pool, "cut") == []


def test_an_empty_source_needs_fields(pool: Pool) -> None:
    """Nothing to tell fields from is an error; with fields it is an empty data set."""
    with pytest.raises(IngestError, match="no sample to tell the fields from"):
        ingest(pool, "none", [])
    assert ingest(pool, "none", [], fields={"x": Field("int64")}).samples == 0
    assert len(Dataset(pool, "none")) == 0
    with pytest.raises(ConfigError, match="on_error"):
        ingest(pool, "other", [], on_error="ignore")


CHILD = """
import os, signal, sys
import hpstore
from hpstore.loaders import ingest
from hpstore.pool.pool import Pool
config, root, parts = sys.argv[1], sys.argv[2], int(sys.argv[3])
put_many, count = Pool.put_many, 0
def deadly(self, objects, *args, **options):
    global count
    info = put_many(self, objects, *args, **options)
    count += any(key.endswith("/pages") for key in objects)
    if count == parts:
        os.kill(os.getpid(), signal.SIGKILL)
    return info
Pool.put_many = deadly
with hpstore.open(config) as pool:
    ingest(pool, "train", root, shard_bytes=1 << 16, unit_bytes=1 << 14)
"""


def test_a_killed_process_leaves_nothing_visible_and_goes_on(pool: Pool, tmp_path: Path) -> None:
    """SIGKILL twice in mid-ingest, each time as objects of a part are stored that the journal has
    not; processes of their own. The last run finishes and leaves nothing of it behind.
    """
    root = images(tmp_path / "in")
    kept = [0]
    for parts in (2, 3):
        done = subprocess.run(
            [sys.executable, "-c", CHILD, str(tmp_path / "pool.toml"), str(root), str(parts)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            check=False,
            timeout=100,
        )
        assert done.returncode == -signal.SIGKILL
        assert list_datasets(pool) == []
        kept.append(unfinished_ingests(pool)["train"].rows)
    assert kept == sorted(set(kept)), f"no progress: {kept}"
    report = ingest(pool, "train", root, **SHARD)
    assert report.resumed_samples == kept[-1]
    assert sorted(rows(pool, "train")) == sorted(wanted_rows(root))
    assert verify_dataset(pool, "train").clean
    assert remove_orphans(pool, "train") == 0, "objects of killed runs are left"
