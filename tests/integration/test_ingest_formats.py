"""ingest of every format: whole or not at all, on after a kill, never of a changed source."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpstore.errors import IngestError
from hpstore.loaders import ingest, open_source, verify_dataset
from hpstore.pool.pool import Pool
from tests.integration.ingest_cases import SHARD, cut_short, keys_left, make_pool, samples
from tests.integration.source_makers import MAKERS, record

COUNT = 60
pytestmark = pytest.mark.filterwarnings(  # litdata leaves files to the garbage collection
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
EVERY = pytest.mark.parametrize("kind", MAKERS)


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    with make_pool(tmp_path) as made:
        yield made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "in"
    made.mkdir()
    return made


def numbers(pool: Pool, name: str) -> list[int]:
    """Numbers of the records of a dataset; each is checked against what was written."""
    found = [int(sample["n"]) for sample in samples(pool, name)]
    for sample in samples(pool, name):
        wanted = record(int(sample["n"]))
        value = sample["s"].decode() if isinstance(sample["s"], bytes) else sample["s"]
        assert value == wanted["s"]
    return found


@EVERY
def test_every_record_is_there_once(pool: Pool, folder: Path, kind: str) -> None:
    """In the order of the source without a shuffle; in another with one; clean."""
    where = MAKERS[kind](folder, COUNT)
    assert open_source(where).kind == kind
    report = ingest(pool, "plain", where, shuffle=False, **SHARD)
    assert (report.samples, report.format, report.skipped) == (COUNT, kind, ())
    assert numbers(pool, "plain") == list(range(COUNT))
    ingest(pool, "mixed", where, seed=1, **SHARD)
    assert sorted(numbers(pool, "mixed")) == list(range(COUNT)) != numbers(pool, "mixed")
    assert verify_dataset(pool, "mixed").clean


@EVERY
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_cut_ingest_goes_on(pool: Pool, folder: Path, kind: str, shuffle: bool) -> None:
    """Stopped twice: what was kept is not written again, and the end is the same."""
    where = MAKERS[kind](folder, COUNT)
    options = {"shuffle": shuffle, "window_bytes": 30_000}
    whole = ingest(pool, "whole", where, **options, **SHARD)  # type: ignore[arg-type]  # as given
    kept = cut_short(pool, "cut", where, 25, **options)
    more = cut_short(pool, "cut", where, 50, **options)
    assert 0 < kept < more < COUNT
    report = ingest(pool, "cut", where, **options, **SHARD)  # type: ignore[arg-type]  # as given
    assert report.resumed_samples == more
    assert report.fingerprint == whole.fingerprint
    assert len(keys_left(pool, "cut")) == len(keys_left(pool, "whole"))


@EVERY
def test_a_changed_source_is_refused(pool: Pool, folder: Path, kind: str) -> None:
    """A file with another time: an interrupted ingest does not go on with it."""
    if kind == "lance":
        pytest.skip("a Lance data set changes by versions: test_optional_sources.py")
    where = MAKERS[kind](folder, COUNT)
    kept = cut_short(pool, "cut", where, 40)
    file = next(f for f in sorted(folder.rglob("*")) if f.is_file() and "lock" not in f.name)
    os.utime(file, ns=(1, 1))
    with pytest.raises(IngestError, match=rf"after {kept} samples .*the source has changed"):
        ingest(pool, "cut", where, **SHARD)
    assert ingest(pool, "cut", where, resume=False, **SHARD).samples == COUNT


@EVERY
def test_one_record_is_enough(pool: Pool, folder: Path, kind: str) -> None:
    assert ingest(pool, "one", MAKERS[kind](folder, 1), **SHARD).samples == 1
    assert numbers(pool, "one") == [0]
