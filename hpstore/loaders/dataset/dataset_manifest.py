"""The record that makes a dataset real. JSON with a digest; bytes in docs/format.md."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from hpstore.codec.compression import NAMES
from hpstore.errors import ConfigError, FormatTooNew, IntegrityError
from hpstore.format.checksum import digest128
from hpstore.format.geometry import MAX_WIDTH, check_unit_bytes
from hpstore.format.keys import check_key
from hpstore.format.records import seal, unseal
from hpstore.format.untrusted_bytes import MALFORMED, MOST, brief, whole
from hpstore.loaders.dataset.fields import Field, FieldKind, check_field_name, stored_fields
from hpstore.loaders.dataset.record_layout import FieldLayout, FixedPlan, Record, group_fields
from hpstore.units import round_up

FORMAT = 1
NEWEST_FORMAT = 2  # with versions, or fields that an older hpstore would not know: Field.is_plain
KIND = "dataset"
PART_KIND = "dataset-part"
PREFIX = "data"
MOST_STREAMS = 9999  # of a dataset: fields of their own
MOST_CUT_ROWS = 1 << 20  # of a column object: what a writer puts in each but the last
MOST_RECORD_BYTES = 1 << 40
ORDER = "order"  # the column of a dataset that was shuffled on write
_NONCE = re.compile(r"[0-9a-f]{16}")
_RESERVED = ("journal", "manifest", "parts")
_VERSION = re.compile(r"parts/version-(\d+)-([^/]+)")
_VERSION_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_NUMBERED = re.compile(r"v\d+")
_OBJECT = re.compile(
    rf"{PREFIX}/(.+?)/(?:manifest|journal|parts/\d+-of-\d+|{_VERSION.pattern}"
    r"|[0-9a-f]{16}/(?:stream-\d+/(?:\d+(?:\.side)?|pages)|column-[^/]+/\d+))"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamShards:
    """The shards that one writer put for one stream. Lists by shard."""

    unit_bytes: int
    rows: tuple[int, ...]
    payload: tuple[int, ...]  # bytes of records and padding, before compression
    side: tuple[str, ...]  # XXH3-64 of the side objects, hex
    pages: str  # of the page object; "" when pages are arithmetic

    def to_json(self) -> dict[str, Any]:
        """For a manifest."""
        return {
            "unit_bytes": self.unit_bytes,
            "rows": list(self.rows),
            "payload": list(self.payload),
            "side": list(self.side),
            "pages": self.pages,
        }

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> StreamShards:
        """Inverse of to_json."""
        return cls(
            unit_bytes=whole(raw["unit_bytes"], "unit_bytes"),
            rows=tuple(whole(n, "rows") for n in raw["rows"]),
            payload=tuple(whole(n, "payload") for n in raw["payload"]),
            side=tuple(str(h) for h in raw["side"]),
            pages=str(raw["pages"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetPart:
    """What one writer put. A dataset is one part, or as many as wrote it."""

    nonce: str
    rows: int
    streams: tuple[StreamShards, ...]
    cuts: tuple[int, ...]  # rows of each column object
    columns: Mapping[str, tuple[str, ...]]  # XXH3-64 of the column objects by column, hex
    content: str  # digest over all samples, see Content
    column_nonces: Mapping[str, str] = field(default_factory=dict)  # of columns that came later

    @property
    def nonces(self) -> set[str]:
        """Of all objects that belong to it."""
        return {self.nonce, *self.column_nonces.values()}

    @property
    def units(self) -> tuple[int, ...]:
        """Bytes of a page of each stream."""
        return tuple(stream.unit_bytes for stream in self.streams)

    def column_nonce(self, column: str) -> str:
        """The nonce under which the objects of a column are."""
        return self.column_nonces.get(column, self.nonce)

    def to_json(self) -> dict[str, Any]:
        """For a manifest."""
        return {
            "nonce": self.nonce,
            "rows": self.rows,
            "content": self.content,
            "streams": [stream.to_json() for stream in self.streams],
            "cuts": list(self.cuts),
            "columns": {column: list(hashes) for column, hashes in self.columns.items()},
            **({"column_nonces": dict(self.column_nonces)} if self.column_nonces else {}),
        }

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> DatasetPart:
        """Inverse of to_json."""
        return cls(
            nonce=str(raw["nonce"]),
            rows=whole(raw["rows"], "rows"),
            streams=tuple(StreamShards.from_json(stream) for stream in raw["streams"]),
            cuts=tuple(whole(n, "cuts") for n in raw["cuts"]),
            columns={str(c): tuple(map(str, hashes)) for c, hashes in raw["columns"].items()},
            content=str(raw["content"]),
            column_nonces={
                str(column): _checked_nonce(nonce)
                for column, nonce in raw.get("column_nonces", {}).items()
            },
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetManifest:
    """A published dataset, or one part of it that waits for the others (`part`).

    `version` counts what was published under the name, `label` is what a version is called.
    """

    fields: Mapping[str, Field]
    layout: str
    data: int  # k at writing: pages of a stripe
    compression: str
    shuffle_seed: int | None  # when it was shuffled on write
    metadata: Mapping[str, Any]
    parts: tuple[DatasetPart, ...]
    content: str
    part: tuple[int, int] | None = None
    version: int = 1
    label: str = ""

    @property
    def version_name(self) -> str:
        """What it is opened by: its label, or "v" and its number."""
        return self.label or f"v{self.version}"

    @property
    def nonces(self) -> set[str]:
        """Of all objects that belong to it."""
        return {nonce for part in self.parts for nonce in part.nonces}

    @property
    def rows(self) -> int:
        """Samples."""
        return sum(part.rows for part in self.parts)

    @property
    def stored(self) -> dict[str, Field]:
        """Fields and masks, in the order of their columns."""
        return stored_fields(self.fields)

    @property
    def format(self) -> int:
        """The oldest that will do: without a history and with plain fields all read it."""
        return NEWEST_FORMAT if self.version > 1 else format_of(self.fields.values())

    @property
    def fingerprint(self) -> str:
        """Equal for the same samples in the same order with the same fields and layout."""
        facts = {**self.schema(), "rows": self.rows, "content": self.content}
        return digest128(json.dumps(facts, sort_keys=True).encode()).hex()

    def schema(self) -> dict[str, Any]:
        """What parts of one dataset have in common: fields and layout."""
        return {
            "fields": [[name, *made.to_json()] for name, made in self.fields.items()],
            "layout": self.layout,
        }

    def encode(self) -> bytes:
        """A sealed record."""
        history = {"version": self.version, "label": self.label} if self.version > 1 else {}
        return seal(
            {
                "kind": PART_KIND if self.part else KIND,
                "format": self.format,
                **history,
                **self.schema(),
                "data": self.data,
                "compression": self.compression,
                "shuffle_seed": self.shuffle_seed,
                "metadata": dict(self.metadata),
                "parts": [part.to_json() for part in self.parts],
                "part": list(self.part) if self.part else None,
                "rows": self.rows,
                "content": self.content,
                "fingerprint": self.fingerprint,
            }
        )

    @classmethod
    def decode(cls, data: bytes, *, where: str) -> DatasetManifest:
        """Inverse of encode. Raises ConfigError for another kind, IntegrityError, FormatTooNew."""
        _require_kind(data, where)
        body: dict[str, Any] = unseal(data, where=where, newest=NEWEST_FORMAT, users=True)
        try:
            made = cls(
                fields={str(n): Field.from_json(raw) for n, *raw in body["fields"]},
                layout=str(body["layout"]),
                data=whole(body["data"], "data"),
                compression=str(body["compression"]),
                shuffle_seed=body["shuffle_seed"],
                metadata=dict(body["metadata"]),
                parts=tuple(DatasetPart.from_json(part) for part in body["parts"]),
                content=str(body["content"]),
                part=_part_of(body["part"]),
                version=whole(body.get("version", 1), "version", least=1),
                label=_label_of(body.get("label", "")),
            )
            if made.compression not in ("", *NAMES):
                raise ValueError(f"compression {made.compression[:40]!r} is not known")
            _check_counts(made.fields, made.layout, made.data, made.parts)
            if made.format > whole(body["format"], "format"):
                raise ValueError(f"format {body['format']} has no such fields")
            same = made.rows == body["rows"] and made.fingerprint == body["fingerprint"]
        except MALFORMED as error:
            raise IntegrityError(f"{where}: manifest is malformed: {brief(error)}") from error
        if not same:
            raise IntegrityError(f"{where}: manifest does not have the fingerprint that it names")
        return made


def format_of(fields: Iterable[Field]) -> int:
    """Of a record with these fields."""
    return FORMAT if all(made.is_plain for made in fields) else NEWEST_FORMAT


def _check_counts(
    fields: Mapping[str, Field], layout: str, data: int, parts: Sequence[DatasetPart]
) -> None:
    """Raise ValueError or ConfigError for counts that no writer of datasets makes.

    What is computed from them decides how much memory tables take and where is read: a manifest
    must agree with itself, and every count is bound to a list that it really holds.
    """
    whole(data, "data", least=1, most=MAX_WIDTH)
    if layout not in list(FieldLayout):
        raise ValueError(f"layout {layout!r} is not known")
    for name, made in fields.items():
        check_field_name(name)
        whole(made.row_bytes, f"the size of field {name!r}", most=MOST_RECORD_BYTES)
    stored = stored_fields(fields)
    _, records = group_fields(stored, layout)
    scalars = [str(n) for n, f in enumerate(stored.values()) if f.kind is FieldKind.SCALAR]
    if not parts:
        raise ValueError("it has no parts")
    for part in parts:
        if len(part.streams) != len(records):
            raise ValueError(f"a part has {len(part.streams)} streams, its fields {len(records)}")
        _check_cuts(part, scalars)
        for stream, record, first in zip(
            part.streams, records.values(), parts[0].streams, strict=True
        ):
            if stream.unit_bytes != first.unit_bytes:
                raise ValueError("parts of one data set have pages of two sizes")
            _check_stream(stream, record, part.rows, data)


def _check_cuts(part: DatasetPart, scalars: Sequence[str]) -> None:
    for rows in part.cuts:
        whole(rows, "rows of a column object", least=1, most=MOST_CUT_ROWS)
    if sum(part.cuts) != part.rows:
        raise ValueError(f"column objects of {sum(part.cuts)} rows in a part of {part.rows}")
    if unknown := sorted(part.columns.keys() - {*scalars, ORDER}):
        raise ValueError(f"column {unknown[0][:80]!r} belongs to no field")
    lacking = [name for name in scalars if len(part.columns.get(name, ())) != len(part.cuts)]
    if lacking:
        raise ValueError(f"column {lacking[0]} has not as many objects as the part")


def _check_stream(stream: StreamShards, record: Record, rows: int, data: int) -> None:
    check_unit_bytes(stream.unit_bytes)
    if not len(stream.rows) == len(stream.payload) == len(stream.side):
        raise ValueError("a stream has not one entry for each of its shards")
    if sum(stream.rows) != rows:
        raise ValueError(f"shards of {sum(stream.rows)} rows in a part of {rows}")
    whole(sum(stream.payload), "bytes of a stream", most=MOST >> 1)
    plan = None if record.ragged else FixedPlan.of(record, stream.unit_bytes)
    for count, payload in zip(stream.rows, stream.payload, strict=True):
        whole(count, "rows of a shard", least=1)
        whole(payload, "bytes of a shard", least=count)  # an empty record takes one
        least = plan.payload_bytes(count) if plan is not None else count
        most = round_up(least, stream.unit_bytes * data) if plan is not None else payload
        if not least <= payload <= most:  # a full shard ends with a stripe
            raise ValueError(f"a shard of {count} rows has {payload} bytes")


def _checked_nonce(raw: object) -> str:
    if not isinstance(raw, str) or not _NONCE.fullmatch(raw):
        raise ValueError("the nonce of a column is 16 hex digits")
    return raw


def _label_of(raw: object) -> str:
    if raw != "" and not (isinstance(raw, str) and _VERSION_NAME.fullmatch(raw)):
        raise ValueError("a label is not one that a version can have")
    return str(raw)


def _part_of(raw: Any) -> tuple[int, int] | None:  # Any: JSON
    return (whole(raw[0], "a part"), whole(raw[1], "parts")) if raw else None


def _require_kind(data: bytes, where: str) -> None:
    """Say what it is instead when it is no manifest of a dataset."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"{where}: not a manifest") from error
    kind = body.get("kind") if isinstance(body, dict) else None
    if kind in (KIND, PART_KIND):
        found = body.get("format")
        if isinstance(found, int) and found > NEWEST_FORMAT:
            raise FormatTooNew(
                f"{where}: data set format {found}, this hpstore reads up to {NEWEST_FORMAT}"
            )
        return
    if isinstance(body, dict) and "shards" in body:
        raise ConfigError(
            f"{where} is a corpus of tokens of an earlier hpstore: write its texts again as a "
            "data set (examples/train.py shows how), then delete it with pool.delete()"
        )
    raise ConfigError(f"{where} is no manifest of a data set (kind {kind!r})")


