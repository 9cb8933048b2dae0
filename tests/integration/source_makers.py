"""Files of every format with the same records, made by the formats' own writers."""

from __future__ import annotations

import csv
import gzip
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

VALUE = 2000
Maker = Callable[[Path, int], Path]  # a folder that is there, how many records: the source


def record(number: int) -> dict[str, Any]:
    """An int and some text; each its own."""
    rng = np.random.default_rng(number)
    return {"n": number, "s": rng.bytes(VALUE).hex()}


def package(name: str, extra: str) -> Any:
    """A module, which an extra installs. Skips where it is missing, or was built for another
    torch."""
    try:
        return importlib.import_module(name)
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"needs {name} (the extra `{extra}`): {error}")


def jsonl(folder: Path, count: int) -> Path:
    """Two plain files and a compressed one."""
    rows = [json.dumps(record(n)).encode() + b"\n" for n in range(count)]
    third = count // 3
    (folder / "a.jsonl").write_bytes(b"".join(rows[:third]))
    (folder / "b.jsonl").write_bytes(b"".join(rows[third : 2 * third]))
    (folder / "c.jsonl.gz").write_bytes(gzip.compress(b"".join(rows[2 * third :])))
    return folder


def csv_files(folder: Path, count: int) -> Path:
    """Two files."""
    for name, first, stop in [("a", 0, count // 2), ("b", count // 2, count)]:
        with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, ["n", "s"])
            writer.writeheader()
            writer.writerows(record(n) for n in range(first, stop))
    return folder


def tfrecord(folder: Path, count: int) -> Path:
    """Two files, by the `tfrecord` package's writer, which gzip reads again."""
    writer = pytest.importorskip("tfrecord.writer", reason="needs tfrecord (its extra)")
    for name, first, stop in [("a", 0, count // 2), ("b", count // 2, count)]:
        made = writer.TFRecordWriter(str(folder / f"{name}.tfrecord"))
        for number in range(first, stop):
            row = record(number)
            made.write({"n": (row["n"], "int"), "s": (row["s"].encode(), "byte")})
        made.close()
    return folder


def hdf5(folder: Path, count: int) -> Path:
    """Chunks of seven rows, texts of any length."""
    h5py = pytest.importorskip("h5py", reason="needs h5py (the extra `hdf5`)")
    rows = [record(number) for number in range(count)]
    with h5py.File(folder / "a.h5", "w") as file:
        file.create_dataset("n", data=[row["n"] for row in rows], chunks=(min(7, count),))
        file.create_dataset("s", data=[row["s"] for row in rows], dtype=h5py.string_dtype())
    return folder / "a.h5"


def lance(folder: Path, count: int) -> Path:
    """Fragments of twenty rows."""
    made = pytest.importorskip("lance", reason="needs pylance (the extra `lance`)")
    pa = pytest.importorskip("pyarrow", reason="needs pyarrow (the extra `parquet`)")
    table = pa.Table.from_pylist([record(number) for number in range(count)])
    made.write_dataset(table, str(folder / "a.lance"), max_rows_per_file=20)
    return folder / "a.lance"


def mds(folder: Path, count: int) -> Path:
    """Shards of a few samples, by mosaicml-streaming's writer."""
    made = package("streaming.base.format.mds", "mds")
    columns = {"n": "int", "s": "str"}
    with made.MDSWriter(out=str(folder / "a"), columns=columns, size_limit=40_000) as writer:
        for number in range(count):
            writer.write(record(number))
    return folder / "a"


def litdata(folder: Path, count: int) -> Path:
    """Chunks of seven samples, by litdata's own Cache."""
    streaming = package("litdata.streaming", "litdata")
    (folder / "a").mkdir()
    cache = streaming.Cache(str(folder / "a"), chunk_size=7)
    for number in range(count):
        cache[number] = record(number)
    cache.done()
    cache.merge()
    return folder / "a"


MAKERS: dict[str, Maker] = {
    "jsonl": jsonl,
    "csv": csv_files,
    "tfrecord": tfrecord,
    "hdf5": hdf5,
    "lance": lance,
    "mds": mds,
    "litdata": litdata,
}
