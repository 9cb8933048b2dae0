"""Ingest against `write_batch` of the same records, and against one pass of its reader alone.

Each repetition writes the same records of 1 KiB and a label with `DatasetWriter.write_batch`, from
Parquet and from a tar, and reads and ingests a folder of images of 8 KiB; all in one process, in
turn, each time into a new dataset of one pool. The sources are read from the page cache.
"""

from __future__ import annotations

import io
import tarfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import hpstore
from hpstore.benchmarks.harness.bench_verdicts import pairs, spread, verdict
from hpstore.benchmarks.harness.measure import Options, interleave
from hpstore.benchmarks.harness.raw_devices import workspace
from hpstore.errors import ConfigError
from hpstore.loaders import DatasetWriter, Field, delete_dataset, ingest
from hpstore.loaders.ingestion.image_source import ImageFolder
from hpstore.units import KIB

RECORD_BYTES, IMAGE_BYTES, BATCH = KIB, 8 * KIB, 1024
WRITE_BAR, READ_BAR = 0.7, 0.8
FIELDS = {"data": Field("bytes"), "label": Field("int64")}


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordFiles:
    """The same `rows` records in every format, and `images` files."""

    directory: Path
    rows: int
    images: int

    def records(self) -> list[bytes]:
        """Noise, the same each time."""
        noise = np.random.default_rng(0).bytes(self.rows * RECORD_BYTES)
        return [noise[at : at + RECORD_BYTES] for at in range(0, len(noise), RECORD_BYTES)]

    def write(self) -> dict[str, str]:
        """Make the files; returns why a format was left out."""
        records, left = self.records(), {}
        with tarfile.open(self.directory / "records.tar", "w") as tar:
            for number, data in enumerate(records):
                for ending, content in (("data", data), ("cls", str(number).encode())):
                    member = tarfile.TarInfo(f"{number:09d}.{ending}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError:
            left["parquet"] = "needs pyarrow: pip install 'hpstore[parquet]'"
        else:
            columns = {"data": records, "label": np.arange(len(records))}
            pyarrow.parquet.write_table(
                pyarrow.table(columns),
                self.directory / "records.parquet",
                row_group_size=16 * BATCH,
                compression="none",
                use_dictionary=False,
            )
        rng = np.random.default_rng(1)
        for number in range(self.images):
            body = rng.bytes(IMAGE_BYTES).replace(b"\xff", b"\0")
            path = self.directory / "images" / f"class{number % 4}" / f"{number:07d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"\xff\xd8\xff\xda\0\2" + body + b"\xff\xd9")
        return left


class Contenders:
    """What is timed: each call writes a dataset and removes it, or reads one source."""

    def __init__(self, pool: hpstore.Pool, sources: RecordFiles) -> None:
        self._pool, self._sources, self._records = pool, sources, sources.records()

    def _seconds(self, write: Callable[[str], object]) -> float:
        began = time.perf_counter()
        write("bench")
        took = time.perf_counter() - began
        delete_dataset(self._pool, "bench")
        return took

    def write_batch(self) -> float:
        """Seconds to write the records from lists in memory."""
        labels = np.arange(len(self._records))

        def write(name: str) -> None:
            with DatasetWriter(self._pool, name, FIELDS) as writer:
                for at in range(0, len(labels), BATCH):
                    some = slice(at, at + BATCH)
                    writer.write_batch({"data": self._records[some], "label": labels[some]})

        return self._seconds(write)

    def ingested(self, source: str) -> float:
        """Seconds to ingest a file or folder with ingest()'s defaults."""
        return self._seconds(
            lambda name: ingest(self._pool, name, str(self._sources.directory / source))
        )

    def images_read(self) -> float:
        """Seconds to scan the folder and read all images, which are checked, and nothing else."""
        began = time.perf_counter()
        folder = ImageFolder(self._sources.directory / "images")
        for _ in folder.read_rows(range(folder.length), folder.threads):
            pass
        return time.perf_counter() - began


def bench_ingest(options: Options) -> dict[str, object]:
    """Records per second of each, and ratios by pairs of one repetition.

    Parameters
    ----------
    options
        `size_bytes`: of the records of each format.

    Returns
    -------
    dict
        JSON: rates, ratios against their bars, formats that were left out.

    Raises
    ------
    ConfigError
        The size is less than a record.
    """
    rows = options.size_bytes // RECORD_BYTES
    if rows < 1:
        raise ConfigError(f"size: ingest needs at least {RECORD_BYTES} bytes")
    with workspace(options) as root:
        sources = RecordFiles(directory=root, rows=rows, images=max(1, rows // 8))
        left = sources.write()
        disks = [root / f"disk{number}" for number in range(6)]
        with hpstore.create(disks, data=4, parity=2, config=root / "pool.toml") as pool:
            found = Contenders(pool, sources)
            times = interleave(dict(_timed(found, left)), options.repeats)
    counts = {name: sources.images if "image" in name else rows for name in times}
    ratios: dict[str, object] = {
        f"{name}_to_write_batch": verdict(
            pairs(times["write_batch"], times[name]), WRITE_BAR, least=True
        )
        for name in ("parquet", "tar")
        if name in times
    }
    read = pairs(times["images_read"], times["images"])
    ratios["images_to_reader_alone"] = verdict(read, READ_BAR, least=True)
    return {
        "records": rows,
        "images": sources.images,
        "repeats": options.repeats,
        "records_per_second": {
            name: spread([counts[name] / one for one in seconds]) for name, seconds in times.items()
        },
        "left_out": left,
        "ratios": ratios,
    }


def _timed(found: Contenders, left: dict[str, str]) -> Iterator[tuple[str, Callable[[], float]]]:
    yield "write_batch", found.write_batch
    if "parquet" not in left:
        yield "parquet", lambda: found.ingested("records.parquet")
    yield "tar", lambda: found.ingested("records.tar")
    yield "images_read", found.images_read
    yield "images", lambda: found.ingested("images")