class ContentDigest:
    """Digest of samples in their order, however they are cut into shards. Not thread-safe.

    XXH3-128 over, for each stream, the record checksums and ragged lengths, and for each scalar
    field the values; combined by name.
    """

    def __init__(self) -> None:
        self._hashes: dict[str, xxhash.xxh3_128] = {}

    def add_side(self, stream: str, record: Record, tables: Sequence[npt.NDArray[Any]]) -> None:
        """The next shard of a stream, by the tables of its side object."""
        self._add(f"{stream}/checksums", np.ascontiguousarray(tables[0], "<u8").data)
        for name, lengths in zip(record.ragged, tables[2:], strict=True):
            self._add(f"{name}/lengths", np.ascontiguousarray(lengths, "<u4").data)

    def add_column(self, field: str, data: Any) -> None:  # Any: whatever has a buffer
        """The next bytes of a scalar field's column."""
        self._add(f"{field}/values", data)

    def _add(self, name: str, data: Any) -> None:
        self._hashes.setdefault(name, xxhash.xxh3_128()).update(data)

    def hexdigest(self) -> str:
        """Of all that was added."""
        parts = {name: found.hexdigest() for name, found in self._hashes.items()}
        return digest128(json.dumps(parts, sort_keys=True).encode()).hex()


def check_dataset_name(name: str) -> str:
    """Return `name` if it can name a dataset, else raise ConfigError or InvalidKey."""
    if not isinstance(name, str):
        raise ConfigError(f"the name of a data set is a str, not a {type(name).__name__}")
    check_key(f"{PREFIX}/{name}/manifest")
    bad = [c for c in name.split("/") if c in _RESERVED or _NONCE.fullmatch(c)]
    if bad:
        raise ConfigError(
            f"data set name {name!r}: {bad[0]!r} is reserved; no component is 'journal', "
            "'manifest', 'parts' or 16 hex digits"
        )
    return name


