"""Records larger than the pool's memory budget come whole from every kind of source."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import hpstore
from hpstore.config import Settings
from hpstore.loaders import ingest, verify_dataset
from hpstore.pool.pool import Pool
from hpstore.units import MIB
from tests.integration.ingest_cases import samples

BUDGET = 16 * MIB
TEXT = "x" * (BUDGET + 3 * MIB) + "end"


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    disks = [tmp_path / f"disk{i}" for i in range(3)]
    settings = Settings(memory_bytes=BUDGET)
    with hpstore.create(
        disks, data=2, parity=1, config=tmp_path / "pool.toml", settings=settings
    ) as made:
        yield made


def source_of(root: Path, kind: str) -> Path | list[dict[str, str]]:
    """Three records, of which the second is larger than the budget."""
    texts = ["a", TEXT, "b"]
    path = root / f"in.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps({"s": text}) + "\n" for text in texts), "utf-8")
    elif kind == "csv":
        path.write_text("\n".join(["s", *texts]) + "\n", "utf-8")
    elif kind == "parquet":
        pa = pytest.importorskip("pyarrow", reason="needs pyarrow (the extra `parquet`)")
        pytest.importorskip("pyarrow.parquet").write_table(pa.table({"s": texts}), path)
    elif kind == "tar":
        with tarfile.open(path, "w") as tar:
            for number, text in enumerate(texts):
                member = tarfile.TarInfo(f"{number}.txt")
                member.size = len(text)
                tar.addfile(member, io.BytesIO(text.encode()))
    else:
        return [{"s": text} for text in texts]
    return path


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet", "tar", "list"])
def test_a_record_above_the_budget_comes_whole(pool: Pool, tmp_path: Path, kind: str) -> None:
    """Shuffled and in parts; read back, and every checksum compared."""
    report = ingest(pool, "large", source_of(tmp_path, kind), shard_bytes="4MiB")
    assert report.samples == 3
    field = next(iter(report.fields))
    found = samples(pool, "large")
    assert sorted(len(sample[field]) for sample in found) == [1, 1, len(TEXT)]
    assert any(sample[field] == TEXT for sample in found)
    assert verify_dataset(pool, "large").clean
