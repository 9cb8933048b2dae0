"""The benchmark of ingest: every format beside its baseline, of the same records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpstore.benchmarks.harness.measure import Options
from hpstore.benchmarks.ingest_bench import bench_ingest
from hpstore.errors import ConfigError
from hpstore.units import KIB


def test_each_format_stands_beside_write_batch_or_its_reader(tmp_path: Path) -> None:
    """Forty records: rates of all five, three ratios with bars, nothing left behind."""
    pytest.importorskip("pyarrow")
    options = Options(directory=tmp_path, size_bytes=40 * KIB, repeats=2)
    found: dict[str, Any] = bench_ingest(options)
    assert (found["records"], found["images"], found["left_out"]) == (40, 5, {})
    rates = found["records_per_second"]
    assert set(rates) == {"write_batch", "parquet", "tar", "images_read", "images"}
    assert all(rate["median"] > 0 for rate in rates.values())
    ratios = found["ratios"]
    assert {name: row["bar"] for name, row in ratios.items()} == {
        "parquet_to_write_batch": ">= 0.7",
        "tar_to_write_batch": ">= 0.7",
        "images_to_reader_alone": ">= 0.8",
    }
    assert not list(tmp_path.iterdir())


def test_a_size_below_a_record_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least 1024 bytes"):
        bench_ingest(Options(directory=tmp_path, size_bytes=1, repeats=1))