def check_new_name(name: str) -> str:
    """As check_dataset_name, for one that is to be written: the longest of its keys fits, too."""
    nonce, number = "0" * 16, (10**9, 10**9)
    for key in (side_key(name, nonce, MOST_STREAMS, 10**9), part_key(name, number)):
        check_key(key)
    return check_dataset_name(name)


def manifest_key(name: str) -> str:
    """Key of the manifest."""
    return f"{PREFIX}/{name}/manifest"


def journal_key(name: str) -> str:
    """Key of what an unfinished ingest has stored."""
    return f"{PREFIX}/{name}/journal"


def check_label(label: str | None) -> str:
    """A label for a version; "" for None. Raises ConfigError for what cannot be one."""
    if label is None:
        return ""
    if (
        not isinstance(label, str)
        or not _VERSION_NAME.fullmatch(label)
        or _NUMBERED.fullmatch(label)
    ):
        raise ConfigError(
            f"version {label!r}: up to 64 letters, digits, '.', '_' and '-', the first of them a "
            "letter or a digit; 'v' with a number is what a version without a name is called"
        )
    return label


def version_key(name: str, version: int, version_name: str) -> str:
    """Key of the manifest of a version that is not the newest."""
    return f"{PREFIX}/{name}/parts/version-{version:06d}-{version_name}"


