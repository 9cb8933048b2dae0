"""Files of every format with the same records, made by the formats' own writers."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

VALUE = 2000
Maker = Callable[[Path, int], Path]  # a folder that is there, how many records: the source


def record(number: int) -> dict[str, Any]:
    """An int and some text; each its own."""
    rng = np.random.default_rng(number)
    return {"n": number, "s": rng.bytes(VALUE).hex()}


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


MAKERS: dict[str, Maker] = {"jsonl": jsonl, "csv": csv_files}
