"""Parsers of data sets and of caches."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from hpstore.errors import HpstoreError, ObjectNotFound
from hpstore.loaders.cache.cache_counters import CacheTally
from hpstore.loaders.cache.disk_file import DiskFile
from hpstore.loaders.cache.disk_tier import _holder
from hpstore.loaders.cache.saved_policy import load_learned, save_learned
from hpstore.loaders.dataset.dataset_manifest import (
    DatasetManifest,
    DatasetPart,
    StreamShards,
    dataset_of,
    nonce_of,
)
from hpstore.loaders.dataset.fields import Field, stored_fields
from hpstore.loaders.dataset.index_tables import (
    SIDE_MAGIC,
    decode_tables,
    encode_tables,
    side_dtypes,
)
from hpstore.loaders.dataset.record_layout import FixedPlan, Record, group_fields
from hpstore.loaders.dataset.record_reader import StoredData
from hpstore.loaders.ingestion.ingest_journal import Progressed, Skipped
from hpstore.loaders.ingestion.write_order import IngestPosition
from hpstore.loaders.policy import CachePolicy
from hpstore.loaders.zarr_views.dataset_views import is_chunk, names_within
from hpstore.runtime.local_messages import Lost, receive
from tests.fuzz.engine import Target
from tests.fuzz.pool_targets import record, scratch
from tests.fuzz.weight_file_targets import zip_body, zip_file

FIELDS = {"x": Field("float32", (64,)), "label": Field("int64"), "text": Field("str")}
KINDS = {
    "age": Field("int64", optional=True),
    "meta": Field("json", optional=True),
    "chat": Field("chat"),
    "tags": Field("str", (None,)),
    "sound": Field("audio", media_type="audio/flac"),
}
_ROWS = 40


def part(fields: dict[str, Field], rows: int, nonce: str) -> DatasetPart:
    streams = []
    for one in group_fields(fields, "rows")[1].values():
        payload = 9000 if one.ragged else FixedPlan.of(one, 1 << 20).payload_bytes(rows)
        made = StreamShards(
            unit_bytes=1 << 20,
            rows=(rows,),
            payload=(payload,),
            side=("0" * 16,),
            pages="0" * 16 if one.ragged else "",
        )
        streams.append(made)
    stored = stored_fields(fields).values()
    columns = {str(n): ("1" * 16,) for n, f in enumerate(stored) if f.kind == "scalar"}
    return DatasetPart(
        nonce=nonce, rows=rows, streams=tuple(streams), cuts=(rows,), columns=columns, content="c"
    )


def dataset(fields: dict[str, Field], compression: str = "") -> DatasetManifest:
    return DatasetManifest(
        fields=fields,
        layout="rows",
        data=4,
        compression=compression,
        shuffle_seed=1,
        metadata={"classes": ["a"]},
        content="c",
        parts=(part(fields, _ROWS, "0" * 16), part(fields, _ROWS // 2, "1" * 16)),
    )


def dataset_seeds() -> list[bytes]:
    fixed = {"x": Field("float32", (64,)), "label": Field("int64")}
    return [
        dataset(FIELDS).encode(),
        dataset(fixed).encode(),
        dataset(FIELDS, "lz4").encode(),
        dataset({"label": Field("int64")}).encode(),
        dataset(KINDS).encode(),
    ]


def dataset_sealed(parts: Sequence[bytes]) -> bytes:
    """With the fingerprint that fits, too, where there can be one."""
    from hpstore.format.records import seal

    body = json.loads(parts[0])
    with contextlib.suppress(Exception):
        facts = {
            "fields": body["fields"],
            "layout": body["layout"],
            "content": body["content"],
            "rows": sum(p["rows"] for p in body["parts"]),
        }
        body["rows"] = facts["rows"]
        made = DatasetManifest(
            fields={str(n): Field.from_json(raw) for n, *raw in body["fields"]},
            data=4,
            layout=str(body["layout"]),
            compression="",
            shuffle_seed=None,
            metadata={},
            parts=(),
            content=str(body["content"]),
        )
        body["fingerprint"] = SimpleFingerprint(made, facts["rows"]).hex()
    return seal(body)


class SimpleFingerprint:
    """That of a manifest without its parts."""

    def __init__(self, made: DatasetManifest, rows: int) -> None:
        self._made, self._rows = made, rows

    def hex(self) -> str:
        from hpstore.format.checksum import digest128

        facts = {**self._made.schema(), "rows": self._rows, "content": self._made.content}
        return digest128(json.dumps(facts, sort_keys=True).encode()).hex()


class Nothing:
    """A pool without objects, as far as StoredData looks at it."""

    def get(self, key: str) -> bytes:
        raise ObjectNotFound(key)

    stat = get


def take_dataset(data: bytes) -> None:
    found = DatasetManifest.decode(data, where="x")
    stored = StoredData(Nothing(), "d", found)  # type: ignore[arg-type]
    for stream in stored.streams:
        for look in (lambda s=stream: stored.pages(s), lambda: stored.stripes()):
            with contextlib.suppress(HpstoreError):
                look()
    stored.close()


def journal() -> bytes:
    return Progressed(
        source="f",
        plan={"a": 1},
        place=IngestPosition(position=5),
        parts=(part(FIELDS, _ROWS, "0" * 16),),
        skipped=(Skipped(name="n", origin=4, problem="p"),),
        nbytes=5,
        writing=("2" * 16,),
    ).encode()


def take_journal(data: bytes) -> None:
    found = Progressed.decode(data, where="x")
    assert found.rows >= 0
    Progressed.decode(found.encode(), where="x")


SIDE = Record({"text": Field("str"), "x": Field("float32", (64,))})


def side_seeds() -> list[bytes]:
    tables = [np.arange(5).astype(d) for d in side_dtypes(SIDE)]
    return [encode_tables(SIDE_MAGIC, tables)]


def take_side(data: bytes) -> None:
    decode_tables(SIDE_MAGIC, data, side_dtypes(SIDE), 5, where="x")


def _part(data: bytes) -> Any:  # Any: stands for a DiskPart
    path = scratch("c.learned.npz", data)
    return SimpleNamespace(
        file=SimpleNamespace(stem=str(path)[: -len(".learned.npz")]),
        tier=SimpleNamespace(refuse=print),
    )


def policy() -> CachePolicy:
    return CachePolicy(4096, 50, 4096 * 10, jobs=8)


def learned_seeds() -> list[bytes]:
    part = _part(b"")
    made = policy()
    made.access(0, np.arange(20))  # with scores of rules
    save_learned(part, "id", made.state_arrays(), CacheTally())
    return [Path(f"{part.file.stem}.learned.npz").read_bytes()]


def take_learned(data: bytes) -> None:
    arrays = load_learned(_part(data), "id", CacheTally())
    if arrays is not None:
        made = policy()
        made.restore(arrays, residents=np.empty(0, np.int64))
        made.expected_use(np.arange(50))
        made.access(0, np.arange(30))


def message(facts: object, raw: bytes = b"") -> bytes:
    text = json.dumps(facts).encode()
    return b"".join(n.to_bytes(4, "little") for n in (len(text), len(raw), 0)) + text + raw


def message_parts(data: bytes) -> list[bytes]:
    size = int.from_bytes(data[:4], "little")
    return [data[12 : 12 + size], data[12 + size :]]


def message_sealed(parts: Sequence[bytes]) -> bytes:
    raw = b"".join(parts[1:])
    return b"".join(n.to_bytes(4, "little") for n in (len(parts[0]), len(raw), 0)) + parts[0] + raw


def take_message(data: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            theirs.send(data[:60000])
        theirs.close()
        try:
            while True:
                found = receive(ours)
                assert isinstance(found.facts, dict)
                for fd in found.fds:
                    os.close(fd)
                found.numbers()
        except Lost:
            return


SOURCE = SimpleNamespace(name="d/rows", identity="id", sizes=5000, block_count=20)


def take_disk_table(data: bytes) -> None:
    stem = str(scratch("disk.table", data))[: -len(".table")]
    made = DiskFile(stem, SOURCE)
    made.read(np.arange(20))
    made.close()
    _holder(data)


def disk_table_seeds() -> list[bytes]:
    stem = str(scratch("disk.table", b""))[: -len(".table")]
    DiskFile(stem, SOURCE).close()
    made = Path(f"{stem}.table").read_bytes()
    return [made, made + (5).to_bytes(8, "little") * 20, b'{"pid": 1, "host": "h", "command": "c"}']


def take_key(data: bytes) -> None:
    key = data.decode(errors="replace")
    is_chunk(key), dataset_of(key), nonce_of("a", key)
    for _ in itertools.islice(names_within(key), 100):
        pass


DATA_TARGETS = [
    Target(
        name="dataset-manifest",
        run=take_dataset,
        seeds=dataset_seeds,
        take_apart=lambda data: [
            json.dumps({k: v for k, v in json.loads(data).items() if k != "digest"}).encode()
        ],
        put_together=dataset_sealed,
    ),
    record("journal", lambda: [journal()], take_journal),
    Target(name="side-tables", run=take_side, seeds=side_seeds),
    Target(
        name="cache-learned",
        run=take_learned,
        seeds=learned_seeds,
        take_apart=zip_body,
        put_together=zip_file,
    ),
    Target(
        name="cache-message",
        run=take_message,
        take_apart=message_parts,
        put_together=message_sealed,
        seeds=lambda: [message({"op": "ask", "told": 1}, bytes(16)), message({"op": "wait"})],
    ),
    Target(name="cache-disk-table", run=take_disk_table, seeds=disk_table_seeds),
    Target(
        name="data-key",
        run=take_key,
        seeds=lambda: [b"data/a/b/0123456789abcdef/stream-0/000001.side", b"data/a/x/c/0/1"],
    ),
]