def version_of(name: str, key: str) -> tuple[int, str] | None:
    """Number and name of the version whose manifest has this key; None for other keys."""
    found = _VERSION.fullmatch(key.removeprefix(f"{PREFIX}/{name}/"))
    return None if found is None else (int(found[1]), found[2])


def part_key(name: str, part: tuple[int, int]) -> str:
    """Key of a part's manifest."""
    return f"{PREFIX}/{name}/parts/{part[0]}-of-{part[1]}"


def object_prefix(name: str, nonce: str) -> str:
    """Where the objects of one writer are; ends without a slash."""
    return f"{PREFIX}/{name}/{nonce}"


def shard_key(name: str, nonce: str, stream: int, shard: int) -> str:
    """Key of a shard's records."""
    return f"{object_prefix(name, nonce)}/stream-{stream}/{shard:06d}"


def side_key(name: str, nonce: str, stream: int, shard: int) -> str:
    """Key of a shard's side object."""
    return f"{shard_key(name, nonce, stream, shard)}.side"


def pages_key(name: str, nonce: str, stream: int) -> str:
    """Key of a stream's page object."""
    return f"{object_prefix(name, nonce)}/stream-{stream}/pages"


def column_key(name: str, nonce: str, column: str, cut: int) -> str:
    """Key of a column object; `column` is the number of the field, or ORDER."""
    return f"{object_prefix(name, nonce)}/column-{column}/{cut:06d}"


def nonce_of(name: str, key: str) -> str | None:
    """The nonce of the writer that put an object of this dataset; None for other keys."""
    rest = key.removeprefix(f"{PREFIX}/{name}/").split("/")
    return rest[0] if len(rest) > 1 and _NONCE.fullmatch(rest[0]) else None


def dataset_of(key: str) -> str | None:
    """The dataset, published or not, that an object belongs to by the form of its key."""
    found = _OBJECT.fullmatch(key)
    return None if found is None else found[1]


def column_names(fields: Sequence[str], scalars: Sequence[str]) -> dict[str, str]:
    """Name of each scalar's column in keys: the number of its field."""
    return {name: str(list(fields).index(name)) for name in scalars}
