"""Read all bytes of a dataset and compare them with every checksum there is."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

import numpy as np

from hpstore.errors import HpstoreError
from hpstore.loaders.dataset.dataset_manifest import ORDER, ContentDigest, column_key
from hpstore.loaders.dataset.dataset_versions import read_manifest
from hpstore.loaders.dataset.index_tables import check_hash
from hpstore.loaders.dataset.record_layout import Int64s
from hpstore.loaders.dataset.record_reader import StoredData
from hpstore.loaders.dataset.record_stream import Stream
from hpstore.loaders.dataset.shard_layout import index_bytes, zarr_index
from hpstore.loaders.dataset.stored_manifests import require_pool
from hpstore.maintenance.rebuild import Progress, ProgressCallback
from hpstore.pool.pool import Pool
from hpstore.units import MIB

CHUNK_BYTES = 32 * MIB  # of records in memory at a time, or one record
CHUNK_ROWS = 1 << 16
MAX_LISTED = 1000  # bad samples and problems that are named; all are counted


@dataclass(slots=True, kw_only=True)
class DatasetReport:
    """What verify_dataset found. `bad_samples` and `problems` hold the first MAX_LISTED."""

    name: str
    samples: int = 0
    bytes: int = 0  # of records and columns that were read
    bad_count: int = 0
    bad_samples: list[int] = field(default_factory=list)  # records that do not match
    problem_count: int = 0
    problems: list[str] = field(default_factory=list)  # everything else, in words

    @property
    def clean(self) -> bool:
        """Whether every byte is as it was written."""
        return not self.bad_count and not self.problem_count

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {**asdict(self), "clean": self.clean}

    def note(self, problem: str) -> None:
        """Count a problem; name it while there is room.

        Parameters
        ----------
        problem
            What is wrong, and where.
        """
        self.problem_count += 1
        if len(self.problems) < MAX_LISTED:
            self.problems.append(problem)

    def note_bad(self, samples: list[int]) -> None:
        """Count samples whose record does not match its checksum.

        Parameters
        ----------
        samples
            Their indices.
        """
        self.bad_count += len(samples)
        self.bad_samples += samples[: MAX_LISTED - len(self.bad_samples)]


def verify_dataset(
    pool: Pool,
    name: str,
    *,
    version: str | None = None,
    progress: ProgressCallback | None = None,
) -> DatasetReport:
    """Read all of a dataset: records, side and column objects, indices, the content digest.

    Damage that parity replaces is no problem here: it is repaired and counted by the pool. Goes on
    after a problem. Takes 32 MiB for records, or one record.

    Parameters
    ----------
    pool
        An open pool.
    name
        Name of the dataset.
    version
        Name of the version. Default: the newest.
    progress
        Called by this thread after each shard or column object, with the bytes so far.

    Returns
    -------
    DatasetReport
        Samples that do not match their checksums, and what else is wrong.

    Raises
    ------
    ObjectNotFound
        There is no published dataset of this name, or no such version of it.
    ConfigError, InvalidKey
        `name` is something else than a dataset, or no dataset can have it.
    IntegrityError, FormatTooNew, TooManyErasures
        The manifest is damaged, was written by a newer hpstore, or cannot be read now.
    """
    manifest = read_manifest(require_pool(pool, "verify_dataset"), name, version)
    with StoredData(pool, name, manifest) as data:
        return _Verification(data, progress).run()


class _Verification:
    """One run of verify_dataset."""

    def __init__(self, data: StoredData, progress: ProgressCallback | None) -> None:
        self._data, self._progress = data, progress
        self._report = DatasetReport(name=data.name, samples=len(data))
        self._content = ContentDigest()
        self._columns = [
            (column_key(data.name, part.column_nonce(column), column, cut), column, wanted)
            for part in data.manifest.parts
            for column, hashes in part.columns.items()
            for cut, wanted in enumerate(hashes)
        ]
        self._total = sum(s.shard_count for s in data.streams) + len(self._columns)
        self._done = 0

    def run(self) -> DatasetReport:
        report = self._report
        for stream in self._data.streams:
            for shard in range(stream.shard_count):
                key = self._data.shard_key(stream, shard)
                try:
                    self._shard(stream, shard)
                except HpstoreError as error:
                    report.note(f"shard {key!r}: {error}")
                self._tell(key)
            try:
                self._pages(stream)
            except HpstoreError as error:
                report.note(f"pages of stream {stream.name!r}: {error}")
        for key, column, wanted in self._columns:
            try:
                self._column(key, column, wanted)
            except HpstoreError as error:
                report.note(f"column {key!r}: {error}")
            self._tell(key)
        if report.clean and self._content.hexdigest() != self._data.manifest.content:
            report.note("the samples do not have the digest that the manifest names")
        return report

    def _tell(self, key: str) -> None:
        self._done += 1
        if self._progress is not None:
            self._progress(
                Progress(done=self._done, total=self._total, bytes=self._report.bytes, key=key)
            )

    def _shard(self, stream: Stream, shard: int) -> None:
        """Side object, records, index."""
        self._content.add_side(stream.name, stream.record, self._data.side_tables(stream, shard))
        first, last = stream.row_starts[shard : shard + 2].tolist()
        starts: list[Int64s] = []
        for low in range(first, last, CHUNK_ROWS):
            rows = np.arange(low, min(low + CHUNK_ROWS, last), dtype=np.int64)
            places = self._data.locate(stream, rows)
            starts.append(places.start)
            chunk = np.cumsum(places.length) // CHUNK_BYTES
            for part in np.split(rows, np.flatnonzero(np.diff(chunk)) + 1):
                records, found = self._data.raw_records(stream, part)
                self._report.note_bad(part[self._data.mismatches(records, found)].tolist())
                self._report.bytes += int(found.length.sum())
        if not stream.compression:
            self._index(stream, shard, np.concatenate(starts))

    def _index(self, stream: Stream, shard: int, starts: Int64s) -> None:
        """The zarr indices behind the payload."""
        record, payload = stream.record, int(stream.payload_bytes[shard])
        size = payload + index_bytes(len(starts), len(record.fixed))
        reader = self._data.reader(stream, shard)
        if reader.size != size:
            self._report.note(
                f"shard {self._data.shard_key(stream, shard)!r} has {reader.size} bytes, not {size}"
            )
            return
        wanted = b"".join(
            zarr_index(starts + record.offsets[name], record.fields[name].row_bytes)
            for name in record.fixed
        )
        found = bytearray(len(wanted))
        if found:
            reader.read_into(found, payload)
        if found != wanted:
            key = self._data.shard_key(stream, shard)
            self._report.note(f"shard {key!r}: its index is not that of its records")

    def _pages(self, stream: Stream) -> None:
        """The page object against the records' places."""
        firsts = self._data.pages(stream).first_sample
        if firsts[-1] != len(self._data):
            self._report.note(
                f"pages of stream {stream.name!r} count {firsts[-1]} samples, not {len(self._data)}"
            )

    def _column(self, key: str, column: str, wanted: str) -> None:
        data = self._data.pool.get(key)
        check_hash(key, data, wanted)
        self._report.bytes += len(data)
        if column != ORDER:
            self._content.add_column(list(self._data.manifest.stored)[int(column)], data)
