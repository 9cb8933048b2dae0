"""What an ingest says: while it runs, and at its end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

from hpstore.loaders.ingestion.ingest_journal import Skipped


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestProgress:
    """How far it is. `total`: None where the source does not know its length and too little is read
    to estimate it; `estimated`: by the share of it that is read."""

    records: int  # taken from the source, with skipped ones
    total: int | None
    bytes: int  # of samples written
    resumed: int  # of the records: those that an earlier run had taken
    estimated: bool = False


IngestCallback = Callable[[IngestProgress], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestReport:
    """What an ingest published."""

    name: str
    source: str
    format: str
    samples: int
    bytes: int  # of samples, as given
    fields: Mapping[str, tuple[str, tuple[int | None, ...]]]  # dtype and shape
    order: Mapping[str, object]  # how samples were mixed: see describe() of orders
    skipped: tuple[Skipped, ...]
    ignored: int  # entries of the source that are no records
    resumed_samples: int  # that an earlier run had stored
    fingerprint: str  # of the dataset
    seconds: float

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {**asdict(self), "skipped_count": len(self.skipped)}
